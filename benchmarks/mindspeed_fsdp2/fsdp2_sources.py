"""Run on a CPU rank real functions of two FSDP2 trainers, with tokenring's attention and with theirs."""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch_npu_on_cpu
from fsdp2_calls import Case, llm_layer_error, mm_layer_error, part
from gradient_errors import finite, largest_error
from ranks import Here
from torch.distributed.fsdp import fully_shard

from tokenring.integrations.mindspeed_fsdp2 import stop_tokenring, use_tokenring

LLM, MM = "mindspeed_llm.fsdp2", "mindspeed_mm.fsdp"
Result = tuple[float, float | str]  # the error of tokenring's, and of theirs or why it did not run


def start(here: Here, paths: list[str]) -> None:
    """Make the sources importable, without an accelerator."""
    warnings.simplefilter("ignore")  # theirs
    rank, size = str(here.rank), str(here.world_size)
    os.environ |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank}
    os.environ |= {"TRAINING_BACKEND": "mindspeed_fsdp", "NON_MEGATRON": "true"}
    sys.path[:0] = paths
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (its prints, as long as the process lives)
    transformers: Any = import_module("transformers")  # before packages seem to be there that are not
    models_of_it = [f"{name}ForCausalLM" for name, _ in MODELS.values()]
    for name in (
        "PreTrainedTokenizer",
        "ProcessorMixin",
        "DataCollatorForSeq2Seq",
        "Seq2SeqTrainingArguments",
        *models_of_it,
    ):
        getattr(transformers, name)
    import_module("transformers.modeling_flash_attention_utils")
    torch_npu_on_cpu.install()


def both(here: Here, trainer: str, run: Any) -> Result:
    """The error of `run` with tokenring's attention, and with theirs."""
    use_tokenring(trainer, transport=here.base.transport)  # type: ignore[arg-type]
    try:
        ours = run()
    finally:
        stop_tokenring()
    try:
        return ours, run()
    except Exception as error:  # theirs may raise anything
        return ours, f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"


# ---------- MindSpeed-LLM


def llm_state(here: Here, cut: str) -> Any:
    """Its ParallelState, made once, and its arguments."""
    import_module(f"{LLM}.utils.global_vars").set_args(SimpleNamespace(cp_type=cut, cp_size=here.world_size))
    size = here.world_size
    return import_module(f"{LLM}.distributed.parallel_state").ParallelState(
        data_parallel_size=1, fully_shard_parallel_size=size, tensor_parallel_size=1, context_parallel_size=size,
        expert_parallel_size=1, expert_fully_shard_parallel_size=size, expert_data_parallel_size=1,
    )  # fmt: skip


def llm_call(here: Here, case: Case) -> Result:
    """A call of its attention function, of tokens that its trainer has cut."""
    state = llm_state(here, str(case.cut))
    check_cut(here, case, state)
    home = import_module(f"{LLM}.distributed.context_parallel.context_parallel_functions")

    def run() -> float:
        model = SimpleNamespace(eager_attention_forward=home.context_parallel_attention_forward)
        return llm_layer_error(here, case, "cpu", model)

    return both(here, "mindspeed_llm", run)


def llm_batch(state: Any, cut: str, batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
    """This rank's part of a batch, by its trainer, and the tokens with labels."""
    trainer = import_module(f"{LLM}.train.trainer").Trainer
    fake = SimpleNamespace(args=SimpleNamespace())
    fake._get_num_items_in_batch = lambda samples: trainer._get_num_items_in_batch(fake, samples)
    fake._get_batch_samples = lambda *given: trainer._get_batch_samples(fake, *given)
    take = trainer._get_batch_samples_megatron if cut == "ring" else trainer._get_batch_samples_ulysses
    (found,), _, items = take(fake, state, iter([dict(batch)]), 1)
    return found, items


def check_cut(here: Here, case: Case, state: Any) -> None:
    """Raise AssertionError unless its trainer cuts as the tests take it to."""
    numbers = torch.arange(case.tokens)[None]
    found, _ = llm_batch(state, str(case.cut), {"input_ids": numbers, "labels": numbers.clone()})
    wanted = part(case, numbers, here.rank, here.world_size)
    assert torch.equal(found["input_ids"], wanted), (found["input_ids"], wanted)


SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_implementation": "eager",
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # model_type → transformers' name of it, and its sizes
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 8}),
    "qwen2": ("Qwen2", SIZES),
    "qwen3_moe": ("Qwen3Moe", {**SIZES, **EXPERTS, "head_dim": 8}),
    "deepseek_v3": (  # multi-latent attention: 12 elements of q and k, 8 of v
        "DeepseekV3",
        {
            **SIZES, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 2,
        },
    ),
}  # fmt: skip


def models(here: Here) -> list[tuple[str, float, bool]]:
    """A step of small models of transformers, into which its manager puts the attention; errors of their gradients."""
    found = []
    for kind in MODELS:
        for cut, packed in (("ulysses", False), ("ulysses", True), ("ring", False)):
            for trainer in ("mindspeed_llm", None):
                whose = "tokenring" if trainer else "theirs"
                name = f"{kind}, 2 layers, {cut}{', packed' if packed else ''}, {whose}"
                try:
                    error = _model_error(here, kind, cut, packed, trainer)
                except Exception as raised:
                    if trainer:
                        raise
                    name, error = f"{name}: {raised}", float("nan")
                found.append((name, error, trainer is not None))
    error = _model_error(here, "qwen3", "ulysses", True, "mindspeed_llm", sharded=True)
    found.append(("qwen3, 2 layers, ulysses, packed, fully_shard and recomputation, tokenring", error, True))
    return found


def _model(kind: str) -> Any:
    transformers: Any = import_module("transformers")
    name, sizes = MODELS[kind]
    torch.manual_seed(4)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))
    model.set_experts_implementation("eager")  # the grouped product has no float64
    return model


def _model_error(here: Here, kind: str, cut: str, packed: bool, trainer: Any, sharded: bool = False) -> float:
    """The largest relative error of a gradient, the ranks' added up.

    sharded: by torch's FSDP2, which takes their mean.
    """
    made = torch.Generator().manual_seed(6)
    ids = torch.randint(61, (1, 48), generator=made)
    ends = [9, 10, 31, 48] if packed else [48]
    wanted = _alone(kind, ids, ends)
    state = llm_state(here, cut)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if packed:
        batch["actual_seq_len"] = torch.tensor(ends)
        batch["position_ids"] = _positions(ends)
    inputs, items = llm_batch(state, cut, batch)
    if trainer is not None:
        use_tokenring(trainer, transport=here.base.transport, schedule="ring")
    modeling = import_module(f"transformers.models.{kind}.modeling_{kind}")
    losses = import_module("transformers.loss.loss_utils")
    kept = modeling.eager_attention_forward, losses.fixed_cross_entropy
    try:
        model = _model(kind)
        config = import_module(f"{LLM}.distributed.parallel_engine_config").CPPlanConfig(context_parallel_type=cut)
        import_module(f"{LLM}.distributed.context_parallel.context_parallel_manager").apply_context_parallelize_modules(
            model, config
        )
        assert modeling.eager_attention_forward is not kept[0]
        if sharded:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
            for layer in model.model.layers:
                fully_shard(layer, mesh=state.get_device_mesh("cp"))
            fully_shard(model, mesh=state.get_device_mesh("cp"))
        loss = model(**inputs, num_items_in_batch=items, use_cache=False).loss
        (loss * here.world_size if sharded else loss).backward()  # train/trainer.py:498
    finally:
        stop_tokenring()
        modeling.eager_attention_forward, losses.fixed_cross_entropy = kept
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if not sharded:
            dist.all_reduce(parameter.grad)
        found[name] = parameter.grad.full_tensor() if sharded else parameter.grad
    return largest_error(found, wanted)[0]


def _positions(ends: list[int]) -> torch.Tensor:
    starts = [0, *ends[:-1]]
    return torch.cat([torch.arange(stop - start) for start, stop in zip(starts, ends, strict=True)])[None]


def _alone(kind: str, ids: torch.Tensor, ends: list[int]) -> dict[str, torch.Tensor]:
    """Gradients of one process in float64."""
    model, length = _model(kind).double(), ids.shape[1]
    document = torch.bucketize(torch.arange(length), torch.tensor(ends), right=True)
    seen = (document[:, None] == document) & torch.ones(length, length).tril().bool()
    mask = torch.zeros(1, 1, length, length, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    logits = model(input_ids=ids, attention_mask=mask, position_ids=_positions(ends), use_cache=False).logits[0]
    items = int((ids != -100).sum())
    torch.nn.functional.cross_entropy(logits, labels[0], ignore_index=-100, reduction="sum").div(items).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


# ---------- MindSpeed-MM


def mm_state(ring: int, ulysses: int) -> Any:
    """Its ParallelState, made anew, over CPU ranks."""
    device = import_module(f"{MM}.utils.device")
    device.get_device_type = lambda: "cpu"
    state = import_module(f"{MM}.distributed.parallel_state")
    state.get_device_type = device.get_device_type
    import_module(f"{MM}.utils.decorators").Singleton._instances.clear()
    size = ring * ulysses
    return state.init_parallel_state(
        data_parallel_size=1, fully_shard_parallel_size=size, ring_attention_size=ring, ulysses_parallel_size=ulysses,
        expert_fully_shard_parallel_size=size,
    )  # fmt: skip


def mm_call(here: Here, case: Case) -> Result:
    """A call of its attention function, as transformers' registry has it, of tokens that its functions have cut."""
    assert isinstance(case.cut, tuple)
    mm_state(*case.cut)
    home = import_module(f"{MM}.ops.flash_attn.flash_attn")
    moves = import_module(f"{MM}.distributed.context_parallel.communication")
    home.apply_transformers_attention_patch()
    numbers = torch.arange(case.tokens, dtype=torch.float32)[None]
    if case.each_document:
        mine = moves.packed_data_split_forward_gather_backward_with_cp(numbers, dim=1, seq_lens=list(case.documents))
    else:
        mine = moves.split_forward_gather_backward_with_cp(numbers, dim=1)
    assert torch.equal(mine, part(case, numbers, here.rank, here.world_size)), mine
    return both(here, "mindspeed_mm", lambda: mm_layer_error(here, case, "cpu", home.ALL_ATTENTION_FUNCTIONS))


def wan(here: Here) -> list[tuple[str, float, bool]]:
    """Its Wan's self-attention on all ranks, whole tokens in and out; theirs attends in bfloat16 on a CPU."""
    size, found = here.world_size, []
    for ring, ulysses, tokens in ((1, size, 32), (size, 1, 32), (1, size, 34)):
        mm_state(ring, ulysses)
        module = import_module(f"{MM}.models.wan2_2.modeling_wan2_2")
        for ours in (True, False) if tokens % size == 0 else (True,):  # Gloo gathers equal parts alone
            name = f"Wan's self-attention, ring {ring} x ulysses {ulysses}, {tokens} tokens"
            try:
                if ours:
                    use_tokenring("mindspeed_mm", transport=here.base.transport)
                error = _wan_error(module, tokens, size)
            except Exception as raised:
                if ours:
                    raise
                found.append((f"{name}, theirs: {raised}", float("nan"), False))
                continue
            finally:
                stop_tokenring()
            found.append((f"{name}, {'tokenring' if ours else 'theirs'}", error, ours))
    return found


def _wan_error(module: Any, tokens: int, heads: int) -> float:
    torch.manual_seed(5)
    layer = module.WanSelfAttention(8 * heads, heads)
    right = module.WanSelfAttention(8 * heads, heads).double()
    right.load_state_dict(layer.state_dict())
    x = torch.randn(2, tokens, 8 * heads)
    freqs = torch.polar(torch.ones(2, tokens, 1, 4, dtype=torch.float64), torch.rand(2, tokens, 1, 4).double())
    seen = torch.sin(torch.arange(x.numel())).view_as(x)
    x, whole = x.requires_grad_(), x.detach().double().requires_grad_()
    out = layer(x, torch.tensor([tokens, tokens]), None, freqs)
    (out * seen).sum().backward()
    shape = (2, tokens, heads, 8)
    q, k = right.norm_q(right.q(whole)), right.norm_k(right.k(whole))
    q, k = (_turned(each.view(shape), freqs).transpose(1, 2) for each in (q, k))
    v = right.v(whole).view(shape).transpose(1, 2)
    wanted = right.o(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    (wanted * seen).sum().backward()
    pairs = [(out, wanted), (x.grad, whole.grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(layer.parameters(), right.parameters(), strict=True)]
    largest = max(float(b.norm()) for _, b in pairs[1:])
    return max(finite((a.double() - b).norm() / max(float(b.norm()), 1e-2 * largest)) for a, b in pairs)


def _turned(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings, in float64."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * freqs).flatten(3)
