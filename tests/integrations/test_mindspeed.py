"""MindSpeed's surface, by a stand-in: what is registered, replaced, refused and said, and a layer on two ranks.

With MindSpeed's own source the same is done in test_mindspeed_real.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspeed_layer as layer
import pytest
import torch
import torch.distributed as dist
from mindspeed_like import BATCH, DPA, OURS, ROTARY, SPECS, TE, LikeMindSpeed, OwnAttention, like_mindspeed, without
from ranks import Here, RankPools
from said import said

from tokenring import BackendUnavailable, ConfigurationError, TokenRingError, UnsupportedError
from tokenring.integrations.megatron import TokenRingAttention
from tokenring.planner.choosing.candidates import Candidate

ASKED = ("--context-parallel-attention", "tokenring", "--context-parallel-size", "2")
REPO = Path(__file__).resolve().parents[2]
CAUSAL = SimpleNamespace(name="causal")
UNLISTED = "its features_manager has no list with context parallelism in it"


@pytest.fixture
def mindspeed() -> Iterator[LikeMindSpeed]:
    with like_mindspeed() as made:
        yield made


def attentions() -> list[Any]:
    """Megatron's two, as its specs see them."""
    specs = sys.modules[SPECS]
    assert specs.DotProductAttention is sys.modules[DPA].DotProductAttention
    assert specs.TEDotProductAttention is sys.modules[TE].TEDotProductAttention
    return [specs.DotProductAttention, specs.TEDotProductAttention]


class TestFeature:
    def test_both_attentions_are_replaced(self, mindspeed: LikeMindSpeed) -> None:
        import_module(OURS)
        args = mindspeed.import_adaptor(*ASKED)
        assert args.context_parallel_algo == "megatron_cp_algo" and args.tokenring_schedule == "auto"
        local, engine = attentions()
        assert local is engine and issubclass(local, TokenRingAttention)

    def test_without_the_flag_mindspeeds_own_stay(self, mindspeed: LikeMindSpeed) -> None:
        import_module(OURS)
        mindspeed.import_adaptor("--context-parallel-size", "2")
        assert attentions() == [OwnAttention, OwnAttention]

    def test_without_context_parallelism_nothing_is_replaced(self, mindspeed: LikeMindSpeed) -> None:
        import_module(OURS)
        before = attentions()
        mindspeed.import_adaptor("--context-parallel-attention", "tokenring", "--context-parallel-size", "1")
        assert attentions() == before

    def test_a_patch_that_is_not_forced_is_refused(self, mindspeed: LikeMindSpeed) -> None:
        """What the stand-in is there for."""
        mindspeed.import_adaptor("--context-parallel-size", "2")
        with pytest.raises(RuntimeError, match="exist"):
            mindspeed.patches.register_patch(f"{DPA}.DotProductAttention", TokenRingAttention)

    def test_registers_once(self, mindspeed: LikeMindSpeed) -> None:
        module = import_module(OURS)
        module.register()
        assert [each.feature_name for each in mindspeed.features[1:]] == ["context_parallel_attention"]

    def test_split_releases_have_one_attention(self) -> None:
        with like_mindspeed("split") as mindspeed:
            import_module(OURS)
            local, engine = attentions()
            mindspeed.import_adaptor(*ASKED)
            now = attentions()
            assert now[0] is local and issubclass(now[1], TokenRingAttention)
            made = now[1](**arguments())
            assert [type(each) for each in made._own] == [engine]

    def test_own_attention_is_told_what_megatron_tells(self, mindspeed: LikeMindSpeed) -> None:
        import_module(OURS)
        mindspeed.import_adaptor(*ASKED)
        given = arguments()
        made = attentions()[0](**given)
        assert made._own[0].given == given
        assert dict(made.state_dict()) == {} and list(made.children()) == []

    def test_a_schedule_by_name_has_no_other(self, mindspeed: LikeMindSpeed) -> None:
        import_module(OURS)
        mindspeed.import_adaptor(*ASKED, "--tokenring-schedule", "bidirectional")
        made = attentions()[0](**arguments())
        assert made._own == () and made.schedule == "bidirectional"


def arguments(**config: Any) -> dict[str, Any]:
    """What Megatron makes an attention with. Of one rank, so that it needs no group."""
    return {
        "config": layer.config(1, **config), "layer_number": 1, "attn_mask_type": CAUSAL, "attention_type": "self",
        "attention_dropout": None, "softmax_scale": None, "cp_comm_type": "p2p",
    }  # fmt: skip


def test_the_adapter_is_small() -> None:
    files = (REPO / "tokenring/integrations/mindspeed").glob("*.py")
    assert sum(len(each.read_text().splitlines()) for each in files) < 400


class TestImport:
    def test_too_late(self, mindspeed: LikeMindSpeed) -> None:
        mindspeed.import_adaptor("--context-parallel-size", "2")
        with pytest.raises(ConfigurationError) as error:
            import_module(OURS)
        assert str(error.value) == (
            "tokenring.integrations.mindspeed was imported after mindspeed.megatron_adaptor, which had applied its "
            "features by then: move `import tokenring.integrations.mindspeed` above it, to the first line of the "
            "training script"
        )

    def test_missing(self) -> None:
        with without("mindspeed", OURS) as patched:
            patched.setattr(sys, "path", [str(REPO)])
            check_unavailable(
                "there is no MindSpeed here: install it from its git repository (Ascend/MindSpeed), in the branch for "
                "your Megatron-core; what PyPI has under that name is an empty placeholder"
            )

    def test_placeholder(self, tmp_path: Path) -> None:
        text = "raise RuntimeError('This project is not functional and is a placeholder')"
        with package(tmp_path, text):
            check_unavailable(
                "this MindSpeed does nothing: install it from its git repository (Ascend/MindSpeed), in the branch for "
                "your Megatron-core; what PyPI has under that name is an empty placeholder"
            )

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (None, "No module named 'mindspeed.features_manager'"),
            ("", UNLISTED),
            ("class MindSpeedFeature: pass\nclass MindSpeedFeaturesManager: FEATURES_LIST = []", UNLISTED),
        ],
    )
    def test_unknown_release(self, tmp_path: Path, content: str | None, why: str) -> None:
        with package(tmp_path, "", content):
            check_unavailable(
                f"this release of MindSpeed is not one that tokenring knows: {why}; it knows those for Megatron-core "
                f"0.12.1 and 0.14 to 0.16, and core_r0.17 and core_r0.18"
            )

    def test_release_without_its_attention(self, mindspeed: LikeMindSpeed) -> None:
        import_module(OURS)
        del sys.modules["mindspeed.core.context_parallel.adaptor"].MindSpeedCPDotProductAttention
        with pytest.raises(BackendUnavailable, match=r"not one that tokenring knows: .*MindSpeedCPDotProductAttention"):
            mindspeed.import_adaptor(*ASKED)

    def test_broken(self, tmp_path: Path) -> None:
        with package(tmp_path, "", "import a_torch_npu_that_is_missing"):
            check_unavailable(
                "MindSpeed cannot be imported (No module named 'a_torch_npu_that_is_missing'): `tokenring doctor` may "
                "tell why"
            )


class package:
    """A mindspeed on the import path."""

    def __init__(self, folder: Path, text: str, features_manager: str | None = None) -> None:
        made = folder / "mindspeed"
        made.mkdir()
        (made / "__init__.py").write_text(text)
        if features_manager is not None:
            (made / "features_manager.py").write_text(features_manager)
        self.folder, self.without = folder, without("mindspeed", OURS)

    def __enter__(self) -> None:
        self.without.__enter__().syspath_prepend(str(self.folder))

    def __exit__(self, *why: Any) -> None:
        self.without.__exit__(*why)


def check_unavailable(text: str) -> None:
    with pytest.raises(BackendUnavailable) as error:
        import_module(OURS)
    assert str(error.value) == text


# ---------- on ranks


def ready(mindspeed: LikeMindSpeed, *more: str, **config: Any) -> Any:
    """An attention of these ranks, through the patches."""
    import_module(OURS)
    mindspeed.import_adaptor(*ASKED[:2], "--context-parallel-size", str(dist.get_world_size()), *more)
    return attentions()[0](**arguments() | {"config": layer.config(dist.get_world_size(), **config)})


def layer_errors(here: Here, algorithm: str, schedule: str) -> dict[str, float]:
    with like_mindspeed() as mindspeed:
        core = ready(mindspeed, "--context-parallel-algo", algorithm, "--tokenring-schedule", schedule)
        return errors_of(core, seq_dim=0)


def errors_of(core: Any, seq_dim: int) -> dict[str, float]:
    return layer.errors(
        sys.modules[BATCH].get_batch_on_this_cp_rank,
        lambda x: sys.modules[ROTARY].get_pos_emb_on_this_cp_rank(x, seq_dim),
        lambda q, k, v: core(q, k, v, None),
        "cpu",
        dist.all_reduce,
    )


@pytest.mark.parametrize("schedule", ["tokenring", "ring"])
def test_layer_is_as_without_context_parallelism(ranks: RankPools, schedule: str) -> None:
    for found in ranks(2)(layer_errors, "megatron_cp_algo", schedule):
        assert max(found.values()) <= layer.LIMIT, found


def test_another_cut_is_wrong(ranks: RankPools) -> None:
    """The same test refuses a cut that attention does not expect: gradients differ in the first digit."""
    for found in ranks(2)(layer_errors, "ulysses_cp_algo", "ring"):
        assert min(found.values()) > 0.1, found


def uncut(here: Here) -> str:
    try:
        layer_errors(here, "of_a_newcomer", "ring")
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_batch_that_was_not_cut_is_refused(ranks: RankPools) -> None:
    assert ranks(2)(uncut) == [
        "attention gets 64 of a sequence of 64 tokens on each of 2 ranks: the batch was not cut; keep "
        "--context-parallel-algo megatron_cp_algo, and MindSpeed's cutting of batches"
    ] * 2


def compared(here: Here, worth: float, window: int) -> tuple[bool, list[str]]:
    """Whether MindSpeed's own attention ran, and what was said."""
    with like_mindspeed() as mindspeed, pytest.MonkeyPatch.context() as patched:
        import_module(OURS)
        attention = import_module(f"{OURS}.attention")
        patched.setattr(attention, "WORTH", worth)
        patched.setattr("tokenring.integrations.megatron.contexts._KEPT", {})  # nothing was said yet
        core = ready(mindspeed, cp_window_size=window)
        rows = layer.LENGTH // here.world_size
        q, k = (torch.randn(rows, 1, heads, layer.DIM) for heads in (layer.HEADS, layer.KV_HEADS))
        with said() as messages:
            out = [core(q, k, k, None) for _ in range(2)][-1]
        return bool((out == 7).all()), [text for text in messages if not text.startswith("schedule auto")]


def check_announced(topology: str, plan: str) -> None:
    """What rank 0 says first, whoever's attention runs."""
    assert topology == "topology: machine without accelerators"
    kind = "attention of 4 query and 2 kv heads of 16, 1 × 64 tokens in float32, causal, over 4 ranks: "
    assert plan.startswith(kind) and "predict" in plan


@pytest.mark.parametrize(("window", "own"), [(1, "ring"), (2, "double-ring/2")])
def test_own_stays_where_the_plan_saves_little(ranks: RankPools, window: int, own: str) -> None:
    found = ranks(4)(compared, 2.0, window)
    assert [ran for ran, _ in found] == [True] * 4
    *announced, decision = found[0][1]
    check_announced(*announced)
    assert f"MindSpeed's own algorithm ({own}) " in decision
    assert "MindSpeed's own stays (to force it: --tokenring-schedule " in decision
    assert [text for _, text in found[1:]] == [[]] * 3


def test_ours_runs_where_the_plan_saves_enough(ranks: RankPools) -> None:
    found = ranks(4)(compared, -2.0, 1)
    assert [ran for ran, _ in found] == [False] * 4
    *announced, decision = found[0][1]
    check_announced(*announced)
    assert "MindSpeed's own algorithm (ring) " in decision and "stays" not in decision


@pytest.mark.parametrize(("best", "stays"), [(0.9499, False), (0.9501, True), (1.0, True), (1.1, True)])
def test_five_percent(mindspeed: LikeMindSpeed, monkeypatch: pytest.MonkeyPatch, best: float, stays: bool) -> None:
    import_module(OURS)
    attention = import_module(f"{OURS}.attention")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert attention.own_stays(Planned(best), "auto", SimpleNamespace(device=None), layer.config(4)) is stays


class Planned:
    """Contexts whose plans are known: the best takes so long, MindSpeed's own a second."""

    def __init__(self, best_seconds: float) -> None:
        self.seconds = {"auto": best_seconds, "auto:ring": 1.0}

    def context(self, schedule: str, device: object) -> Any:
        name = schedule.removeprefix("auto:")
        others = Candidate("ring/late", 0.5, None, None, None, None, None, "")
        found = (others, Candidate(name, self.seconds[schedule], None, None, None, None, None, ""))
        return SimpleNamespace(agreed_plan=lambda request: SimpleNamespace(name=name, candidates=found))

    def announce(self, schedule: str, request: object) -> None:
        assert schedule == "auto"


def refused_bias(here: Here, first: int = 0) -> str:
    """Ranks from the first on give a bias."""
    with like_mindspeed() as mindspeed:
        core = ready(mindspeed)
        q = torch.randn(layer.LENGTH // 2, 1, layer.HEADS, layer.DIM)
        try:
            core(q, q, q, None, attention_bias=torch.zeros(1) if here.rank >= first else None)
        except TokenRingError as error:
            return str(error)
    return ""


def test_bias_goes_to_nobody(ranks: RankPools) -> None:
    """Not to MindSpeed's own attention either, whatever the plan says."""
    assert [text.partition(":")[0] for text in ranks(2)(refused_bias)] == ["attention_bias is not supported"] * 2


def test_what_one_rank_refuses_all_hear(ranks: RankPools) -> None:
    heard, own = ranks(2)(refused_bias, 1)
    assert "rank 1 refused" in heard and "attention_bias is not supported" in heard, heard
    assert own.startswith("attention_bias is not supported")


def test_dropout_is_refused_by_the_attention_itself(mindspeed: LikeMindSpeed) -> None:
    import_module(OURS)
    mindspeed.import_adaptor(*ASKED)
    with pytest.raises(UnsupportedError, match=r"attention_dropout is 0\.1 .* set config.attention_dropout=0.0"):
        attentions()[0](**arguments(attention_dropout=0.1))
