"""The launches of a program: operators that its instructions ask a device for, and messages that they post.

Counted as the executor runs them with tensors as callers have them: contiguous, merged by torch's operators. Patches
that a kernel computes in one call (packed documents) count as a call each, and a mask of a patch's own as none.
"""

from __future__ import annotations

import torch

from tokenring.ir.schedule_data import Kind
from tokenring.lowering.program import OWN, Attend, Fill, Merge, Multiply, Pack, Program, Recv, Result, Send, Span
from tokenring.planner.simulation.copied import CopiesOfProgram, PassRecords
from tokenring.tables.launching import KernelLaunches

TENSORS = {"q": 1, "kv": 2, "q_partial": 1, "kv_partial": 2}  # operands, or gradients, that a block of a kind has
MERGE = 6  # logaddexp, clamp, sub, exp, lerp, copy: a merge by log-sum-exp (`torch_merger.py`), beside a conversion
WRITTEN = {("column", "forward"), ("row", "backward"), ("reduce", "backward"), ("gather", "forward")}  # pairs are
SUMS = ("reduce", "gather")  # operators without a product
DELTA = 2  # of a row's dout · out: a product and its sum, beside two conversions


class Launches:
    """Counts the launches of one program. Instructions are given in their order: what is made once, the first makes."""

    def __init__(self, program: Program, of_pass: PassRecords, kernel: KernelLaunches) -> None:
        self.program, self.kernel, self.of_pass = program, kernel, of_pass
        self.records, self.size = of_pass.records, of_pass.records.workload
        self.forward, self.half = program.direction == "forward", self.size.dtype != torch.float32
        self.copies = CopiesOfProgram(program, of_pass)
        self.operator, self.is_attention = of_pass.operator, of_pass.operator.merge == "log-sum-exp"
        products = [each for each in program.instructions if isinstance(each, Multiply)]
        self._columns = max((each.corner[1] + each.kv.rows for each in products), default=0)  # of the tensor of pairs
        self._has: set[str] = set()  # what is made once: lse and delta of own rows
        self._shapes: set[int] = set()  # rows of calls so far
        self._collectives = {message: each for each in program.collectives for message in each.messages}

    def of(self, instruction: object) -> int:
        """Return what an instruction launches."""
        match instruction:
            case Attend():
                return self._attend(instruction)
            case Multiply():
                return self._multiply(instruction)
            case Merge(kind, source, into, first):
                if first:
                    return self.copies.of_merges(self.copies.together(instruction))
                return self._accepted(kind, into, source)
            case Pack():
                return self._packs([each for each in self.copies.together(instruction) if isinstance(each, Pack)])
            case Fill(kind, into):
                return len(self.copies.record(into.slot).fields) if self.forward else self._tensors(kind)
            case Recv(message) | Send(message):
                return self._post(message)
        return 0

    def after(self) -> int:
        """Return what is launched after the last instruction: results as the caller gets them."""
        if not self.is_attention:
            return len(self.operator.home[self.program.direction]) * self.half
        if self.forward:
            return (not self.operator.left_out) + self.half  # lse in memory of its own, and out in the caller's dtype
        return (TENSORS["q"] + TENSORS["kv"]) * self.half

    def _post(self, message: int) -> int:
        """Return 1, or of messages that go as one operation, at the last of them, how many operations that is."""
        collective = self._collectives.pop(message, None)
        if collective is None:
            return 1
        return 0 if any(each in self._collectives for each in collective.messages) else collective.parts

    def _packs(self, packs: list[Pack]) -> int:
        fields = [field.name for pack in packs for field in self.copies.record(pack.into.slot).fields]
        return self.copies.of_packs(packs) + sum(map(self._own, fields))

    def _own(self, name: str) -> int:
        """Return the launches of a number of own rows that backward makes when it is first asked for."""
        if self.forward or name in self._has or name not in ("lse", "delta"):
            return 0
        self._has.add(name)
        return self.kernel.own_lse if name == "lse" else self.kernel.own_delta + DELTA + 2 * self.half

    # ---------- kernel calls

    def _attend(self, attend: Attend) -> int:
        kernel, q, kv = self.kernel, attend.kept_q or attend.q, attend.kv
        copied = self._copied_pair("kv", kv) + self._results(attend)
        if self.forward:
            return kernel.forward + self._is_copied("q", q) + copied
        if q == attend.q:
            copied += self._copied_pair("q", q)  # with dout, which lies with what is new
        else:
            copied += self._is_copied("q", q) + self._is_copied("q", attend.q)
        copied += kernel.each_shape * (attend.q.rows not in self._shapes)
        self._shapes.add(attend.q.rows)
        if attend.q.slot == OWN:
            return kernel.backward + self._own("lse") + self._is_copied("q", attend.q) + copied  # out
        return kernel.backward + kernel.stand_in + (self.size.batch > 1) + copied

    def _copied_pair(self, kind: Kind, span: Span) -> int:
        """Return the copies of k and v, or of q and dout: one of both where they lie side by side."""
        apart = span.slot == OWN or self.size.head_dim != self.size.value_dim
        return (2 if apart else 1) * self._is_copied(kind, span)

    def _is_copied(self, kind: Kind, span: Span) -> bool:
        """Return True if operands do not lie as kernels want them: beside other fields, or only some of the heads."""
        batch = self.size.batch > 1
        if span.slot == OWN:
            return self.records.groups > 1 or (batch and span.rows != self.of_pass.own_rows[kind])
        return batch or len(self.copies.record(span.slot).fields) > 1

    def _results(self, attend: Attend) -> int:
        """Return the launches of a kernel's results: adopted by the caller, copied as few times as go, or accepted."""
        kept = [each for each in attend.results if not self._is_adopted(attend, each)]
        launches = sum(self._accepted(each.kind, each.into) for each in kept if not each.first)
        for rows, kind in ((attend.q.rows, "q_partial"), (attend.kv.rows, "kv_partial")):
            launches += self.copies.of_results(rows, [each for each in kept if each.first and each.kind == kind])
        return launches

    def _is_adopted(self, attend: Attend, result: Result) -> bool:
        """Return True if the caller gets what the kernel made."""
        slot = self.program.slots[result.into.slot]
        whole = (attend.q if result.kind == "q_partial" else attend.kv).rows
        low, high = self.records.head_range(slot.kind, result.into.heads)
        all_heads = high - low == self.copies.record(result.into.slot).heads
        return slot.output and result.first and all_heads and result.into.rows == whole == slot.rows

    def _accepted(self, kind: Kind, into: Span, source: Span | None = None) -> int:
        """Return the launches of a result that is merged or added to what there is; source None: of a kernel's."""
        if not self.forward or not self.is_attention:
            return self._tensors(kind)
        given = self.size.dtype if source is None else self._out(source.slot)
        return MERGE + (given != self._out(into.slot))

    # ---------- products

    def computes(self, product: Multiply) -> bool:
        """Return whether a product launches anything of its own: a sum takes what there is."""
        return self._name not in SUMS or self._writes

    def _multiply(self, product: Multiply) -> int:
        """Return the launches of a product: what it writes, with a copy if to some columns; results, each accepted."""
        products = 0 if self._name in SUMS else len({each.kind for each in product.results})
        part = self._name not in SUMS and product.kv.rows < self._columns
        return self._writes * (1 + part) + products + len(product.results)

    @property
    def _name(self) -> str:
        return self.operator.name.partition("-")[0]

    @property
    def _writes(self) -> bool:
        return (self._name, self.program.direction) in WRITTEN

    # ---------- slots

    def _tensors(self, kind: Kind) -> int:
        return TENSORS[kind] if self.is_attention else 1

    def _out(self, slot: int) -> torch.dtype:
        return self.copies.record(slot).field("out").dtype
