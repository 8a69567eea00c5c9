"""Tables of what other engines ship for context parallelism: their flags, what each needs, and what it moves.

Read in the versions that `Engine.version` says. A choice that an engine refuses, or computes wrongly in silence, has a
reason here. `schedule` names the schedule of tokenring that moves the same blocks, by which a choice is priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tokenring.cli.models import ModelFacts


@dataclass(frozen=True)
class Job:
    """A model on `ranks` ranks that share its sequences of `length` tokens, and whose heads `tensor_parallel` share."""

    model: ModelFacts
    ranks: int
    length: int
    training: bool
    tensor_parallel: int = 1

    @property
    def heads(self) -> tuple[int, int]:
        """Query and KV heads of one rank's group."""
        return self.model.heads // self.tensor_parallel, max(1, self.model.kv_heads // self.tensor_parallel)


@dataclass(frozen=True)
class Choice:
    """One way to run an engine. flags: as a user writes them. reason: why it cannot be taken; None: it can."""

    flags: str
    schedule: str
    reason: str | None = None


@dataclass(frozen=True)
class Engine:
    """An engine, the versions whose sources were read, its layout, and its options for a job."""

    name: str
    version: str
    layout: str
    options: Callable[[Job], Iterator[Choice]]
    lengths: Callable[[Job], str | None]


def splits(ranks: int) -> list[tuple[int, int]]:
    """Return the ways to write a number of ranks as a product of two, each above 1."""
    return [(inner, ranks // inner) for inner in range(2, ranks) if ranks % inner == 0]


# ---------- Megatron-core, with TransformerEngine's attention


def megatron_options(job: Job) -> Iterator[Choice]:
    """Yield what --cp-comm-type takes, and why not."""
    base, model = f"--context-parallel-size {job.ranks} --cp-comm-type", job.model
    yield Choice(f"{base} p2p", "ring", _megatron_never(job) or _windows(model) or _sinks(model))
    yield Choice(f"{base} all_gather", "all-gather-kv", _megatron_never(job) or _sinks(model))
    yield Choice(f"{base} a2a", "ulysses", _megatron_never(job) or _heads(job, job.ranks, "a2a"))
    for inner, outer in splits(job.ranks):
        flags = f"{base} a2a+p2p --hierarchical-context-parallel-sizes {inner} {outer}"
        reason = _megatron_never(job) or _windows(model) or _sinks(model) or _heads(job, inner, "a2a")
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


def _heads(job: Job, over: int, what: str) -> str | None:
    heads, kv_heads = job.heads
    if heads % over or kv_heads % over:
        return f"{what} over {over} ranks wants heads that divide: there are {heads} of q and {kv_heads} of kv a group"
    return None


def megatron_lengths(job: Job) -> str | None:
    """Return what to do about a length that the engine does not take; None: it does."""
    unit = 2 * job.ranks
    return None if job.length % unit == 0 else f"pad sequences to a multiple of {unit} (2 x context-parallel size)"


# ---------- diffusers


def diffusers_options(job: Job) -> Iterator[Choice]:
    """Yield what ContextParallelConfig takes, and why not."""
    never = "diffusers' context parallelism takes no causal masks" if job.model.causal else None
    if job.model.heads != job.model.kv_heads:
        never = never or "diffusers' context parallelism takes no grouped heads"
    heads, divides = job.model.heads, job.length % job.ranks == 0
    length = None if divides else f"{job.length} tokens do not divide by {job.ranks}: text and image together must"
    uneven = _uneven(heads, job.ranks)
    yield Choice(f"ring_degree={job.ranks}", "all-gather-kv", never or length)
    yield Choice(
        f"ring_degree={job.ranks}, ring_anything=True", "all-gather-kv",
        never or ("ring_anything has no backward pass" if job.training else None),
    )  # fmt: skip
    yield Choice(f"ulysses_degree={job.ranks}", "ulysses", never or length or _divide(heads, job.ranks))
    yield Choice(
        f"ulysses_degree={job.ranks}, ulysses_anything=True",
        "ulysses" if heads % job.ranks == 0 else f"uneven/{heads}", never or uneven,
    )  # fmt: skip
    for inner, outer in splits(job.ranks):
        flags = f"ulysses_degree={inner}, ring_degree={outer}"
        yield Choice(flags, f"usp/{inner}", never or length or _divide(heads, inner))


def _divide(heads: int, ranks: int) -> str | None:
    return None if heads % ranks == 0 else f"ulysses over {ranks} ranks wants heads that divide: there are {heads}"


def _uneven(heads: int, ranks: int) -> str | None:
    """Say why heads cannot be padded; None: they can. It asserts that fewer heads are added than a rank then has."""
    held = -(-heads // ranks)
    added = held * ranks - heads
    return None if added < held else f"ulysses_anything would add {added} heads, and a rank would have {held}"


def any_length(job: Job) -> str | None:
    """Return None: each option says for itself which lengths it takes."""
    return None


ENGINES = {
    each.name: each
    for each in (
        Engine("megatron", "Megatron-core 0.12 to 0.19", "zigzag", megatron_options, megatron_lengths),
        Engine("diffusers", "diffusers 0.42", "contiguous", diffusers_options, any_length),
    )
}
