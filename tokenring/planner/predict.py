"""What a schedule costs on an interconnect: its programs, lowered as they would run, simulated pass by pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenring.backends.base import Capabilities, Link
from tokenring.backends.mailbox import lay
from tokenring.planner.interconnect import Interconnect
from tokenring.planner.operations import Compute, Costs, Operation
from tokenring.planner.rates import Machine
from tokenring.planner.simulate import Outcome, simulate
from tokenring.schedule.calls import Supports, anything, calls
from tokenring.schedule.ir import Pass, Schedule
from tokenring.schedule.lower import agenda_of, lower_agenda
from tokenring.schedule.measure import contacts, held, incoming, kept_bytes, link_bytes, program_bytes, staged_bytes
from tokenring.schedule.storage import Storage, storage_of
from tokenring.workload import Workload

IDEAL = Capabilities(early_receives=True, channels=2)  # of a transport of which nothing is known
FEW_RANKS = 16  # up to which wires are shared out anew for every transfer
WINDOW_SHARE = 1e-3  # of the longest rank's kernels: predictions grow by 0.4% at most, planning takes half as long


@dataclass(frozen=True)
class Prediction:
    """Some passes of a schedule, one after another.

    compute_seconds: of the rank that computes longest, kernels alone; of all of them where those share too few cores.
    exposed_seconds: what the passes take beyond the busiest rank's own work. worst_wire carries worst_wire_bytes, which
    take worst_wire_seconds.
    peak_bytes: buffers, what forward keeps for backward, and connections, of the rank that needs most in all.
    connections: of the rank that has most, which take connection_bytes of device memory (0 where they take none).
    """

    seconds: float
    compute_seconds: float
    exposed_seconds: float
    worst_wire: str
    worst_wire_bytes: int
    worst_wire_seconds: float
    peak_bytes: int
    connections: int = 0
    connection_bytes: int = 0
    outcomes: tuple[Outcome, ...] = ()


@dataclass(frozen=True)
class Setting:
    """For what a schedule is to be judged."""

    workload: Workload
    interconnect: Interconnect
    machine: Machine
    passes: tuple[Pass, ...]
    supports: Supports = anything
    able: Capabilities = IDEAL

    @property
    def early_receives(self) -> bool:
        """Whether receives are posted early: in one queue with sends they would block what they wait for."""
        return self.able.early_receives and not self.machine.messages.pair_serial


class Least(NamedTuple):
    """What a schedule needs at least, all passes together, as its parts overlap at best.

    wire_seconds: of its busiest wire for the bytes alone. kernel_seconds: as a prediction's compute_seconds.
    """

    seconds: float
    wire_seconds: float
    kernel_seconds: float


def least_seconds(schedule: Schedule, setting: Setting) -> Least:
    """Far cheaper than a prediction, and never above it."""
    storage = storage_of(schedule)
    parts = []
    for direction in setting.passes:
        costs = Costs(schedule, setting.workload, direction, setting.machine.rates)
        wire = _busiest_seconds(wire_bytes(schedule, setting, direction), setting.interconnect)
        kernels = [_kernels_of_rank(storage, rank, setting, costs) for rank in _ranks(schedule)]
        parts.append((wire, setting.machine.kernel_seconds(kernels)))
    return Least(sum(map(max, parts)), sum(wire for wire, _ in parts), sum(kernels for _, kernels in parts))


def _kernels_of_rank(storage: Storage, rank: int, setting: Setting, costs: Costs) -> float:
    return sum(
        costs.kernel_seconds(call.patch)
        for tile in storage.tiles(rank)
        for call in calls(storage, tile, setting.supports)
    )


def wire_bytes(schedule: Schedule, setting: Setting, direction: Pass) -> dict[str, int]:
    """What one pass puts on each wire."""
    loads: dict[str, int] = {}
    for (src, dst), nbytes in link_bytes(schedule, setting.workload, direction).items():
        for wire in setting.interconnect.way(src, dst):
            loads[wire] = loads.get(wire, 0) + nbytes
    return loads


def _busiest_seconds(loads: Mapping[str, int], net: Interconnect) -> float:
    return max((nbytes / net.gbs(wire) / 1e9 for wire, nbytes in loads.items()), default=0.0)


def worst_wire(schedule: Schedule, setting: Setting) -> tuple[str, int, float]:
    """The wire that needs longest for what the passes put on it; its bytes and seconds."""
    net = setting.interconnect
    seconds = 0.0
    total: dict[str, int] = {}
    for direction in setting.passes:
        loads = wire_bytes(schedule, setting, direction)
        seconds += _busiest_seconds(loads, net)
        for wire, nbytes in loads.items():
            total[wire] = total.get(wire, 0) + nbytes
    worst = max(total, key=lambda wire: (total[wire] / net.gbs(wire), wire), default="none")
    return worst, total.get(worst, 0), seconds


def predict(schedule: Schedule, setting: Setting, record: bool = False) -> Prediction:
    """Lower, simulate and add up."""
    made = [_pass(schedule, setting, direction, record) for direction in setting.passes]
    wire, nbytes, seconds = worst_wire(schedule, setting)
    pools = [max(of_rank) for of_rank in zip(*(pools for _, _, pools in made), strict=True)]
    return Prediction(
        sum(setting.machine.start_seconds + outcome.seconds for outcome, _, _ in made),
        sum(kernels for _, kernels, _ in made),
        sum(outcome.exposed_seconds for outcome, _, _ in made),
        wire,
        nbytes,
        seconds,
        *held(contacts(schedule, setting.able, setting.passes), setting.able, pools),
        tuple(outcome for outcome, _, _ in made) if record else (),
    )


def _pass(schedule: Schedule, setting: Setting, direction: Pass, record: bool) -> tuple[Outcome, float, list[int]]:
    """The outcome, what kernels take at least, and what each rank holds."""
    storage, workload = storage_of(schedule), setting.workload
    costs = Costs(schedule, workload, direction, setting.machine.rates)
    programs: list[Sequence[Operation]] = []
    pools: list[int] = []
    messages: dict[Link, list[int]] = {}
    for rank in _ranks(schedule):
        agenda = agenda_of(storage, rank, direction, workload, setting.supports)
        able = setting.able
        program = lower_agenda(agenda, workload, setting.early_receives, able.collectives, able.bundle_bytes)
        programs.append(costs.operations(program))
        pool = program_bytes(schedule, workload, program, setting.able.one_sided)
        pool += staged_bytes(schedule, workload, program)
        pools.append(pool + kept_bytes(schedule, workload, program))
        messages |= incoming(schedule, workload, program) if setting.able.mailboxes else {}
    boxes = lay(messages).nbytes
    pools = [pool + boxes for pool in pools]
    machine = setting.machine
    kernels = machine.kernel_seconds([kernel_seconds_of(program) for program in programs])
    window = WINDOW_SHARE * kernels if schedule.world_size > FEW_RANKS else 0.0
    outcome = simulate(
        setting.interconnect, programs, machine.messages, record,
        cores=machine.shared_cores, window_seconds=window, kernels_share=machine.kernels_share,
    )  # fmt: skip
    return outcome, kernels, pools


def _ranks(schedule: Schedule) -> range:
    return range(schedule.world_size)


def kernel_seconds_of(program: Sequence[Operation]) -> float:
    """What a rank's kernels take in all."""
    return sum(each.seconds for each in program if isinstance(each, Compute) and each.kernel)
