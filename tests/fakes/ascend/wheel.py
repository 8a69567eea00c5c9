"""A stand-in for the wheel of `real`: what its checks need of torch_npu 2.13.0, so that they also run without it.

Signatures are those of `schemas`, checked by torch's dispatcher; kernels for the device "meta" say what those of the
wheel say, with their faults (op_plugin/meta/_meta_registrations.py of the wheel).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ranks import Here, RankPools, Ranks

from ascend import real
from ascend.operators import by_name
from ascend.schemas import WHEELS

WHEEL = "2.13.0"
ROWS = {"BNSD": 2, "BSND": 1}  # the dimension that holds a sequence's rows, of each padded layout that the kernel uses
Given = dict[str, Any]


class StandInPools(RankPools):
    """Pools whose ranks have the stand-in."""

    def _make(self, world_size: int) -> Ranks:
        made = super()._make(world_size)
        made(load)
        return made


def load(here: Here) -> None:
    """Defines the wheel's operators, with kernels for "meta", and registers the goldens."""
    library = torch.library.Library("npu", "DEF")  # type: ignore[no-untyped-call]
    real.registered.append(library)
    for name, text in WHEELS[WHEEL].items():
        library.define(text)  # type: ignore[no-untyped-call]
        if name in META:
            library.impl(name, _named(text, META[name]), "Meta")  # type: ignore[no-untyped-call]
    real.register_goldens()


def _named(text: str, compute: Callable[[Given], tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    schema = torch._C.parse_schema(f"npu::{text}")

    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return compute(by_name(schema, args, kwargs))

    return call


def _statistics(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make maximum and sum, and the empty softmax_out."""
    largest, total = (torch.empty(*shape, 8, device="meta") for _ in range(2))
    return largest, total, torch.empty(0, device="meta")


def _forward(given: Given) -> tuple[Any, ...]:
    q, v, layout, heads = given["query"], given["value"], given["input_layout"], given["head_num"]
    shape = (q.shape[0], heads) if layout == "TND" else (q.shape[0], heads, q.shape[ROWS[layout]])
    return q.new_empty(*q.shape[:-1], v.shape[-1]), *_statistics(*shape), 0, 0, 0


def _gradient(given: Given) -> tuple[Any, ...]:
    made = (given[name].new_empty(given[name].shape) for name in ("query", "key", "value"))
    return *made, torch.empty(0, device="meta"), torch.empty(0, device="meta")


def _forward_v2(given: Given) -> tuple[Any, ...]:
    """Out is as wide as q, and every layout is taken for BNSD."""
    q = given["query"]
    return torch.empty_like(q), *_statistics(q.shape[0], given["head_num"], q.shape[2]), 0, 0, 0


def _gradient_v2(given: Given) -> tuple[Any, ...]:
    """Raises TypeError, whatever was given."""
    return (torch.empty_like([0], device="meta"),)  # type: ignore[arg-type]


META: dict[str, Callable[[Given], tuple[Any, ...]]] = {
    "npu_fusion_attention": _forward,
    "npu_fusion_attention_grad": _gradient,
    "npu_fusion_attention_v2": _forward_v2,
    "npu_fusion_attention_grad_v2": _gradient_v2,
}
