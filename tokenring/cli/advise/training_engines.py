"""Tables of engines that train: Megatron-core, torchtitan, accelerate (with DeepSpeed), MindSpeed-LLM."""

from __future__ import annotations

from collections.abc import Iterator

from tokenring.cli.advise.choices import (
    Choice,
    Engine,
    Job,
    both_heads,
    plain_causal,
    splits,
    tokens_divide,
    twice_the_ranks,
)
from tokenring.cli.advise.pricing import BY_OPERATORS, BY_OPERATORS_GATHERED, GATHER
from tokenring.cli.models import ModelFacts

FLEX_ROWS = 128  # of a block of FlexAttention's masks, which torch shards whole


# ---------- Megatron-core, with TransformerEngine's attention


def megatron_options(job: Job) -> Iterator[Choice]:
    """Yield what --cp-comm-type takes, and why not."""
    base, model = f"--context-parallel-size {job.ranks} --cp-comm-type", job.model
    yield Choice(f"{base} p2p", "ring", _megatron_never(job) or _windows(model) or _sinks(model))
    yield Choice(f"{base} all_gather", GATHER, _megatron_never(job) or _sinks(model))
    yield Choice(f"{base} a2a", "ulysses", _megatron_never(job) or both_heads(job, job.ranks, "a2a"))
    for inner, outer in splits(job.ranks):
        flags = f"{base} a2a+p2p --hierarchical-context-parallel-sizes {inner} {outer}"
        reason = _megatron_never(job) or _windows(model) or _sinks(model) or both_heads(job, inner, "a2a")
        yield Choice(flags, f"usp/{inner}", reason)


def _megatron_never(job: Job) -> str | None:
    model = job.model
    if not model.causal:
        return "Megatron-core's context parallelism is for causal language models"
    if model.softcap:
        return "no attention of Megatron-core soft-caps scores: results would differ from the model's"
    return "chunked attention is not computed under context parallelism" if model.chunk else None


def _windows(model: ModelFacts) -> str | None:
    return None if model.window is None else "sliding windows only with all_gather or a2a (TransformerEngine)"


def _sinks(model: ModelFacts) -> str | None:
    return "sinks (softmax offset) only with a2a (TransformerEngine)" if model.sinks else None


# ---------- torchtitan: torch's own context parallelism


def torchtitan_options(job: Job) -> Iterator[Choice]:
    """Yield what torchtitan's parallelism section takes, by the attention that the model's config has."""
    model, base = job.model, f"--parallelism.context_parallel_degree {job.ranks}"
    balancer = f"{base} --parallelism.context_parallel_load_balancer"
    if not model.causal:
        yield Choice(f"{balancer} None", GATHER, None, BY_OPERATORS_GATHERED)
        return
    sdpa = plain_causal(model, "scaled dot-product attention under context parallelism")
    yield Choice(f"{balancer} headtail", GATHER, sdpa, BY_OPERATORS_GATHERED)
    flex = "FlexAttention's score_mod raises under context parallelism" if model.softcap else None
    blocks = tokens_divide(job, FLEX_ROWS * job.ranks, "FlexAttention's masks are sharded in blocks of 128")
    # A model of several kinds of layers has a mask of each, and torchtitan balances by the one that is named.
    mask = " --parallelism.context_parallel_ptrr_mask_key basic_mask" if len(model.layers) > 1 else ""
    yield Choice(f"{balancer} ptrr{mask}", GATHER, flex or blocks)


# ---------- accelerate: torch's context parallelism, or DeepSpeed's Ulysses


def accelerate_options(job: Job) -> Iterator[Choice]:
    """Yield what `accelerate launch` takes, and why not.

    It drops parallelism flags in silence without --use_parallelism_config, which it takes with FSDP 2 alone; for
    DeepSpeed a config file with a parallelism_config stands for it.
    """
    model, ranks = job.model, job.ranks
    never = None if model.causal else "accelerate's context parallelism makes every attention causal"
    plain = never or plain_causal(model, "context parallelism by torch")
    base = (
        f"--use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_cp_size {ranks} "
        "--parallelism_config_cp_comm_strategy"
    )
    yield Choice(f"{base} allgather", GATHER, plain, BY_OPERATORS_GATHERED)
    yield Choice(f"{base} alltoall", "ring", plain, BY_OPERATORS)
    flags = (
        f"--config_file deepspeed.yaml --parallelism_config_sp_size {ranks} --parallelism_config_sp_backend deepspeed"
    )
    implementation = "flash_attention_2" if model.window is not None or model.softcap else "sdpa"
    yield Choice(
        f"{flags} --parallelism_config_sp_attn_implementation {implementation}", "ulysses",
        never or _deepspeed_masks(model) or _deepspeed_heads(job),
    )  # fmt: skip


def _deepspeed_masks(model: ModelFacts) -> str | None:
    if model.chunk is not None:
        return "DeepSpeed's Ulysses drops attention masks: chunks would be ignored"
    return "neither sdpa nor flash_attention_2 has sinks" if model.sinks else None


def _deepspeed_heads(job: Job) -> str | None:
    """Return why heads cannot be dealt; None: they can. It repeats heads of kv where there are fewer than ranks.

    It asserts that a rank has all heads that the config has, and keys of the shape of values.
    """
    if job.tensor_parallel > 1:
        return "DeepSpeed's Ulysses wants all heads on each rank: no tensor parallelism beside it"
    if job.model.value_dim != job.model.head_dim:
        return f"DeepSpeed's Ulysses wants values as wide as keys: {job.model.value_dim} is not {job.model.head_dim}"
    heads, kv_heads = job.heads
    if heads % job.ranks or (kv_heads % job.ranks and job.ranks % kv_heads):
        return f"ulysses over {job.ranks} ranks wants heads that divide: there are {heads} of q and {kv_heads} of kv"
    return None


# ---------- MindSpeed-LLM


def mindspeed_options(job: Job) -> Iterator[Choice]:
    """Yield what --context-parallel-algo takes, and why not."""
    model, ranks, mask = job.model, job.ranks, "" if job.model.causal else " --attention-mask-type general"
    never = _mindspeed_never(job)
    base = f"--context-parallel-size {ranks} --context-parallel-algo"
    ring = f"{mask} --use-fused-ring-attention-update"
    yield Choice(f"{base} megatron_cp_algo{ring}", "ring", never)
    for window, _ in splits(ranks):
        yield Choice(f"{base} megatron_cp_algo --cp-window-size {window}{ring}", f"double-ring/{window}", never)
    yield Choice(
        f"{base} ulysses_cp_algo{mask}", "ulysses", never or _mindspeed_heads(job, ranks), heads=_repeated(job, ranks)
    )
    for inner, _ in splits(ranks):
        flags = f"{base} hybrid_cp_algo --ulysses-degree-in-cp {inner}{ring}"
        yield Choice(flags, f"usp/{inner}", never or _mindspeed_heads(job, inner), heads=_repeated(job, inner))
    causal = None if model.causal else "kvallgather_cp_algo takes causal masks only"
    gathers = " --transformer-impl transformer_engine"  # with the local one each rank attends to its own tokens alone
    yield Choice(f"{base} kvallgather_cp_algo{mask}{gathers}", GATHER, never or causal)


def _mindspeed_never(job: Job) -> str | None:
    model = job.model
    if model.window is not None and job.length > model.window:
        return "MindSpeed-LLM refuses context parallelism with sliding windows"
    if model.softcap:
        return "its fused attention does not soft-cap scores: results would differ from the model's"
    if model.chunk is not None:
        return "chunked attention is not computed under context parallelism"
    return "its context parallelism has no sinks (its FSDP2 trainer has)" if model.sinks else None


def _mindspeed_heads(job: Job, over: int) -> str | None:
    """Return why heads cannot be dealt; None: they can. Heads of kv are repeated where there are fewer than ranks."""
    heads, kv_heads = job.heads
    if kv_heads >= over:
        return both_heads(job, over, "ulysses")
    return None if heads % over == 0 else f"ulysses over {over} ranks wants q heads that divide: there are {heads}"


def _repeated(job: Job, over: int) -> tuple[int, int] | None:
    """Return the heads where fewer of kv than ranks are repeated, to as many as q has, before they are exchanged."""
    heads, kv_heads = job.heads
    return (heads, heads) if kv_heads < over else None


TRAINING = (
    Engine("megatron", "Megatron-core 0.12 to 0.19", "zigzag", megatron_options, twice_the_ranks),
    Engine("torchtitan", "torchtitan 0.3", "zigzag", torchtitan_options, twice_the_ranks),
    Engine("accelerate", "accelerate 1.15, DeepSpeed 0.19", "zigzag", accelerate_options, twice_the_ranks),
    Engine("mindspeed-llm", "MindSpeed-LLM of 2026-08, MindSpeed of 2026-07", "zigzag", mindspeed_options,
           twice_the_ranks),
)  # fmt: skip
