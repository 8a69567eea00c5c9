"""MindSpeed's own patch machinery with ours in it, on emulated NPUs. Needs MINDSPEED_SRC and MEGATRON_SRC: checkouts of
MindSpeed and of the Megatron-LM that it is for (docs/mindspeed.md says how to get them, and what was run with which).
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import mindspeed_layer as layer
import mindspeed_npu
import pytest
import torch
import torch.distributed as dist
from ascend.hccl_ledger import ledger
from ascend.ranks import NpuPools
from ranks import Here, RankError, Ranks
from test_cluster import flags_of, pretrain_command

from tokenring.errors import ConfigurationError

SOURCES = {name: os.environ.get(name, "") for name in ("MINDSPEED_SRC", "MEGATRON_SRC")}
pytestmark = [
    pytest.mark.skipif(not all(SOURCES.values()), reason="MINDSPEED_SRC and MEGATRON_SRC do not name checkouts"),
    pytest.mark.timeout(300),
]
IS_WHOLE = Path(SOURCES["MINDSPEED_SRC"], "mindspeed", "te").is_dir()
whole = pytest.mark.skipif(not IS_WHOLE, reason="since core_r0.17 attention is in a package that is not public")
IMPORT_SECONDS = 200.0
RANKS = 2
SPEC = ["tokenring_layer", "layer"]
FLAGS = (
    "--context-parallel-attention tokenring --context-parallel-algo megatron_cp_algo --attention-dropout 0 "
    f"--hidden-dropout 0 --context-parallel-size {RANKS} --tensor-model-parallel-size 1 --num-layers 2 "
    "--hidden-size 64 "
    f"--num-attention-heads {layer.HEADS} --group-query-attention --num-query-groups {layer.KV_HEADS} "
    f"--kv-channels {layer.DIM} --seq-length {layer.LENGTH} --max-position-embeddings {layer.LENGTH} "
    "--position-embedding-type rope --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 64 --transformer-impl local --use-cpu-initialization "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-bias-swiglu-fusion --no-rope-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --distributed-backend gloo --use-mcore-models"
).split()  # fmt: skip


def load(here: Here, sources: dict[str, str], flags: list[str]) -> Any:
    """Everything up to Megatron's arguments, once in a process: our import, MindSpeed's, parsing, and groups."""
    if "arguments" in here.memory:
        return here.memory["arguments"]
    warnings.simplefilter("ignore")  # theirs
    os.environ |= {"RANK": str(here.rank), "WORLD_SIZE": str(here.world_size), "LOCAL_RANK": str(here.rank)}
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    sys.argv[1:] = flags
    sys.path[:0] = list(sources.values())
    mindspeed_npu.install(here)
    import_module("tokenring.integrations.mindspeed")
    import_module("mindspeed.megatron_adaptor")
    here.memory["arguments"] = None
    return None


def parse(here: Here, sources: dict[str, str], flags: list[str]) -> Any:
    """Megatron's arguments, parsed and validated with MindSpeed's and ours among them; and Megatron's groups."""
    if load(here, sources, flags) is None:
        arguments = import_module("megatron.training.arguments")
        parsed = arguments.parse_args()
        parsed = arguments.validate_args(parsed)
        import_module("megatron.training.global_vars").set_args(parsed)
        state = import_module("megatron.core.parallel_state")
        with pytest.MonkeyPatch.context() as patched:  # the pool's world is of Gloo, where on NPUs it is of HCCL
            patched.setattr(dist, "new_group", partial(_of_npus, dist.new_group))
            state.initialize_model_parallel(context_parallel_size=here.world_size)
        here.memory["arguments"] = parsed
    return here.memory["arguments"]


def _of_npus(make: Any, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
    return make(*args, backend=backend or "hccl", **kwargs)


@pytest.fixture(scope="module")
def started(npus: NpuPools) -> Any:
    """Ranks in which all is imported."""
    made = npus(RANKS)
    made.within(IMPORT_SECONDS, load, SOURCES, FLAGS)
    return made


def replaced(here: Here) -> dict[str, list[str]]:
    """The classes above Megatron's attentions, in their own modules and in its layer specs."""
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    held = {
        "local": import_module("megatron.core.transformer.dot_product_attention").DotProductAttention,
        "engine": import_module("megatron.core.extensions.transformer_engine").TEDotProductAttention,
        "spec, local": core_of(specs.get_gpt_layer_local_spec()),
        "spec, engine": core_of(specs.get_gpt_layer_with_transformer_engine_spec()),
    }
    return {place: [each.__name__ for each in made.__mro__] for place, made in held.items()}


def core_of(spec: Any) -> Any:
    """The core attention in a layer spec of Megatron's."""
    return spec.submodules.self_attention.submodules.core_attention


def test_attentions_are_replaced(started: Any) -> None:
    for found in started(replaced):
        for place, classes in found.items():
            wanted = IS_WHOLE or "engine" in place
            assert ("TokenRingAttention" in classes) is wanted, (place, classes)


def features(here: Here) -> list[str]:
    manager = import_module("mindspeed.features_manager").MindSpeedFeaturesManager
    return [each.feature_name for each in manager.FEATURES_LIST]


def test_feature_is_registered_once_and_last(started: Any) -> None:
    for found in started(features):
        assert found[-1] == "context_parallel_attention" and found.count(found[-1]) == 1
        assert len(found) > 20


def parsed(here: Here) -> dict[str, Any]:
    args = parse(here, SOURCES, FLAGS)
    names = ("context_parallel_attention", "tokenring_schedule", "context_parallel_algo", "context_parallel_size")
    return {name: getattr(args, name) for name in names}


@whole
def test_arguments_are_parsed_and_validated(started: Any) -> None:
    wanted = {
        "context_parallel_attention": "tokenring", "tokenring_schedule": "auto",
        "context_parallel_algo": "megatron_cp_algo", "context_parallel_size": RANKS,
    }  # fmt: skip
    assert started(parsed) == [wanted] * RANKS


def conflicting(here: Here, change: dict[str, Any]) -> str:
    """What a TransformerConfig with one attribute changed is told by all features' validation."""
    parse(here, SOURCES, FLAGS)
    try:
        config_of(here, **change)
    except ConfigurationError as error:
        return str(error)
    return ""


@whole
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"attention_dropout": 0.1}, "--attention-dropout 0.1 does not go with --context-parallel-attention tokenring"),
        ({"attention_mask_type": "general"}, "--attention-mask-type general does not go with"),
        ({}, ""),
    ],
)
def test_conflicts_are_found_in_a_config(started: Any, change: dict[str, Any], text: str) -> None:
    for found in started(conflicting, change):
        assert found.startswith(text) and bool(found) is bool(text)


def config_of(here: Here, **more: Any) -> Any:
    """Megatron's TransformerConfig, into which MindSpeed puts all arguments."""
    config = import_module("megatron.core.transformer.transformer_config").TransformerConfig
    given = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": layer.HEADS, "num_query_groups": layer.KV_HEADS,
        "kv_channels": layer.DIM, "context_parallel_size": here.world_size, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "cp_comm_type": "p2p", "use_cpu_initialization": True,
    }  # fmt: skip
    return config(**(given | more))


def attention_of(here: Here, **change: Any) -> Any:
    """The core attention of Megatron's local layer spec, as Megatron makes it."""
    core = core_of(import_module("megatron.core.models.gpt.gpt_layer_specs").get_gpt_layer_local_spec())
    build = import_module("megatron.core.transformer.spec_utils").build_module
    mask = import_module("megatron.core.transformer.enums").AttnMaskType.causal
    config = config_of(here, **change)
    return build(core, config=config, layer_number=1, attn_mask_type=mask, attention_type="self", cp_comm_type="p2p")


def layer_errors(here: Here, schedule: str, rotary: str) -> dict[str, float]:
    """A layer with MindSpeed's cuts of batch and rotary embeddings, and the attention of the spec."""
    parse(here, SOURCES, FLAGS)
    core = attention_of(here)
    if schedule != "auto":  # then MindSpeed's own is there, too
        core.schedule, core._own = schedule, ()
    utils = import_module("megatron.training.utils")
    embeddings = import_module("megatron.core.models.common.embeddings.rotary_pos_embedding")
    group = import_module("megatron.core.parallel_state").get_context_parallel_group()
    wants_group = embeddings.get_pos_emb_on_this_cp_rank.__code__.co_argcount == 3

    def cut_rotary(turns: torch.Tensor) -> torch.Tensor:
        if rotary == "uncut":  # what an algorithm's name that MindSpeed does not know leaves
            return turns[: layer.LENGTH // here.world_size]
        more = (group,) if wants_group else ()
        cut: torch.Tensor = embeddings.get_pos_emb_on_this_cp_rank(turns, 0, *more)
        return cut

    return layer.errors(
        utils.get_batch_on_this_cp_rank, cut_rotary, lambda q, k, v: core(q, k, v, None, core.attn_mask_type), "npu",
        dist.all_reduce,
    )  # fmt: skip


@whole
@pytest.mark.parametrize("schedule", ["ring", "tokenring", "ulysses"])
def test_layer_is_as_without_context_parallelism(started: Any, schedule: str) -> None:
    for found in started(layer_errors, schedule, "cut"):
        print(schedule, max(found.values()))
        assert max(found.values()) <= layer.LIMIT, found


@whole
def test_rotary_embeddings_that_are_not_cut_are_wrong(started: Any) -> None:
    for found in started(layer_errors, "ring", "uncut"):
        assert found["q"] > 0.1, found


def cut(here: Here) -> list[int]:
    """Which words MindSpeed leaves this rank."""
    parse(here, SOURCES, FLAGS)
    words = torch.arange(layer.LENGTH)[None]
    held = import_module("megatron.training.utils").get_batch_on_this_cp_rank({"tokens": words, "attention_mask": None})
    return held["tokens"][0].tolist()  # type: ignore[no-any-return]


@whole
def test_batch_is_cut_as_attention_expects(started: Any) -> None:
    quarter = layer.LENGTH // 4
    first, second, third, fourth = (list(range(at, at + quarter)) for at in range(0, layer.LENGTH, quarter))
    assert started(cut) == [first + fourth, second + third]


def uncut(here: Here) -> str:
    """An attention that gets the whole sequence on every rank."""
    parse(here, SOURCES, FLAGS)
    core = attention_of(here)
    q = torch.randn(layer.LENGTH, 1, layer.HEADS, layer.DIM).to("npu")
    try:
        core(q, q, q, None, core.attn_mask_type)
    except ConfigurationError as error:
        return str(error)
    return ""


@whole
def test_a_batch_that_was_not_cut_is_refused(started: Any) -> None:
    for text in started(uncut):
        assert "the batch was not cut" in text


def own_gets(here: Here) -> list[str]:
    """What MindSpeed's own attention is called with where the plan is said to save too little."""
    parse(here, SOURCES, FLAGS)
    ours = import_module("tokenring.integrations.mindspeed.attention")
    core = attention_of(here)
    (own,) = core._own
    called: list[Any] = []
    q = torch.randn(layer.LENGTH // here.world_size, 1, layer.HEADS, layer.DIM).to("npu")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ours, "WORTH", 2.0)
        patched.setattr(own, "forward", lambda *call: called.extend(call))
        core(q, q, q, None, core.attn_mask_type)
    assert all(x is q for x in called[:3]) and called[3:] == [None, core.attn_mask_type, None, None]
    return [each.__name__ for each in type(own).__mro__[:2]]


@whole
def test_own_attention_is_mindspeeds(started: Any) -> None:
    assert started(own_gets) == [["MindSpeedCPDotProductAttention", "CPDotProductAttentionImpl"]] * RANKS


def own_layer_errors(here: Here) -> tuple[dict[str, float], Counter[str]]:
    """The same layer where the plan is said to save too little; and how many messages there were, all MindSpeed's."""
    parse(here, SOURCES, FLAGS)
    ledger.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(import_module("tokenring.integrations.mindspeed.attention"), "WORTH", 2.0)
        found = layer_errors(here, "auto", "cut")
    ledger.check_all_waited()
    return found, Counter(each.kind for each in ledger.messages)


def check_own(ranks: Ranks) -> None:
    """Its gradients; and that it is a ring: forward K with V, backward K with V and dK with dV, in P - 1 steps each."""
    for found, messages in ranks(own_layer_errors):
        print("MindSpeed's own", max(found.values()))
        assert max(found.values()) <= layer.LIMIT, found
        assert messages == {"send": 3 * (ranks.world_size - 1), "recv": 3 * (ranks.world_size - 1)}


@whole
def test_own_ring_runs_and_is_right(started: Any) -> None:
    check_own(started)


@whole
def test_own_double_ring_runs_and_is_right(npus: NpuPools) -> None:
    """Four ranks in windows of two; ours with the same windows beside it."""
    flags = [*FLAGS, "--context-parallel-size", "4", "--cp-window-size", "2"]  # what comes last counts
    with npus.expendable(4) as four:
        four.within(IMPORT_SECONDS, load, SOURCES, flags)
        check_own(four)
        for found in four(layer_errors, "double-ring/2", "cut"):
            print("double-ring/2", max(found.values()))
            assert max(found.values()) <= layer.LIMIT, found


def too_late(here: Here, sources: dict[str, str], flags: list[str]) -> None:
    """MindSpeed's import first."""
    sys.argv[1:] = flags
    sys.path[:0] = list(sources.values())
    warnings.simplefilter("ignore")
    mindspeed_npu.install(here)
    import_module("mindspeed.megatron_adaptor")
    import_module("tokenring.integrations.mindspeed")


def test_too_late(npus: NpuPools) -> None:
    """With MindSpeed's own flags alone: with ours Megatron's parser would end the process before."""
    flags = [each for each in FLAGS if each not in ("--context-parallel-attention", "tokenring")]
    with npus.expendable(1) as one, pytest.raises(RankError, match=r"move `import tokenring.integrations.mindspeed`"):
        one.within(IMPORT_SECONDS, too_late, SOURCES, flags)


def read_example(here: Here, sources: dict[str, str], flags: list[str]) -> dict[str, Any]:
    load(here, sources, flags)
    args = import_module("megatron.training.arguments").parse_args()
    names = ("context_parallel_size", "context_parallel_attention", "num_query_groups", "spec")
    return {name: getattr(args, name) for name in names}


@whole
@pytest.mark.parametrize(("vendor", "wanted"), [("ascend", ("tokenring", None)), ("nvidia", ("mindspeed", SPEC))])
def test_examples_have_flags_that_the_parsers_know(
    npus: NpuPools, tmp_path: Path, vendor: str, wanted: tuple[str, list[str] | None]
) -> None:
    flags = flags_of(pretrain_command(tmp_path, vendor))
    with npus.expendable(1) as one:
        (found,) = one.within(IMPORT_SECONDS, read_example, SOURCES, flags)
    assert found == {
        "context_parallel_size": 4, "context_parallel_attention": wanted[0], "num_query_groups": 8, "spec": wanted[1],
    }  # fmt: skip


def layer_of_example(here: Here) -> list[str]:
    """The core attention in examples/megatron_lm's layer."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "megatron_lm"))
    core = core_of(import_module("tokenring_layer").layer)
    return [core.module.__name__, core.params["schedule"]]


def test_layer_of_the_megatron_example(started: Any) -> None:
    assert started(layer_of_example) == [["TokenRingAttention", "auto"]] * RANKS
