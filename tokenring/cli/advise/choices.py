"""The parts of a table of an engine: jobs, choices with the reasons against them, and reasons that engines share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tokenring.cli.advise.pricing import FUSED, Merging
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
    """One way to run an engine.

    flags: as a user writes them. schedule: the one of ours that moves the same blocks. reason: why it cannot be taken;
    None: it can. merging: how the engine merges partial results. heads: of q and kv of a group, as the engine exchanges
    and computes them where it pads or repeats them; None: the model's.
    """

    flags: str
    schedule: str
    reason: str | None = None
    merging: Merging = FUSED
    heads: tuple[int, int] | None = None


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


def any_length(job: Job) -> str | None:
    """Return None: each option says for itself which lengths it takes."""
    return None


def twice_the_ranks(job: Job) -> str | None:
    """Return what to do about a length that zigzag does not cut evenly; None: it does."""
    unit = 2 * job.ranks
    return None if job.length % unit == 0 else f"pad sequences to a multiple of {unit} (2 x context-parallel size)"


def both_heads(job: Job, over: int, what: str) -> str | None:
    """Return why heads of q and kv cannot be dealt over so many ranks; None: they can."""
    heads, kv_heads = job.heads
    if heads % over or kv_heads % over:
        return f"{what} over {over} ranks wants heads that divide: there are {heads} of q and {kv_heads} of kv a group"
    return None


def q_heads(heads: int, over: int) -> str | None:
    """Return why heads cannot be dealt over so many ranks by Ulysses; None: they can."""
    return None if heads % over == 0 else f"ulysses over {over} ranks wants heads that divide: there are {heads}"


def tokens_divide(job: Job, by: int, why: str) -> str | None:
    """Return why a length is not taken that so many must divide; None: it is."""
    return None if job.length % by == 0 else f"{job.length} tokens do not divide by {by}: {why}"


def plain_causal(model: ModelFacts, what: str) -> str | None:
    """Return why attention that is causal and nothing else does not compute a model; None: it does."""
    if model.window is not None or model.chunk is not None:
        return f"{what} computes full causal attention only: no windows, no chunks"
    if model.softcap:
        return f"{what} does not soft-cap scores: results would differ from the model's"
    return f"{what} has no sinks" if model.sinks else None
