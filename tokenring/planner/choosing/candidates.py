"""The schedules that were considered for a plan, and how they are shown: best first, with a note on ties."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

COLUMNS = ("schedule", "time", "compute", "exposed", "worst wire", "memory", "× bound")
SHOWN = 12
BASELINE = "ring"  # what everybody has: each other schedule is to be seen beside it
AS_FAST = "as fast"
NEAR = 0.02  # of the time: what is no slower ties with the fastest
FEW_TIES = 2  # so many are shown as rows; more in one line
MISFIT = "does not fit"  # begins the reason of what cannot be made
OVER_LIMIT = "more than the limit"  # in the reason of what needs too much memory
HARDLY = 0.05  # of the time: predictions are off by as much


@dataclass(frozen=True)
class Candidate:
    """One schedule that was considered, all passes asked for together.

    predicted_seconds: None where it was not simulated to the end, because it must take longer than the best.
    compute_seconds: kernels of the rank that computes longest. exposed_seconds: waiting that nothing hides.
    worst_link_bytes: on the wire that needs longest. bound_seconds: what no schedule can be faster than.
    reason: why it wins or loses. connections: of the rank that has most, which take connection_bytes of peak_bytes;
    None where they take no device memory, or nothing is known of the transport.
    """

    name: str
    predicted_seconds: float | None
    compute_seconds: float | None
    exposed_seconds: float | None
    worst_link_bytes: int | None
    peak_bytes: int | None
    bound_seconds: float | None
    reason: str
    connections: int | None = None
    connection_bytes: int | None = None


def candidate_of(found: Mapping[str, Any]) -> Candidate:
    """Return a candidate out of a plan's JSON. Raises TypeError and KeyError."""
    if not isinstance(found, Mapping):
        raise TypeError(f"a candidate is {found!r}")
    known = {"connections": None, "connection_bytes": None} | dict(found)  # which a plan may lack
    return Candidate(**{field.name: known[field.name] for field in fields(Candidate)})


def table(candidates: Sequence[Candidate], everything: bool = False, rest: str = "") -> tuple[list[str], list[str]]:
    """Return the candidates as the lines of a table, best first, and what their names say.

    Those that tie with the best stand in one line; the baseline is shown in any case.
    everything: all that were simulated, each in a row. rest: what to say of those that are not shown.
    """
    simulated = [each for each in candidates if each.predicted_seconds is not None]
    ties = [] if everything else [each for each in simulated[1:] if _ties(each, simulated[0])]
    ties = ties if len(ties) > FEW_TIES else []
    rows = [each for each in simulated if each not in ties]
    shown = rows if everything else _with_baseline(rows)
    if not shown:
        return [], []
    lines = [*_aligned([COLUMNS, *map(_row, shown)], ["", *map(_reason, shown)])]
    if ties:
        names = ", ".join(each.name for each in ties)
        lines.append(f"within {NEAR:.0%} of the fastest: {names}; the choice among these hardly matters")
    lines += _choice(simulated[0], simulated)
    if hidden := len(rows) - len(shown):
        lines.append(f"{hidden} more were simulated and are slower{rest}")
    from tokenring.schedule.families.meanings import meanings  # only what is printed needs it

    return lines, _legend(meanings(each.name for each in (*shown, *ties)))


def over_limit(needs_bytes: int, limit_bytes: int, least: str = "") -> str:
    """Return the reason why a schedule does not fit. least: " at least", where it is not known how much it needs."""
    from tokenring.display.units import mb_text  # only what is said or printed needs it

    return f"needs {mb_text(needs_bytes)} a rank{least}, {OVER_LIMIT} of {mb_text(limit_bytes)}"


def _legend(says: Mapping[str, str]) -> list[str]:
    """Return a line for each thing that names say, with all that say it."""
    written: dict[str, list[str]] = {}
    for name, what in says.items():
        written.setdefault(what, []).append(name)
    return [f"  {', '.join(names)}: {what}" for what, names in written.items()]


def _ties(each: Candidate, best: Candidate) -> bool:
    """Return whether a candidate differs by a little time alone: not the baseline, nor passed over for its risk."""
    own, least = each.predicted_seconds or 0.0, best.predicted_seconds or 0.0
    return each.name != BASELINE and each.reason.startswith((AS_FAST, "+")) and own <= least * (1 + NEAR)


def _with_baseline(rows: Sequence[Candidate]) -> list[Candidate]:
    """Return the first rows, and the baseline's where it is none of them."""
    return [each for at, each in enumerate(rows) if at < SHOWN or each.name == BASELINE]


def _reason(each: Candidate) -> str:
    return f"{each.reason}; the baseline" if each.name == BASELINE else each.reason


def _choice(best: Candidate, simulated: Sequence[Candidate]) -> Iterator[str]:
    """Yield a line that says so where it does not matter which schedule is taken."""
    base = next((each for each in simulated[1:] if each.name == BASELINE), None)
    if base is None or not base.predicted_seconds or not best.predicted_seconds or OVER_LIMIT in base.reason:
        return
    slower = base.predicted_seconds / best.predicted_seconds - 1
    if abs(slower) <= HARDLY:
        how = "would take as long" if slower < HARDLY / 10 else f"would take {slower:.0%} longer"
        yield f"the choice hardly matters here: {BASELINE} {how}, no more than what predictions are off by"


def _row(each: Candidate) -> tuple[str, ...]:
    from tokenring.display.units import mb_text, time_text

    times = (each.predicted_seconds, each.compute_seconds, each.exposed_seconds)
    sizes = (each.worst_link_bytes, each.peak_bytes)
    ratio = ""
    if each.predicted_seconds is not None and each.bound_seconds:
        ratio = f"{each.predicted_seconds / each.bound_seconds:.2f}"
    return (
        each.name,
        *("" if value is None else time_text(value) for value in times),
        *("" if value is None else mb_text(value) for value in sizes),
        ratio,
    )


def _aligned(rows: Sequence[Sequence[str]], last: Sequence[str]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row, reason in zip(rows, last, strict=True):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join([*cells, reason]).rstrip()
