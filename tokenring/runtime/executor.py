"""The one executor: it runs the program of any schedule, in either pass, on any transport and kernel.

A program is bound once to a buffer pool: each instruction becomes a function of the call, with
its views already made. Running it is a loop over these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from tokenring.backends.interfaces import AttentionKernel, PreparesRows, Transport
from tokenring.backends.merging.choice import merger_for
from tokenring.backends.merging.torch_merger import AcceptOut, accepting, copying
from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import Kind, ScheduleData
from tokenring.lowering.program import (
    OWN,
    Attend,
    Fill,
    Instruction,
    Merge,
    Multiply,
    Pack,
    Program,
    Recv,
    Result,
    Send,
    Span,
    Wait,
)  # fmt: skip
from tokenring.runtime.agreement import Disagreement, settle
from tokenring.runtime.bound_kernel import holding, of_call, operands_of, patches, together
from tokenring.runtime.call import ActiveCall, Step, profiling, ranged, run_steps
from tokenring.runtime.message_groups import Collectives, grouped, placed, settled
from tokenring.runtime.pool import Landed, Pool, Views, heads_first, own_rows, rows_first
from tokenring.sequence.workload import Workload

if TYPE_CHECKING:
    from tokenring.runtime.joined_rows import JoinedBinder
    from tokenring.runtime.trace import Trace

Made = tuple[torch.Tensor, ...]  # what a kernel returns
Sink = Callable[[ActiveCall, Made], None]
Getter = Callable[[ActiveCall], torch.Tensor]
Accept = Callable[[ActiveCall, list[torch.Tensor]], None]


class Executor:
    """One program, bound to a pool, a transport and a kernel."""

    def __init__(
        self,
        schedule: ScheduleData,
        workload: Workload,
        program: Program,
        pool: Pool,
        transport: Transport | None,
        kernel: AttentionKernel,
        scale: float,
    ) -> None:
        self.program, self.transport, self._named_by = program, transport, (schedule, program, kernel.supports_patch)
        self.views = Views(schedule, workload, program, pool)
        kernel = holding(kernel, program, workload, self.views.base.device)
        binder = _Binder(self.views, transport, kernel, scale, program.direction == "forward")
        self.instructions, alone = list(zip(program.instructions, program.steps, strict=True)), program.instructions
        steps, in_order = binder.bind_all(alone)
        self.streams, self.steps = pool.streams, settled(transport, alone, grouped(transport, program, steps))
        if self.streams is not None:
            from tokenring.runtime.streams import on_streams

            self.steps = on_streams(self.steps, in_order, self.streams)
        self._begin = placed(transport, self.views, alone)
        self.adopted = binder.adopted
        self.preparing = kernel if program.direction == "backward" and isinstance(kernel, PreparesRows) else None

    def run(self, call: ActiveCall, trace: Trace | None = None) -> None:
        """Run the program; `result` then gives what it made."""
        try:
            self._run(call, trace)
        except Disagreement:  # on all ranks, which go on
            raise
        except BaseException as error:  # it leaves the ranks out of step: the others hear of it
            if self.transport is not None:
                self.transport.fail(error)
            raise
        finally:
            call.handles.clear()  # where ranks disagree: a message that has no handle lands in the pool no more

    def _run(self, call: ActiveCall, trace: Trace | None) -> None:
        self._new_outputs(call)
        self._begin()
        if self.streams is not None:
            self.streams.begin()
        named = self.ranged_steps if profiling() else None
        run_steps(self.program, self.instructions, self.steps, named, call, trace)
        settle(self.transport)  # if it has waited for nobody

    @cached_property
    def ranged_steps(self) -> list[Step]:
        """The steps as profilers want them, each in a range of its name."""
        from tokenring.runtime.labels import range_names

        return ranged(self.steps, range_names(*self._named_by))

    def result(self, call: ActiveCall, kind: Kind, name: str) -> torch.Tensor:
        """Return a field of the rank's own result: [B, T, H, D] or, for lse, [B, H, T].

        In fp32 it is the caller's to keep; else it lies in the pool, in fp32, until the next run.
        """
        slot = dict(self.program.home)[kind]
        made = call.outputs[slot][name] if slot in call.outputs else self.views.whole(slot, name)
        return made.permute(1, 2, 0) if made.dim() == 3 else made.transpose(0, 1)

    def _new_outputs(self, call: ActiveCall) -> None:
        """Allocate memory for results that no kernel makes in one piece."""
        size = self.views.workload
        for slot, spec in enumerate(self.program.slots):
            if not spec.output or slot in self.adopted:
                continue
            record, some = self.views.record(slot), next(iter(call.own.values()))
            shapes = {
                each.name: (size.batch, spec.rows, record.heads, *(() if each.statistic else (each.dim,)))
                for each in record.fields
            }
            call.outputs[slot] = {
                name: torch.empty(shape, dtype=torch.float32, device=some.device).transpose(0, 1)
                for name, shape in shapes.items()
            }


class _Binder:
    """Turns instructions into functions. Apart from the executor: it holds the functions, which must not hold it."""

    def __init__(
        self, views: Views, transport: Transport | None, kernel: AttentionKernel, scale: float, forward: bool
    ) -> None:
        self.views, self.transport, self.kernel, self.scale, self.forward = views, transport, kernel, scale, forward
        self.operator, self.program, self.head_range = views.operator, views.program, views.records.head_range
        self.collectives, self.adopted = Collectives(views, transport), set[int]()  # output slots that are a kernel's
        asks = self.views.base.device.type != "cpu"  # a device, for each copy
        self.copying: Any = import_module("tokenring.runtime.copying") if asks else None

    @property
    def joined(self) -> JoinedBinder:
        """Return the binder of steps that go together: not held, as each would keep the other, and its memory."""
        from tokenring.runtime.joined_rows import JoinedBinder  # of kernels that pack, and programs that fill

        return JoinedBinder(self)

    def bind_all(self, instructions: Sequence[Instruction]) -> tuple[list[Step], list[Instruction]]:
        """Return steps, and whose they are: posts keep their places; what goes together is made at the first of it."""
        steps: list[Step] = []
        groups = list(together(instructions, self.kernel))
        if any(len(each) > 1 for each in groups):
            groups = list(self.joined.runs(groups))
        for group in groups:
            steps.append(self.bind(group[0]) if len(group) == 1 else self._bind_together(group))
            steps += [_nothing] * (len(group) - 1)
        made = self.copying.copied_together(self, groups, steps) if self.copying else steps
        return made, [each for group in groups for each in group]

    def _bind_together(self, group: tuple[Any, ...]) -> Step:
        match group[0]:
            case Attend():
                return self._attend_packed(group)
            case Merge():
                return self.joined.merging(group)
        return self.joined.filling(group)

    def bind(self, instruction: Instruction) -> Step:
        match instruction:
            case Attend():
                return self._attend(instruction)
            case Multiply():
                from tokenring.runtime.products import multiplying

                return multiplying(instruction, self.views, self.operand, self.accept)
            case Merge():
                return self._merge(instruction)
            case Pack():
                return self._pack(instruction)
            case Recv() | Send():
                return self._post(instruction)
            case Wait(message):
                return lambda call: call.handles.pop(message).wait()
            case Fill():
                return self.joined.filling((instruction,))
        raise TypeError(f"unknown instruction {instruction}")

    # ---------- messages

    def _post(self, post: Recv | Send) -> Step:
        transport = self.transport
        if transport is None:
            raise ConfigurationError("this schedule sends messages, but there is no process group to send them in")
        span, message, channel, label = post.span, post.message, post.channel, post.label
        data = self._fixed(span, lambda kept: self.views.message(span, kept))
        if message in self.collectives:
            return self.collectives.bind(post, data)
        if isinstance(post, Send):
            to = post.dst

            def send(call: ActiveCall) -> None:
                call.handles[message] = transport.send(data(call), to, channel, label)

            return send
        source = post.src
        landing = self.views.landing(span)
        if landing is not None:

            def recv_landing(call: ActiveCall) -> None:
                handle = transport.recv(landing, source, channel, label)
                call.handles[message] = Landed(handle, [(landing, data(call))])

            return recv_landing

        def recv(call: ActiveCall) -> None:
            call.handles[message] = transport.recv(data(call), source, channel, label)

        return recv

    def _fixed(self, span: Span, make: Callable[[torch.Tensor | None], torch.Tensor]) -> Getter:
        """Return a getter of a view that is made once, or for each call if it lies in memory of the call."""
        slot = span.slot
        if self.program.slots[slot].kept:
            return lambda call: make(call.kept[slot])
        view = make(None)
        return lambda call: view

    def field(self, span: Span, name: str) -> Getter:
        """Return a getter of a span's field, wherever it lies: [rows, B, heads, D], or [rows, B, heads]."""
        slot, spec = span.slot, self.program.slots[span.slot]
        if not spec.output:
            return self._fixed(span, lambda kept: self.views.field(span, name, kept))
        low, high = self.head_range(spec.kind, span.heads)
        return lambda call: call.outputs[slot][name][span.start : span.stop, :, low:high]

    def read(self, span: Span, name: str) -> Getter:
        """Return a getter of a span's field, decoded if it is encoded: until the next one of this name is read."""
        field, codec = self.field(span, name), self.views.codec(span.slot, name)
        if codec is None:
            return field
        decode, into = codec.decode, self.views.decoded(span, name)
        return lambda call: decode(field(call), into)

    def write(self, span: Span, name: str) -> Callable[[ActiveCall, torch.Tensor], object]:
        """Return a function that overwrites a span's field, and encodes what it writes if the field is encoded."""
        field, codec = self.field(span, name), self.views.codec(span.slot, name)
        if codec is None:
            return lambda call, new: field(call).copy_(new)
        encode = codec.encode
        return lambda call, new: encode(new, field(call))

    def _pack(self, pack: Pack) -> Step:
        writes = [(each.name, self.write(pack.into, each.name)) for each in self.views.record(pack.into.slot).fields]
        heads = self.head_range(pack.kind, pack.source.heads)

        def copy(call: ActiveCall) -> None:
            for name, write in writes:
                write(call, own_rows(call.own[name], pack.source, *heads))

        return copy

    # ---------- tiles

    def operand(self, span: Span, name: str, kind: Kind) -> Getter:
        """Return a getter of a kernel operand: [B, H, S, D], or [B, H, S] for a statistic."""
        if span.slot != OWN:
            if self.views.codec(span.slot, name) is not None:
                read = self.read(span, name)
                return lambda call: heads_first(read(call))
            return self._fixed(span, lambda kept: heads_first(self.views.field(span, name, kept)))
        (low, high), rows = self.head_range(kind, span.heads), slice(span.start, span.stop)
        if name in ("lse", "delta"):
            return lambda call: call.own[name][:, low:high, rows]
        return lambda call: call.own[name][:, rows, low:high].transpose(1, 2)

    def _attend(self, attend: Attend) -> Step:
        patch, direction = attend.patch, self.program.direction
        kernel, scale = of_call(self.kernel, self.scale)
        operands = operands_of(self, attend, attend)
        copied = [each for each in attend.results if self.copying and each.first and not self.adopts(attend, each)]
        sinks = [self.copying.results_copied(self, copied)] if copied else []
        sinks += [self.sink(attend, result) for result in attend.results if result not in copied]

        def attend_tile(call: ActiveCall) -> None:
            given, out = operands(call)
            made = getattr(kernel(call), direction)(*given, **out, patch=patch, scale=scale)
            for sink in sinks:
                sink(call, made)

        return attend_tile

    def _attend_packed(self, attends: tuple[Attend, ...]) -> Step:
        """Bind several patches of a tile to one kernel call."""
        parts, (kernel, scale) = patches(attends), of_call(self.kernel, self.scale)
        operands, accept = operands_of(self, attends[0], attends[-1]), self.joined.results(attends)
        packed = f"{self.program.direction}_packed"

        def attend_patches(call: ActiveCall) -> None:
            given, out = operands(call)
            accept(call, getattr(kernel(call), packed)(*given, **out, patches=parts, scale=scale))

        return attend_patches

    def sink(self, attend: Attend, result: Result) -> Sink:
        """Return a function that writes rows of a kernel's result to where they belong."""
        rows = slice(result.start, result.start + result.into.rows)
        if self.adopts(attend, result):
            return self._adopt(result)
        which = slice(0, 2) if self.forward else slice(0, 1) if result.kind == "q_partial" else slice(1, 3)
        if self.forward:
            accept_out = self.accept_out(result.into, result.first)
            accept: Accept = lambda call, news: accept_out(call, *news)  # noqa: E731
        else:
            accept = self.accept(result.kind, result.into, result.first)
        return lambda call, made: accept(call, [rows_first(each[:, :, rows]) for each in made[which]])

    def adopts(self, attend: Attend, result: Result) -> bool:
        """Tell whether a kernel makes the whole of an output before anything else writes to it."""
        rows = (attend.q if result.kind == "q_partial" else attend.kv).rows
        spec = self.program.slots[result.into.slot]
        low, high = self.head_range(spec.kind, result.into.heads)
        all_heads = high - low == self.views.record(result.into.slot).heads
        return spec.output and result.first and all_heads and result.into.rows == rows == spec.rows

    def _adopt(self, result: Result) -> Sink:
        slot = result.into.slot
        self.adopted.add(slot)
        if self.forward:

            def take(call: ActiveCall, made: Made) -> None:
                call.outputs[slot] = {"out": rows_first(made[0]), "lse": made[1].permute(2, 0, 1)}

            return take
        names, which = self.names(result.kind, slot), slice(0, 1) if result.kind == "q_partial" else slice(1, 3)

        def take_gradients(call: ActiveCall, made: Made) -> None:
            call.outputs[slot] = {name: rows_first(each) for name, each in zip(names, made[which], strict=True)}

        return take_gradients

    # ---------- accumulators

    def accept_out(self, into: Span, first: bool, *source: int) -> AcceptOut:
        """Return a function that merges out and lse into rows. source: the slot that they come from, if any."""
        if first:
            return copying(*(self.field(into, name) for name in self.names("q_partial", into.slot, *source)))
        out, lse = self.field(into, "out"), self.field(into, "lse")
        slot = self.program.slots[into.slot]
        low, high = self.head_range(slot.kind, into.heads)
        whole = slot.output and into.rows == slot.rows and high - low == self.views.record(into.slot).heads
        merger = merger_for(self.views.base.device, self.views.workload.value_dim)
        scratch = self.views.scratch(into.rows, high - low)
        return accepting(merger, out, lse, scratch, into.slot if whole else None)

    def names(self, kind: Kind, *slots: int) -> tuple[str, ...]:
        """Return the fields of a result that all these slots have: tensors, then statistics."""
        statistics, tensors = self.operator.carries[kind, self.program.direction]
        has = [{each.name for each in self.views.record(slot).fields} for slot in slots]
        return tuple(name for name in (*tensors, *statistics) if all(name in some for some in has))

    def accept(self, kind: Kind, into: Span, first: bool) -> Accept:
        """Return a function that adds results [rows, B, heads, D] to those that there are; the first is copied."""
        if first:
            writes = [self.write(into, name) for name in self.names(kind, into.slot)]

            def overwrite(call: ActiveCall, news: list[torch.Tensor]) -> None:
                for write, new in zip(writes, news, strict=True):
                    write(call, new)

            return overwrite
        targets = [self.field(into, name) for name in self.names(kind, into.slot)]

        def add(call: ActiveCall, news: list[torch.Tensor]) -> None:
            for target, new in zip(targets, news, strict=True):
                target(call).add_(new)

        return add

    def _merge(self, merge: Merge) -> Step:
        if merge.first and self.copying is not None and merge.kind not in self.views.records.formats:
            return self.copying.merging(self, [merge])  # type: ignore[no-any-return]
        if self.forward and self.operator.merge == "log-sum-exp":
            accept = self.accept_out(merge.into, merge.first, merge.source.slot)
            has = self.names(merge.kind, merge.source.slot)  # out alone, where lse is left out: then nothing reads it
            out, lse = self.field(merge.source, has[0]), self.field(merge.source, has[-1])
            return lambda call: accept(call, out(call), lse(call))
        add = self.accept(merge.kind, merge.into, merge.first)
        sources = [self.read(merge.source, name) for name in self.names(merge.kind, merge.source.slot)]
        return lambda call: add(call, [source(call) for source in sources])


def _nothing(call: ActiveCall) -> None:
    """Do nothing, for what went with an earlier instruction."""
