"""What a schedule costs on an interconnect: its programs, lowered as they would run, simulated pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenring.planner.interconnect import Interconnect
from tokenring.planner.operations import Compute, Operation, operations
from tokenring.planner.rates import Machine
from tokenring.planner.simulate import Outcome, simulate
from tokenring.schedule.calls import Supports, anything
from tokenring.schedule.ir import Pass, Schedule
from tokenring.schedule.lower import agenda_of, lower_agenda
from tokenring.schedule.measure import kept_bytes, link_bytes, program_bytes
from tokenring.schedule.storage import storage_of
from tokenring.workload import Workload


@dataclass(frozen=True)
class Prediction:
    """Some passes of a schedule, one after another.

    compute_seconds: of the rank that computes longest, kernels alone. exposed_seconds: what the passes take beyond
    the busiest rank's own work. worst_wire carries worst_wire_bytes, which take worst_wire_seconds.
    peak_bytes: buffers, and what forward keeps for backward, of the rank that needs most.
    """

    seconds: float
    compute_seconds: float
    exposed_seconds: float
    worst_wire: str
    worst_wire_bytes: int
    worst_wire_seconds: float
    peak_bytes: int
    outcomes: tuple[Outcome, ...] = ()


@dataclass(frozen=True)
class Setting:
    """For what a schedule is to be judged."""

    workload: Workload
    interconnect: Interconnect
    machine: Machine
    passes: tuple[Pass, ...]
    supports: Supports = anything
    early_receives: bool = True
    one_sided: bool = False


def least_seconds(schedule: Schedule, setting: Setting) -> float:
    """What its busiest wire needs for its bytes alone: no schedule is faster than that."""
    return worst_wire(schedule, setting)[2]


def worst_wire(schedule: Schedule, setting: Setting) -> tuple[str, int, float]:
    """The wire that needs longest for what the passes put on it; its bytes and seconds."""
    net = setting.interconnect
    seconds = 0.0
    total: dict[str, int] = {}
    for direction in setting.passes:
        loads: dict[str, int] = {}
        for (src, dst), nbytes in link_bytes(schedule, setting.workload, direction).items():
            for wire in net.way(src, dst):
                loads[wire] = loads.get(wire, 0) + nbytes
        seconds += max((nbytes / net.gbs(wire) / 1e9 for wire, nbytes in loads.items()), default=0.0)
        for wire, nbytes in loads.items():
            total[wire] = total.get(wire, 0) + nbytes
    worst = max(total, key=lambda wire: (total[wire] / net.gbs(wire), wire), default="none")
    return worst, total.get(worst, 0), seconds


def predict(schedule: Schedule, setting: Setting, record: bool = False) -> Prediction:
    """Lower, simulate and add up."""
    made = [_pass(schedule, setting, direction, record) for direction in setting.passes]
    wire, nbytes, seconds = worst_wire(schedule, setting)
    return Prediction(
        sum(outcome.seconds for outcome, _, _ in made),
        sum(kernels for _, kernels, _ in made),
        sum(outcome.exposed_seconds for outcome, _, _ in made),
        wire,
        nbytes,
        seconds,
        max(peak for _, _, peak in made),
        tuple(outcome for outcome, _, _ in made) if record else (),
    )


def _pass(schedule: Schedule, setting: Setting, direction: Pass, record: bool) -> tuple[Outcome, float, int]:
    """The outcome, the longest time that a rank's kernels take, and the largest pool."""
    storage, workload = storage_of(schedule), setting.workload
    programs: list[Sequence[Operation]] = []
    peak = 0
    for rank in range(schedule.world_size):
        agenda = agenda_of(storage, rank, direction, workload, setting.supports)
        program = lower_agenda(agenda, workload, setting.early_receives)
        programs.append(operations(schedule, workload, program, setting.machine.rates))
        held = program_bytes(schedule, workload, program, setting.one_sided) + kept_bytes(schedule, workload, program)
        peak = max(peak, held)
    outcome = simulate(setting.interconnect, programs, setting.machine.messages, record)
    return outcome, max(map(_kernel_seconds, programs)), peak


def _kernel_seconds(program: Sequence[Operation]) -> float:
    return sum(each.seconds for each in program if isinstance(each, Compute) and each.kernel)
