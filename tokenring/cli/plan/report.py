"""A plan as text: a ranked table, and one schedule explained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenring.cli.plan.options import Asked
from tokenring.planner.bounds.bound import Bound
from tokenring.planner.choosing.plan import Candidate, Forecast, Plan
from tokenring.planner.choosing.select import mb_text, time_text
from tokenring.planner.simulation.predict import Prediction
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.workload import Workload

COLUMNS = ("schedule", "time", "compute", "exposed", "worst wire", "memory", "× bound")
SHOWN = 12


def table(plan: Plan | Forecast, asked: Asked, everything: bool = False) -> str:
    """The candidates, best first, with why each loses."""
    lines = [heading(asked), plan.reason, ""]
    simulated = [each for each in plan.candidates if each.predicted_seconds is not None]
    others = [each for each in plan.candidates if each.predicted_seconds is None]
    shown = simulated if everything else simulated[:SHOWN]
    lines += _aligned([COLUMNS, *map(_row, shown)], [""] + [each.reason for each in shown])
    if shown and shown[0].connections:
        lines.append(connections_text(shown[0].name, shown[0].connections, shown[0].connection_bytes or 0, asked))
    hidden = len(simulated) - len(shown)
    if hidden:
        lines.append(f"{hidden} more were simulated and are slower; --all shows them")
    if others and everything:
        lines += ["", "not simulated"] + [f"  {each.name}: {each.reason}" for each in others]
    elif others:
        lines.append(f"{len(others)} more cannot win or do not fit; --all says why")
    return "\n".join(lines)


def connections_text(name: str, connections: int, connection_bytes: int, asked: Asked) -> str:
    """What of a schedule's memory is its connections'."""
    of = "two ranks or of all that exchange" if asked.call.setting.target.collectives else "two ranks"
    count = f"{connections} communicator{'s' if connections > 1 else ''}"
    return f"of the memory of {name}, {mb_text(connection_bytes)} are those of {count} of {of}"


def heading(asked: Asked) -> str:
    """What is planned for."""
    setting = asked.call.setting
    text = f"{workload_text(setting.workload)}, {asked.call.mask}, layout {asked.call.q_layout.name}"
    tensor = f" (tensor parallelism {asked.tensor_parallel})" if asked.tensor_parallel > 1 else ""
    net = setting.interconnect
    lines = [text, f"on {net.name}: {net.world_size} ranks{tensor}; {setting.machine.source}"]
    links = min(net.own_links(rank) for rank in range(net.local or net.world_size))  # hosts are alike
    if links > 1:
        lines.append(f"a ring uses 1 of the {links} links of each rank; direct schedules use all of them")
    return "\n".join(lines)


def workload_text(workload: Workload) -> str:
    heads = f"{workload.q_heads}:{workload.kv_heads} heads × {workload.head_dim}"
    dtype = str(workload.dtype).removeprefix("torch.")
    return f"batch {workload.batch}, {workload.q_length:,} tokens, {heads}, {dtype}"


def _row(each: Candidate) -> tuple[str, ...]:
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


def explained(name: str, schedule: Schedule, found: Prediction, asked: Asked, bound: Bound) -> str:
    """One schedule: where its time goes, pass by pass, and what its busiest wires carry."""
    setting = asked.call.setting
    lines = [
        heading(asked),
        "",
        f"{name}: {time_text(found.seconds)}, {found.seconds / bound.seconds:.2f} × the lower bound",
    ]
    lines.append(
        f"lower bound {time_text(bound.seconds)}: compute {time_text(bound.compute_seconds)}, "
        f"transfers {time_text(bound.transfer_seconds)} (into {bound.cut})"
    )
    lines.append(f"memory {mb_text(found.peak_bytes)} a rank for buffers and what is kept")
    if found.connection_bytes:
        lines.append(connections_text(name, found.connections, found.connection_bytes, asked))
    for direction, outcome in zip(setting.passes, found.outcomes, strict=True):
        busiest = max(range(schedule.world_size), key=lambda rank: outcome.busy_seconds[rank])
        lines.append(
            f"{direction}: {time_text(outcome.seconds)}, of which rank {busiest} is busy "
            f"{time_text(outcome.busy_seconds[busiest])}"
        )
        loads = sorted(
            outcome.wire_bytes.items(), key=lambda item: (-item[1] / setting.interconnect.gbs(item[0]), item[0])
        )
        for wire, nbytes in loads[:5]:
            gbs = setting.interconnect.gbs(wire)
            lines.append(
                f"  {wire}: {mb_text(round(nbytes))} at {gbs:.4g} GB/s, {time_text(nbytes / gbs / 1e9)}, "
                f"{nbytes / gbs / 1e9 / outcome.seconds:.0%} of the time"
            )
    return "\n".join(lines)
