"""The tiles of linear layers and collectives, bound: products and sums of rows, columns and tensors of pairs.

Operands are [rows, D] of x, dy, ... and [columns, D] of w; a tensor of pairs is [rows, columns] on its rank, or
[rows, D] where columns are ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tokenring.ir.schedule_data import Kind, Pass
from tokenring.lowering.program import NOTHING, OWN, Multiply, Span
from tokenring.runtime.call import ActiveCall, Step
from tokenring.runtime.pool import Views

Tensors = Mapping[str, torch.Tensor]
Product = Callable[[Tensors, bool], torch.Tensor]
Getter = Callable[[ActiveCall], torch.Tensor]
OperandOf = Callable[[Span, str, Kind], Getter]
AcceptInto = Callable[[Kind, Span, bool], Callable[[ActiveCall, list[torch.Tensor]], None]]


def _mm(a: torch.Tensor, b: torch.Tensor, wide: bool) -> torch.Tensor:
    """Return a product, in fp32 where it goes into a sum in fp32; accelerators round it to the operands' dtype."""
    return a.float() @ b.float() if wide and a.device.type == "cpu" else a @ b


RESULTS: Mapping[tuple[str, Pass], Mapping[Kind, Product]] = {
    ("column", "backward"): {
        "q_partial": lambda of, wide: _mm(of["dc"], of["w"], wide),
        "kv_partial": lambda of, wide: _mm(of["dc"].t(), of["x"], wide),
    },
    ("row", "forward"): {"q_partial": lambda of, wide: _mm(of["c"], of["w"], wide)},
    ("row", "backward"): {"kv_partial": lambda of, wide: _mm(of["c"].t(), of["dy"], wide)},
    ("reduce", "forward"): {"q_partial": lambda of, _: of["a"]},
    ("gather", "backward"): {"q_partial": lambda of, _: of["da"]},
}
BY_ROWS = frozenset({"a", "da"})  # tensors of pairs [rows, D], the same in every column


def _product(into: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    torch.mm(rows, columns.t(), out=into) if into.is_contiguous() else into.copy_(rows @ columns.t())


WRITES: Mapping[tuple[str, Pass], Mapping[str, Callable[[torch.Tensor, Tensors], object]]] = {
    ("column", "forward"): {
        "c": lambda into, of: _product(into, of["x"], of["w"]),
        "a": lambda into, of: into.copy_(of["x"]),
    },
    ("row", "backward"): {"dc": lambda into, of: _product(into, of["dy"], of["w"])},
    ("reduce", "backward"): {"da": lambda into, of: into.copy_(of["dy"])},
    ("gather", "forward"): {"a": lambda into, of: into.copy_(of["x"])},
}


def _as_others_read(get: Getter, views: Views) -> Getter:
    """Return the getter of own rows as they are decoded at other ranks: meanwhile they are on their way there."""
    return lambda active: views.as_read(get(active))


def multiplying(call: Multiply, views: Views, operand: OperandOf, accept: AcceptInto) -> Step:
    """Return the step of one product.

    operand: makes the getter of an operand [B, H, S, D]; accept: makes the function that takes a result.
    """
    operator, program = views.operator, views.program
    direction = program.direction
    sides: tuple[tuple[Kind, Span], ...] = (("q", call.q), ("kv", call.kv))
    reads = {
        name: operand(span, name, kind)
        for kind, span in sides
        if span.slot != NOTHING
        for name in operator.carries.get((kind, direction), ((), ()))[1]
    }
    rows = slice(call.corner[0], call.corner[0] + call.q.rows)
    columns = slice(call.corner[1], call.corner[1] + call.kv.rows)
    name = operator.name.partition("-")[0]  # column-dx makes what column does, though not all of it
    pairs = {each: (rows,) if each in BY_ROWS else (rows, columns) for each in (operator.pairs or {})[direction]}
    written = [(each, write) for each, write in WRITES.get((name, direction), {}).items() if each in pairs]
    results = RESULTS.get((name, direction), {})
    wide = {each.kind for each in call.results if program.slots[each.into.slot].full_precision}
    makes = dict.fromkeys(result.kind for result in call.results)
    if name in ("reduce", "gather") and call.q.slot == OWN:  # all ranks are to have the same, whose own it is too
        reads = {each: _as_others_read(get, views) for each, get in reads.items()}
    sinks = [(each, accept(each.kind, each.into, each.first)) for each in call.results]

    def multiply(active: ActiveCall) -> None:
        of = {name: getter(active)[0, 0] for name, getter in reads.items()}
        of.update({name: active.own[name][where] for name, where in pairs.items()})
        for name, write in written:
            write(of[name], of)
        made = {kind: results[kind](of, kind in wide) for kind in makes}
        for result, sink in sinks:
            part = made[result.kind][result.start : result.start + result.into.rows]
            sink(active, [part[:, None, None, :]])

    return multiply
