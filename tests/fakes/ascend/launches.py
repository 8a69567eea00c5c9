"""What an NPU is asked to launch: operators on its tensors, and messages, by the instruction that asks for them.

Views and new memory are no launches. One process runs every rank's programs, one after another, on memory that nothing
has come into: what is launched does not depend on it. So messages are posted to nobody, and only counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ascend import device
from tokenring.api.autograd import run_backward, run_forward
from tokenring.backends.interfaces import AttentionKernel, Work
from tokenring.ir.schedule_data import PASSES, ScheduleData
from tokenring.lowering.lower import lower
from tokenring.lowering.pair_box import pair_box
from tokenring.lowering.program import Instruction
from tokenring.lowering.target import Target
from tokenring.runtime.call import ActiveCall, Step, taken
from tokenring.runtime.executor import Executor
from tokenring.runtime.pool import Pool
from tokenring.sequence.workload import Workload

NO_LAUNCHES = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::_unsafe_view", "aten::_reshape_alias",
}  # fmt: skip
POST = "post"
Tensors = Mapping[int, torch.Tensor]
Launched = list[tuple[Instruction | None, Counter[str]]]  # of a pass: what each instruction launched; None: after all


class Nowhere:
    """A transport that posts messages to nobody."""

    rank, sent_bytes, pool = 0, {}, None  # type: ignore[var-annotated]

    def __init__(self, world_size: int, target: Target, log: Log) -> None:
        self.world_size, self.target, self._log = world_size, target, log

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Work:
        assert data.is_contiguous()
        self._log.add(POST)
        return self

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Work:
        return self.send(data, src, channel, label)

    def all_to_all(self, sends: Tensors, recvs: Tensors, ranks: tuple[int, ...], label: str) -> Work:
        self._log.add(POST)
        return self

    def all_gather(self, data: torch.Tensor, recvs: Tensors, ranks: tuple[int, ...], label: str) -> Work:
        self._log.add(POST)
        return self

    def wait(self) -> None:
        """Nothing is on its way."""

    def fail(self, error: BaseException) -> None:
        """Nobody has to hear of it."""


class Log:
    """The names of what was launched, by the number of the instruction; -1: what is around them."""

    def __init__(self) -> None:
        self.at = -1
        self.found: dict[int, Counter[str]] = {}

    def add(self, name: str) -> None:
        self.found.setdefault(self.at, Counter())[name] += 1

    def of(self, number: int, step: Step) -> Step:
        def run(call: ActiveCall) -> None:
            self.at = number
            step(call)
            self.at = -1

        return run

    def taken(self, instructions: tuple[Instruction, ...]) -> Launched:
        found, self.found = self.found, {}
        whole = [(each, found.get(number, Counter())) for number, each in enumerate(instructions)]
        return [*whole, (None, found.get(-1, Counter()))]


@contextmanager
def noted(log: Log) -> Iterator[None]:
    """Inside, every operator on NPU tensors is noted in the log."""
    run = device._run

    def watched(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        if not (func.is_view or name in NO_LAUNCHES):
            log.add(name)
        return run(func, args, kwargs)

    device._run = watched
    try:
        yield
    finally:
        device._run = run


def launched(
    schedule: ScheduleData, size: Workload, rank: int, kernel: AttentionKernel, target: Target
) -> dict[str, Launched]:
    """Return what both passes of a rank launch, in a call of contiguous tensors, without any trial of operators."""
    log = Log()
    transport: Any = Nowhere(schedule.world_size, target, log)
    programs = {each: lower(schedule, rank, each, size, target, kernel.supports_patch) for each in PASSES}
    executors = {
        each: Executor(schedule, size, program, Pool(torch.device("npu")), transport, kernel, 1.0)
        for each, program in programs.items()
    }
    for each in executors.values():
        each.steps = [log.of(number, step) for number, step in enumerate(each.steps)]
        each.views.base.zero_()
    q, k, v, dout = (own_part(size, schedule.world_size, name) for name in ("q", "k", "v", "dout"))
    found = {}
    with noted(log):
        out, lse, kept = run_forward(executors["forward"], None, q, k, v)
        found["forward"] = log.taken(programs["forward"].instructions)
        sound = torch.zeros(lse.shape, device="npu")  # what comes of nothing may be NaN, which the operator refuses
        log.found.clear()
        run_backward(executors["backward"], None, dout, q, k, v, out, sound, kept)
        found["backward"] = log.taken(programs["backward"].instructions)
    return found


def launched_layer(
    schedule: ScheduleData, size: Workload, rank: int, kernel: AttentionKernel, target: Target
) -> dict[str, Launched]:
    """Return what both passes of a rank launch for a linear layer or a collective, of contiguous tensors."""
    log = Log()
    found: dict[str, Launched] = {}
    transport: Any = Nowhere(schedule.world_size, target, log)
    of_rank = {"q": size.q_length // schedule.world_size, "kv": size.kv_length // schedule.world_size}
    box = pair_box(schedule, rank).shape
    if schedule.operator.name in ("reduce", "gather"):  # whose tensors of pairs are the same in each column
        box = size.q_length, size.head_dim
    own = {
        name: torch.zeros(1, of_rank[kind], 1, size.head_dim, dtype=size.dtype, device="npu")
        for name, kind in (("x", "q"), ("dy", "q"), ("w", "kv"))
    }
    own |= {name: torch.zeros(box, dtype=size.dtype, device="npu") for name in ("a", "da", "c", "dc")}
    for each in PASSES:
        program = lower(schedule, rank, each, size, target)
        executor = Executor(schedule, size, program, Pool(torch.device("npu")), transport, kernel, 1.0)
        executor.steps = [log.of(number, step) for number, step in enumerate(executor.steps)]
        call = ActiveCall(own)
        with noted(log):
            executor.run(call)
            for kind in schedule.operator.home[each]:
                for name in schedule.operator.carries[kind, each][1]:
                    taken(executor.result(call, kind, name), size.dtype)
        found[each] = log.taken(program.instructions)
    return found


def own_part(size: Workload, ranks: int, name: str) -> torch.Tensor:
    """A rank's own part of q, k, v or dout: zeros."""
    whole, heads = (size.kv_length, size.kv_heads) if name in "kv" else (size.q_length, size.q_heads)
    return torch.zeros(size.batch, whole // ranks, heads, size.head_dim, dtype=size.dtype, device="npu")
