"""Column and row linear layers: our schedules beside MC2, the vendor's fused operators, and beside HCCL's collectives.

Exact against float64 on the CPU, in small sizes; then both passes' times in turns, in sizes of a large model's MLP.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import tokenring as tr
from npu_smoke.here import Here
from npu_smoke.schedules import LIMIT, transport_of
from tokenring.cli.bench.layer_race import errors_of, in_turns, layer_case
from tokenring.cli.bench.torch_layers import Layer, by_collectives, layer_of
from tokenring.errors import TokenRingError, one_line

SCHEDULES = ("direct-q", "direct-q/pieces4", "tokenring")  # of which the weights stay
MC2, UNFUSED = "mc2", "HCCL, then the product"
ROUNDS = 5
DTYPE = torch.bfloat16  # which all of them take
LEAST_SUM = 256  # of elements over which MC2 multiplies


def column(here: Here) -> dict[str, Any]:
    """All-gather, then matmul; backward matmul, then reduce-scatter."""
    return _layer(here, "column")


def row(here: Here) -> dict[str, Any]:
    """Matmul, then reduce-scatter; backward all-gather, then matmul."""
    return _layer(here, "row")


def _layer(here: Here, operator: str) -> dict[str, Any]:
    if here.ranks < 2:
        return {"left out": "one rank has all features"}
    group, apart = here.group("linears"), here.group("mc2")  # what fails in one leaves the other as it is
    checked, timed = (layer_case(operator, *each, DTYPE) for each in _sizes(here))
    ways: dict[str, Layer] = {name: _ours(group, operator, schedule=name) for name in SCHEDULES}
    ways[MC2] = _ours(apart, operator, kernel="mc2")
    if here.kind != "cpu":
        ways[UNFUSED] = layer_of(operator, by_collectives(group))
    found: dict[str, Any] = {"device": here.device.name, "errors": {}, "left": {}, "failed": {}, "limit": LIMIT[DTYPE]}
    found["sizes"] = {"tokens": timed.tokens, "features": timed.features, "width": timed.width}
    for name in list(ways):
        here.say(f"{operator}, {name}")
        try:
            found["errors"][name] = errors_of(checked, ways[name], here.rank, here.ranks, here.place, here.slowest)
        except TokenRingError as error:
            fails = isinstance(error, tr.PeerLost)
            if fails and name != MC2:
                raise
            found["failed" if fails else "left"][name] = one_line(error, 300)  # refused: on all ranks
            del ways[name]
    here.say(f"{operator}, times")
    found["seconds"] = in_turns(timed, ways, here.ranks, here.place, ROUNDS, here.meet, here.slowest)
    return found


def _ours(group: Any, operator: str, **how: str) -> Layer:
    tp = tr.TensorParallel(group, transport=transport_of(group), **how)  # type: ignore[arg-type]
    return partial(tr.column_linear if operator == "column" else tr.row_linear, tp=tp)


def _sizes(here: Here) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Tokens and features of all ranks, and the width: of what is checked, and of what is timed."""
    small = 16 * here.ranks, LEAST_SUM * here.ranks, LEAST_SUM
    if here.kind == "cpu" or here.emulated:
        return small, small
    return small, (1024 * here.ranks, 28672 // (16 * here.ranks) * 16 * here.ranks, 8192)
