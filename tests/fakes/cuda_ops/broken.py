"""The operators that stand in for CUDA's with faults that no error tells, or that raise what real ones raise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from cuda_ops import aten
from tokenring.ir.schedule_data import Pass

Broken = dict[str, Callable[..., Any]]


def base_2(*given: Any, **named: Any) -> Any:
    out, lse, *rest = aten.cudnn_forward(*given, **named)
    return out, lse / math.log(2), *rest


def top_left(*given: Any, **named: Any) -> Any:
    """Causal at the other corner, where that makes a difference; windows as they are."""
    q, k, v, *rest = given
    if named.get("window_size_left", -1) == -1 and rest[5] and q.shape[1] < k.shape[1]:
        k, v = k[:, : q.shape[1]].clone(), v[:, : q.shape[1]].clone()
    return aten.flash_forward(q, k, v, *rest, **named)


def spoiled(function: Callable[..., Any], at: int, value: float) -> Callable[..., Any]:
    """One number of one result."""

    def changed(*given: Any, **named: Any) -> Any:
        made = list(function(*given, **named))
        made[at][..., -1, 0] = value
        return tuple(made)

    return changed


def without_delta(grad_out: Any, q: Any, k: Any, v: Any, out: Any, *given: Any, **named: Any) -> Any:
    return aten.cudnn_backward(grad_out, q, k, v, torch.zeros_like(out), *given, **named)


def own_lse(grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *given: Any, **named: Any) -> Any:
    """Normalises by its tile alone."""
    _, own, *_ = aten.cudnn_forward(q, k, v, None, True, 0.0, given[-1], False, scale=named["scale"])
    return aten.cudnn_backward(grad_out, q, k, v, out, own, *given, **named)


def raising(error: Exception) -> Callable[..., Any]:
    def fails(*given: Any, **named: Any) -> Any:
        raise error

    return fails


FORWARD, BACKWARD = (f"_scaled_dot_product_cudnn_attention{end}" for end in ("", "_backward"))
BREAKS: dict[str, tuple[Broken, Pass, str]] = {  # of cuDNN: the operator, the pass that is wrong, what is said
    "base 2": ({FORWARD: base_2}, "forward", "its lse is off by"),
    "not a number": ({FORWARD: spoiled(aten.cudnn_forward, 0, math.nan)}, "forward", "its out has numbers that"),
    "one number": ({FORWARD: spoiled(aten.cudnn_forward, 0, 3.0)}, "forward", "its out is off by"),
    "infinite": ({BACKWARD: spoiled(aten.cudnn_backward, 1, math.inf)}, "backward", "its dk has numbers that"),
    "no delta": ({BACKWARD: without_delta}, "backward", "its dq is off by"),
    "own lse": ({BACKWARD: own_lse}, "backward", "its dq is off by"),
    "other type": ({FORWARD: raising(TypeError("takes 8 arguments"))}, "forward", "it raised TypeError: takes 8"),
    "no plan": (
        {BACKWARD: raising(RuntimeError("cuDNN Frontend error: No execution plans support the graph."))},
        "backward", "it raised RuntimeError: cuDNN Frontend error: No execution plans",
    ),
    "no memory": ({FORWARD: raising(torch.OutOfMemoryError("CUDA out of memory"))}, "forward", "out of memory"),
}  # fmt: skip
WRONG = [name for name in BREAKS if name != "no memory"]
