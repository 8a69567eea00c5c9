"""A program as the simulator sees it: how long a rank computes, what it posts, what it waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from tokenring.ir.schedule_data import Pass, ScheduleData
from tokenring.lowering.footprint import expanding_flops
from tokenring.lowering.program import (
    Attend,
    Collective,
    Fill,
    Merge,
    Multiply,
    Pack,
    Program,
    Recv,
    Result,
    Send,
    Span,
    Wait,
    bundled_bytes,
    made_by,
)
from tokenring.lowering.records import Records
from tokenring.planner.simulation.copied import PassRecords
from tokenring.planner.simulation.launches import Launches
from tokenring.sequence.region import Patch
from tokenring.sequence.workload import Workload
from tokenring.tables.launching import Launching
from tokenring.tables.rates import Rates

TOUCHED = {True: 2, False: 3}  # by `first`: a copy reads and writes, a merge reads both and writes


class Compute(NamedTuple):
    """The rank is busy: with a kernel, or with copies and merges.

    launched: the seconds, from the start of the pass, before which the host has not launched it.
    """

    seconds: float
    kernel: bool
    step: int
    label: str
    launched: float = 0.0


class SimulatedPost(NamedTuple):
    """A send or a receive is posted; the rank goes on."""

    message: int
    peer: int
    channel: str
    nbytes: int
    sends: bool
    step: int
    label: str


class Await(NamedTuple):
    """The rank goes on when the message has arrived, or left."""

    message: int


Operation = Compute | SimulatedPost | Await


def busy_seconds(operation: Operation, post_seconds: float) -> float:
    """Return how long an operation keeps its rank busy, where a post takes so long."""
    match operation:
        case Compute():
            return operation.seconds
        case SimulatedPost():
            return post_seconds
    return 0.0


def alone_seconds(program: Iterable[Operation], post_seconds: float) -> float:
    """Return how long a rank takes that waits for no other: no operation begins before the host has launched it."""
    now = 0.0
    for each in program:
        now = max(now, each.launched) if isinstance(each, Compute) else now
        now += busy_seconds(each, post_seconds)
    return now


def operations(schedule: ScheduleData, workload: Workload, program: Program, rates: Rates) -> list[Operation]:
    """Return what a program costs, in its order. Neighbouring copies and merges are one operation."""
    return Costs(schedule, workload, program.direction, rates).operations(program)


class Costs:
    """Costs of the programs of one pass, of any rank: ranks do much the same, so results are kept."""

    def __init__(self, schedule: ScheduleData, workload: Workload, direction: Pass, rates: Rates) -> None:
        self.schedule, self.workload, self.direction, self.rates = schedule, workload, direction, rates
        self.records = Records(schedule, workload, direction)
        self.heads = workload.q_heads // schedule.head_groups
        self.merges_by_lse = schedule.operator.merge == "log-sum-exp"
        self._of_patch: dict[Patch, float] = {}

    @cached_property
    def pass_records(self) -> PassRecords:
        """The records by which launches are counted."""
        return PassRecords(self.schedule, self.records)

    def operations(self, program: Program) -> list[Operation]:
        """Return what a program costs, as the function `operations` does."""
        made: list[Operation] = []
        maker = _Maker(self, program)
        for instruction, step in zip(program.instructions, program.steps, strict=True):
            for each in maker.of(instruction, step):
                last = made[-1] if made else None
                if isinstance(each, Compute) and isinstance(last, Compute) and not (each.kernel or last.kernel):
                    made[-1] = _joined(last, each)
                else:
                    made.append(each)
        return [*made, *maker.after()]

    def kernel_seconds(self, patch: Patch) -> float:
        """Return the seconds of one kernel call of a head group."""
        known = self._of_patch.get(patch)
        if known is None:
            size = self.workload
            widths = size.head_dim, size.batch, self.direction, size.value_dim
            known = self.rates.kernel_seconds(patch, self.heads, *widths, self.schedule.operator)
            if size.latent_dim is not None:
                rate = self.rates.tflops(self.direction, min(patch.rows, patch.cols))
                known += expanding_flops(size, self.direction, patch.cols) / (rate * 1e12)
            self._of_patch[patch] = known
        return known


def _joined(first: Compute, then: Compute) -> Compute:
    """Return two pieces of work, one after the other, as one that ends when they would."""
    launched = max(first.launched, then.launched - first.seconds)
    return first._replace(seconds=first.seconds + then.seconds, launched=launched)


class _Host:
    """The host that launches a program's operators one after another, whatever the device does meanwhile."""

    def __init__(self, costs: Costs, program: Program, launching: Launching) -> None:
        self.rates, self.each = costs.rates, launching.seconds
        self.launches = Launches(program, costs.pass_records, launching.of_kernel)
        self.last_step = program.steps[-1] if program.steps else 0
        self.seconds = 0.0  # until now

    def launch(self, instruction: object, made: list[Operation], step: int) -> list[Operation]:
        """Return the operations of an instruction with the cost of all that it launches, none before it is launched."""
        if isinstance(instruction, Wait):
            return made  # by the device
        if isinstance(instruction, Send | Recv):
            self.seconds += self.each * self.launches.of(instruction)
            return [Compute(0.0, False, step, "launch", self.seconds), *made] if made else made
        works = [each for each in made if isinstance(each, Compute)]
        if isinstance(instruction, Multiply) and not self.launches.computes(instruction):
            works = [each for each in works if not each.kernel]
        return list(self._launched(works, self.launches.of(instruction), step))

    def after(self) -> list[Operation]:
        """Return what is launched after the last instruction."""
        return list(self._launched([], self.launches.after(), self.last_step))

    def _launched(self, works: list[Compute], count: int, step: int) -> Iterator[Operation]:
        """Yield the kernel, if any, and then all other operators of an instruction as one piece of work."""
        first, self.seconds = self.seconds + self.each, self.seconds + count * self.each
        if works and works[0].kernel:
            yield works.pop(0)._replace(launched=first)
            count -= 1
        if not count:
            return
        label, seconds = (works[0].label, works[0].seconds) if works else ("launch", self.rates.op_seconds)
        seconds += (count - 1) * self.rates.op_seconds
        # Each is as long, and the last one begins no earlier than it is launched, which is last.
        begin = max(first, self.seconds - seconds * (count - 1) / count)
        yield Compute(seconds, False, step, label, begin)


class _Maker:
    def __init__(self, costs: Costs, program: Program) -> None:
        self.program, self.costs = program, costs
        launching = costs.rates.launching
        self.host = None if launching is None else _Host(costs, program, launching)
        records = [costs.records(slot.kind, slot.full_precision) for slot in program.slots]
        self.row_bytes = [record.nbytes for record in records]
        self.decoded_bytes = [sum(field.decoded_bytes for field in record.fields) for record in records]
        sizes = [nbytes * slot.rows for nbytes, slot in zip(self.row_bytes, program.slots, strict=True)]
        self.bundled = bundled_bytes(sizes, program)
        self.bundle_of = {message: each for each in self.bundled for message in each.messages}
        self.taken: set[Collective] = set()  # bundles that were waited for

    def of(self, instruction: object, step: int) -> list[Operation]:
        """Return the operations of an instruction."""
        made = self._of(instruction, step)
        return made if self.host is None else self.host.launch(instruction, made, step)

    def after(self) -> list[Operation]:
        """Return the operations after the last instruction."""
        return [] if self.host is None else self.host.after()

    def _of(self, instruction: object, step: int) -> list[Operation]:
        match instruction:
            case Attend() | Multiply():
                return self._attend(instruction)
            case Recv(message) | Send(message) if message in self.bundle_of:
                return self._post_bundled(instruction, step)
            case Wait(message) if message in self.bundle_of:
                return self._await_bundle(self.bundle_of[message], step)
            case Recv(message, span, src, channel, label):
                return [SimulatedPost(message, src, channel, self._nbytes(span), False, step, label)]
            case Send(message, span, dst, channel, label):
                return [SimulatedPost(message, dst, channel, self._nbytes(span), True, step, label)]
            case Wait(message):
                return [Await(message)]
            case Pack(_, _, into):
                return [self._copy(self._nbytes(into) + self._plain_bytes(into), step, "pack")]
            case Merge(_, _, into, first):
                return [self._copy(TOUCHED[first] * self._nbytes(into), step, "merge", self._merges(first))]
            case Fill(_, into):
                return [self._copy(self._nbytes(into), step, "fill")]
        return []  # a release costs nothing

    def _post_bundled(self, post: Send | Recv, step: int) -> list[Operation]:
        """Return the post of a bundle at its last message, none before; what is sent is first copied together."""
        bundle, sends = self.bundle_of[post.message], isinstance(post, Send)
        last = bundle.messages[-1]
        if post.message != last:
            return []
        peer, nbytes = bundle.ranks[sends], self.bundled[bundle]
        made: list[Operation] = [self._copy(2 * nbytes, step, "bundle")] if sends else []
        return [*made, SimulatedPost(last, peer, post.channel, nbytes, sends, step, bundle.label)]

    def _await_bundle(self, bundle: Collective, step: int) -> list[Operation]:
        """Return the operations of waiting for a bundle: the first wait takes what was received apart."""
        if bundle in self.taken:
            return []
        self.taken.add(bundle)
        made: list[Operation] = [Await(bundle.messages[-1])]
        received = bundle.ranks[1] == self.program.rank
        return [*made, self._copy(2 * self.bundled[bundle], step, "bundle")] if received else made

    def _attend(self, attend: Attend | Multiply) -> list[Operation]:
        patch = attend.patch
        seconds = self.costs.kernel_seconds(patch) * self._share(attend)
        label = f"{patch.rows} × {patch.cols}"
        made: list[Operation] = [Compute(seconds, True, attend.step, label)]
        encoded = [each for each in (attend.q, attend.kv) if each.slot >= 0 and self.decoded_bytes[each.slot]]
        if encoded:
            decoding = sum(self._nbytes(each) + self._plain_bytes(each) for each in encoded)
            made.insert(0, self._copy(decoding, attend.step, "decode"))
        copied = sum(self._result_bytes(attend, result) for result in attend.results)
        merges = sum(self._merges(result.first) for result in attend.results)
        return [*made, self._copy(copied, attend.step, "merge", merges)] if copied else made

    def _share(self, call: Attend | Multiply) -> float:
        """Return the part of a tile's products that a call makes."""
        home = self.costs.schedule.operator.home[self.costs.direction]
        return 1.0 if isinstance(call, Attend) or not home else len(made_by(call, home)) / len(home)

    def _merges(self, first: bool) -> int:
        """Return 1 if results are merged by log-sum-exp, 0 where gradients are added or the first one is copied."""
        return int(not first and self.costs.direction == "forward" and self.costs.merges_by_lse)

    def _result_bytes(self, attend: Attend | Multiply, result: Result) -> int:
        """Return the bytes that a result touches; 0 where the caller gets the kernel's own result."""
        slot = self.program.slots[result.into.slot]
        whole = (attend.q if result.kind == "q_partial" else attend.kv).rows
        if slot.output and result.first and result.into.rows == whole == slot.rows:
            return 0
        return TOUCHED[result.first] * self._nbytes(result.into)

    def _copy(self, nbytes: int, step: int, label: str, merges: int = 0) -> Compute:
        return Compute(self.costs.rates.results_seconds(nbytes, merges), False, step, label)

    def _nbytes(self, span: Span) -> int:
        return self.row_bytes[span.slot] * span.rows

    def _plain_bytes(self, span: Span) -> int:
        """Return the bytes of a span as they are computed with: decoded, if they are encoded."""
        return (self.decoded_bytes[span.slot] or self.row_bytes[span.slot]) * span.rows
