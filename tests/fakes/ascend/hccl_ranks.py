"""What tests do on ranks with emulated NPUs and HCCL: contexts, calls, and programs with something wrong in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from cases import Case, Local
from oracle import Attention
from ranks import Here

from ascend import hccl
from ascend.hccl_ledger import labelled, ledger, limits
from ascend.hccl_streams import forget_streams
from ascend.hccl_watch import watch
from tokenring import ContextParallel, attention, shard
from tokenring.backends.interfaces import Transport, Work
from tokenring.backends.transports.hccl import HcclTransport
from tokenring.backends.transports.hccl_batches import HcclBatchTransport
from tokenring.backends.transports.hccl_collectives import HcclCollectivesTransport
from tokenring.lowering.program import Program

Change = Callable[[Program], Program]
Tensors = Mapping[int, torch.Tensor]


def fresh(seconds: float = 20.0) -> None:
    """An empty ledger, and time limits that are patient."""
    hccl.install()
    ledger.communicators.clear()
    ledger.in_use.clear()
    ledger.clear()
    limits.connect = limits.execute = seconds
    limits.late_errors, limits.streams, limits.meet_when_made = False, None, False
    forget_streams()


class Labelled(HcclTransport):
    """Tells the emulation what each message is, as no argument of torch's functions does."""

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Work:
        with labelled(label):
            return super().send(data, dst, channel, label)

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Work:
        with labelled(label):
            return super().recv(data, src, channel, label)


class LabelledCollectives(Labelled, HcclCollectivesTransport):
    """The same for collectives."""

    def all_to_all(self, sends: Tensors, recvs: Tensors, ranks: tuple[int, ...], label: str) -> Work:
        with labelled(label):
            return super().all_to_all(sends, recvs, ranks, label)

    def all_gather(self, data: torch.Tensor, recvs: Tensors, ranks: tuple[int, ...], label: str) -> Work:
        with labelled(label):
            return super().all_gather(data, recvs, ranks, label)


class LabelledBatches(HcclBatchTransport):
    """The same for batches, which begin later than their messages are posted: a line for each."""

    def _begin(self, group: Any, posts: Any) -> Any:
        with labelled("\n".join(post.label for post in posts)):
            return super()._begin(group, posts)


def labelled_transport(name: str, group: Any, seconds: float) -> Transport:
    """The transport of that name, with labels."""
    from tokenring.lowering.backend_names import transport_class

    made = transport_class(name)
    if made is HcclCollectivesTransport:
        return LabelledCollectives(group, seconds)
    if made is HcclBatchTransport:
        return LabelledBatches(group, seconds)
    return type("Labelled", (Labelled, made), {})(group, seconds)  # type: ignore[no-any-return]


def kept_transport(here: Here, name: str, streams: int | None = None) -> Transport:
    """One for all calls of these ranks; its communicators share so many streams."""
    key = name if streams is None else f"{name}, {streams} streams"
    if key not in here.memory or here.memory[key].control.broken is not None:
        fresh()
        import torch.distributed as dist

        here.memory[key] = labelled_transport(name, dist.group.WORLD, 20.0)
    limits.streams = streams
    return here.memory[key]  # type: ignore[no-any-return]


def run_case(
    here: Here,
    case: Case,
    transport: str,
    change: Change | None = None,
    kernel: str = "reference",
    to_host: bool = True,
    streams: int | None = None,
) -> Local:
    """Both passes of a case on NPUs, every operator watched; results and sent bytes on the CPU.

    change: of this rank's programs. Raises what the emulation finds.
    """
    moved = kept_transport(here, transport, streams)
    ledger.in_use.clear()
    ledger.clear()
    cp = ContextParallel(**case.options, transport=moved, kernel=kernel)
    if change is not None:
        _change_programs(cp, change)
    q, k, v, dout = (shard(x, cp).to("npu").requires_grad_(index < 3) for index, x in enumerate(case.inputs()))
    sent, counter = {}, moved.sent_bytes
    with watch():
        counter.clear()
        out, lse = attention(q, k, v, cp, case.mask, return_lse=True)
        sent["forward"] = dict(counter)
        counter.clear()
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        sent["backward"] = dict(counter)
    ledger.check_all_waited()
    cp.close()
    results = [x.detach() for x in (out, lse, *gradients)]
    return Local(Attention(*(x.cpu() if to_host else x for x in results)), sent)


def small_case(ranks: int, schedule: str = "direct-q", mask: str = "full") -> Case:
    """16 tokens a rank in fp32."""
    return Case(ranks, schedule, "zigzag", mask, 4, 2, 1, 8, torch.float32, None, given_length=16 * ranks)


def calls(cp: ContextParallel, case: Case) -> Callable[[], list[torch.Tensor]]:
    """Both passes of a case on NPUs, to be called again and again: its inputs lie there."""
    q, k, v, dout = (shard(x, cp).to("npu").requires_grad_(index < 3) for index, x in enumerate(case.inputs()))

    def call() -> list[torch.Tensor]:
        out = attention(q, k, v, cp, case.mask)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    return call


def _change_programs(cp: ContextParallel, change: Change) -> None:
    """Executors of this context run changed programs."""
    from tokenring.runtime import executor

    whole = cp._executor

    def changed(request: Any, direction: Any) -> executor.Executor:
        made = whole(request, direction)
        views = made.views
        pool, kernel = views.pool, cp.kernel(request.device)
        schedule = cp.plan(request).schedule
        program = change(made.program)
        moved = cp.transport_for(request.device)
        return executor.Executor(schedule, request.workload, program, pool, moved, kernel, request.scale)

    changed.cache_clear = whole.cache_clear  # type: ignore[attr-defined]
    cp._executor = changed  # type: ignore[assignment]


def without(program: Program, at: int) -> Program:
    """The program without one instruction."""
    instructions = program.instructions[:at] + program.instructions[at + 1 :]
    return replace(program, instructions=instructions, steps=program.steps[:at] + program.steps[at + 1 :])


def swapped(program: Program, one: int, other: int) -> Program:
    """The program with two instructions in each other's place."""
    order = list(range(len(program.instructions)))
    order[one], order[other] = other, one
    return _in_order(program, order)


def later(program: Program, one: int, other: int) -> Program:
    """The program with an instruction right after a later one."""
    order = [at for at in range(len(program.instructions)) if at != one]
    order.insert(other, one)
    return _in_order(program, order)


def _in_order(program: Program, order: list[int]) -> Program:
    instructions = tuple(program.instructions[at] for at in order)
    return replace(program, instructions=instructions, steps=tuple(program.steps[at] for at in order))
