"""Tables of engines for diffusion transformers: diffusers, xDiT, vllm-omni. All attend without a causal mask."""

from __future__ import annotations

from collections.abc import Iterator

from tokenring.cli.advise.choices import Choice, Engine, Job, any_length, both_heads, q_heads, splits, tokens_divide
from tokenring.cli.advise.pricing import BY_OPERATORS, BY_OPERATORS_GATHERED, BY_OPERATORS_WAITED, GATHER

TOGETHER = "text and image together must"
NO_CAUSAL = "context parallelism takes no causal masks"


def diffusers_options(job: Job) -> Iterator[Choice]:
    """Yield what ContextParallelConfig takes, and why not. Its ring gathers all blocks, and computes one at a time."""
    never = f"diffusers' {NO_CAUSAL}" if job.model.causal else None
    if job.model.heads != job.model.kv_heads:
        never = never or "diffusers' context parallelism takes no grouped heads"
    heads, length, ring = job.heads[0], tokens_divide(job, job.ranks, TOGETHER), BY_OPERATORS_WAITED
    yield Choice(f"ring_degree={job.ranks}", GATHER, never or length, ring)
    one_way = "{} has no backward pass" if job.training else ""
    yield Choice(
        f"ring_degree={job.ranks}, ring_anything=True", GATHER, never or one_way.format("ring_anything") or None, ring
    )
    yield Choice(f"ulysses_degree={job.ranks}", "ulysses", never or length or q_heads(heads, job.ranks))
    yield Choice(
        f"ulysses_degree={job.ranks}, ulysses_anything=True", "ulysses",
        never or one_way.format("ulysses_anything") or _too_few(heads, job.ranks), heads=_padded(job),
    )  # fmt: skip
    for inner, outer in splits(job.ranks):
        flags = f"ulysses_degree={inner}, ring_degree={outer}"
        yield Choice(flags, f"usp/{inner}", never or length or q_heads(heads, inner), ring)


def xdit_options(job: Job) -> Iterator[Choice]:
    """Yield what `xdit` takes, and why not. Its ring is torch's, which gathers all blocks by default."""
    never = _serving(job, "xDiT")
    ranks = job.ranks
    yield Choice(f"--ulysses_degree {ranks}", "ulysses", never or both_heads(job, ranks, "ulysses"))
    yield Choice(f"--ring_degree {ranks}", GATHER, never, BY_OPERATORS_GATHERED)
    for inner, outer in splits(ranks):
        flags = f"--ulysses_degree {inner} --ring_degree {outer}"
        yield Choice(flags, f"usp/{inner}", never or both_heads(job, inner, "ulysses"), BY_OPERATORS_GATHERED)


def xdit_pads(job: Job) -> str | None:
    """Return what xDiT does about a length that the ranks do not divide, in most of its models; None: they do."""
    if job.length % job.ranks == 0:
        return None
    return f"Flux, Qwen-Image, Wan and LTX pad sequences to a multiple of {job.ranks}; see whether another model does"


def omni_options(job: Job) -> Iterator[Choice]:
    """Yield what `vllm serve --omni` takes, and why not. Its ring sends from rank to rank."""
    never, length, ranks = _serving(job, "vllm-omni"), tokens_divide(job, job.ranks, TOGETHER), job.ranks
    yield Choice(f"--ulysses-degree {ranks}", "ulysses", never or length or both_heads(job, ranks, "ulysses"))
    yield Choice(f"--ulysses-degree {ranks} --ulysses-mode advanced_uaa", "ulysses", never, heads=_padded(job))
    yield Choice(f"--ring-degree {ranks}", "ring", never or length, BY_OPERATORS)
    yield Choice(f"--allgather-degree {ranks}", GATHER, never or length)
    for inner, outer in splits(ranks):
        flags = f"--ulysses-degree {inner} --ring-degree {outer}"
        yield Choice(flags, f"usp/{inner}", never or length or both_heads(job, inner, "ulysses"), BY_OPERATORS)


def _serving(job: Job, engine: str) -> str | None:
    """Return why an engine that serves diffusion transformers does not run a job at all; None: it does."""
    if job.model.causal:
        return f"{engine}'s sequence parallelism is for diffusion transformers: it takes no causal masks"
    return f"{engine} serves: it has no backward pass" if job.training else None


def _padded(job: Job) -> tuple[int, int] | None:
    """Return the heads with those that pad kv's to a multiple of the ranks, and q's to as many for each; None: none."""
    heads, kv_heads = job.heads
    padded = -(-kv_heads // job.ranks) * job.ranks
    return None if padded == kv_heads else (heads // kv_heads * padded, padded)


def _too_few(heads: int, ranks: int) -> str | None:
    """Say why heads cannot be padded; None: they can. It asserts that fewer heads are added than a rank then has."""
    held = -(-heads // ranks)
    added = held * ranks - heads
    return None if added < held else f"padding would add {added} heads, and a rank would have {held}"


DIFFUSION = (
    Engine("diffusers", "diffusers 0.42", "contiguous", diffusers_options, any_length),
    Engine("xdit", "xDiT (xfuser) 0.7", "contiguous", xdit_options, xdit_pads),
    Engine("vllm-omni", "vllm-omni 0.30", "contiguous", omni_options, any_length),
)
