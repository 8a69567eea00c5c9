"""The proof that blocks are encoded once, where a schedule has wire formats.

A format is a property of records, not of their numbers. Requests are encoded where they are packed, which is of own
tokens alone; results where they are written into a slot that is in the wire's format, and who did so goes with them.
What is encoded is passed on as it is, or decoded, to be computed with or merged at home: never encoded again, which
would add an error at each hop. Results that leave their lse behind are written so once, too, and merged with nothing.
"""

from __future__ import annotations

from tokenring.errors import ScheduleError
from tokenring.ir.schedule_data import FULL, KINDS, REQUEST_OF, Pass, ScheduleData
from tokenring.ir.wire_formats import FORMATS
from tokenring.lowering.program import Span
from tokenring.proof.rendezvous import Rank
from tokenring.proof.slot_contents import ContentRun, Rows, read


def check_codecs(schedule: ScheduleData) -> None:
    """Raise ScheduleError unless formats are known, one for each kind, and of what may be encoded."""
    for kind, codec in schedule.codecs:
        if why := _refusal(schedule, kind, codec):
            raise ScheduleError(f"{schedule.name}: codec {codec!r} of {kind}{why}")
    if len(dict(schedule.codecs)) < len(schedule.codecs):
        raise ScheduleError(f"{schedule.name}: it has two codecs for one kind")


def _refusal(schedule: ScheduleData, kind: str, codec: str) -> str | None:
    """Return why a kind does not take a codec."""
    if kind not in KINDS or (kind in REQUEST_OF and schedule.operator.merge == "log-sum-exp"):
        return ": those of attention are for q and kv, others are for partials of q as well"
    if kind in REQUEST_OF and codec == FULL:
        return None
    if codec not in FORMATS:
        return f" is not known; use one of {', '.join(FORMATS)}"
    if kind == "kv_partial":
        return f": gradients of weights are not encoded; {FULL!r} is all that they take"
    if kind in REQUEST_OF and any(move.add and move.block.kind == kind for move in schedule.moves):
        return f": a relay adds to some on their way, and would encode them again; leave it out, they go in {FULL}"
    return None


def width_of(schedule: ScheduleData) -> int:
    """Return the least width of rows that the schedule's formats take."""
    return max((FORMATS[codec].block for _, codec in schedule.codecs if codec in FORMATS), default=1)


def rewritten(schedule: ScheduleData, direction: Pass) -> frozenset[str]:
    """Return the kinds of results that are other on the wire than in accumulators: encoded, or without their lse."""
    kinds = schedule.operator.home["forward"] if direction == "forward" and schedule.operator.left_out else ()
    return frozenset((*kinds, *(REQUEST_OF.keys() & schedule.formats.keys())))


def check_merged(rank: Rank, span: Span, rows: Rows) -> None:
    """Raise Wrong where results meet in rows of a span, and some have come without what they are merged by."""
    for run in read(rows, span.start, span.stop):
        if run.coder is not None:
            raise rank.wrong(
                f"merges into rows {run.start} to {run.stop} of slot {span.slot}, of which rank {run.coder} has sent "
                f"results without lse"
            )


def encoded(rank: Rank, span: Span, runs: list[ContentRun], first: bool) -> list[ContentRun]:
    """Return results as a rank writes them into rows that are in a wire format, or without their lse.

    Raises Wrong for a second encoding.
    """
    if not first:
        raise rank.wrong(f"adds to rows of slot {span.slot}, which are encoded, or without lse")
    for run in runs:
        if run.coder is not None:
            raise rank.wrong(f"encodes rows {run.start} to {run.stop} of slot {span.slot} again: rank {run.coder} did")
    return [run._replace(coder=rank.rank) for run in runs]
