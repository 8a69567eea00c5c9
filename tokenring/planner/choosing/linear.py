"""The choice of a schedule for a linear layer, or a collective: the candidates' programs, simulated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tokenring.errors import ConfigurationError, ScheduleError, UnsupportedError
from tokenring.ir.operators import OPERATORS
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.ir.wire_formats import FORMATS, encoded, padded
from tokenring.planner.interconnects.interconnect import full_mesh
from tokenring.planner.simulation.predict import Prediction, Setting, predict
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Full
from tokenring.sequence.workload import Workload
from tokenring.tables.rates import Machine, Messages, constant

if TYPE_CHECKING:
    import torch

    from tokenring.planner.interconnects.interconnect import Interconnect
    from tokenring.schedule.schedule import Schedule

Codecs: TypeAlias = tuple[tuple[str, str], ...]
FEW_RANKS = 16  # above, schedules in pieces are left out of commands, as they take long to simulate
# In order: of those that are as fast, the first is taken.
CANDIDATES = {
    "weights": ("direct-q", "direct-q/pieces2", "direct-q/pieces4", "tokenring"),
    "tokens": ("direct-kv", "direct-kv/pieces2", "ring", "bidirectional"),
}
MOST_PIECES = 4  # of the candidates
NOMINAL_GBS = 1.0  # of each link, where nothing is known of them
NOMINAL_TFLOPS = 0.1  # of a processor with such links
LATENCY_SECONDS = 20e-6  # of a message
POST_SECONDS = 10e-6
LEAST_GAIN = 0.02  # below, the earlier candidate stays
BEGIN_WITH_A_PRODUCT = frozenset({("column", "backward"), ("row", "forward")})  # which is dx, or y


def choose(
    operator: str, size: Workload, ranks: int, stays: str, topology: Interconnect | None, codecs: Codecs = ()
) -> str:
    """Return the name of the schedule of a layer over so many ranks. Raises ConfigurationError if nothing fits.

    stays: "weights", "tokens" or "either". codecs: of the schedule.
    """
    names = tuple(name for kind in (CANDIDATES if stays == "either" else (stays,)) for name in CANDIDATES[kind])
    return _fastest(operator, size, names, _of(topology, ranks), codecs)


def collective(
    elements: int, dtype: torch.dtype, ranks: int, topology: Interconnect | None, codecs: Codecs = ()
) -> str:
    """Return the name of the schedule of a collective of so many elements; its rows move.

    Where every pair of ranks has a link, two steps are the fewest. Sizes of one power of two are one choice.
    """
    if topology is None or ranks == 1:
        return "direct-q"
    rows = ranks * MOST_PIECES
    width = -(-(1 << (elements - 1).bit_length()) // rows)
    width = max((padded(name, width) for _, name in codecs if name in FORMATS), default=width)
    return choose("reduce", Workload(1, rows, ranks, 1, 1, width, dtype), ranks, "weights", topology, codecs)


class RankedSchedule(NamedTuple):
    """A schedule of a layer or collective, with what it is predicted to cost."""

    name: str
    schedule: Schedule
    prediction: Prediction


def ranked(operator: str, setting: Setting, names: Iterable[str], codecs: Codecs = ()) -> list[RankedSchedule]:
    """Return the schedules of a layer that fit, proved, the fastest first; of equals, the first named.

    setting: of rows as q and columns as kv. Names that do not fit the ranks, the sizes or the operator are left out;
    raises ConfigurationError if none is left.
    """
    from tokenring.proof.paired import check_paired

    found, reasons = [], []
    for name in names:
        try:
            made = _made(operator, name, setting.workload, setting.interconnect.world_size, codecs)
            check_paired(made)
        except (ConfigurationError, ScheduleError, UnsupportedError) as error:
            reasons.append(f"{name}: {error}")
            continue
        found.append(RankedSchedule(name, made, predict(made, setting)))
    if not found:
        raise ConfigurationError(f"no schedule fits operator {operator!r} with these sizes: {'; '.join(reasons)}")
    return sorted(found, key=lambda each: each.prediction.seconds)


def unfused_seconds(operator: str, setting: Setting, by: str, compute_seconds: float) -> float:
    """Return what a layer takes where its collectives, by this schedule, and its products follow one another.

    operator: "column", which gathers x in both passes and reduces dx, or "row", which reduces y and gathers dy.
    compute_seconds: of the products. Where a host launches operators, that of a product takes time if a pass begins
    with it; else the host launches it while a collective moves.
    """
    size, ranks = setting.workload, setting.interconnect.world_size
    rows = replace(size, kv_length=ranks)
    reduces: Pass = "backward" if operator == "column" else "forward"
    passes: list[Pass] = ["forward" for each in setting.passes if each == reduces]
    passes += ["backward" for each in setting.passes if each != reduces or operator == "column"]
    made = _made("reduce", by, rows, ranks, ())
    moving = sum(predict(made, replace(setting, workload=rows, passes=(each,))).seconds for each in passes)
    launching = setting.machine.rates.launching
    first = sum((operator, each) in BEGIN_WITH_A_PRODUCT for each in setting.passes)
    return moving + compute_seconds + (0.0 if launching is None else first * launching.seconds)


def _made(operator: str, name: str, size: Workload, ranks: int, codecs: Codecs) -> Schedule:
    rows, columns = (make_layout("contiguous", ranks, length) for length in (size.q_length, size.kv_length))
    return encoded(make_schedule(name, rows, columns, Full()).replace(operator=OPERATORS[operator]), codecs)


def _of(topology: Interconnect | None, ranks: int) -> Interconnect:
    if topology is None:
        return full_mesh(ranks, NOMINAL_GBS)
    if topology.world_size != ranks:
        raise ConfigurationError(f"topology {topology.name!r} has {topology.world_size} ranks, the group has {ranks}")
    return topology


def _fastest(operator: str, size: Workload, names: tuple[str, ...], net: Interconnect, codecs: Codecs) -> str:
    found: dict[str, float] = {}
    machine = Machine(constant(NOMINAL_TFLOPS), Messages(LATENCY_SECONDS, POST_SECONDS))
    setting = Setting(size, net, machine, PASSES)
    for name in names:
        try:
            made = _made(operator, name, size, net.world_size, codecs)
        except ConfigurationError:  # its pieces do not divide
            continue
        found[name] = predict(made, setting).seconds
    if not found:
        raise ConfigurationError(f"none of {', '.join(names)} fits {size.q_length} tokens over {net.world_size} ranks")
    best = min(found.values())
    return next(name for name, seconds in found.items() if seconds <= best * (1 + LEAST_GAIN))
