"""The layout of a pack, chosen together with the schedule: by the simulator, in a job, the same on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import torch

from tokenring.api.context import ContextParallel
from tokenring.api.inputs import check_context
from tokenring.errors import MOST_SAID, ConfigurationError, one_line
from tokenring.planner.choosing.pack_shapes import pack_shape
from tokenring.planner.layouts.balanced import EVEN, NAME, may_pay_to_even
from tokenring.runtime.agreement import Disagreement, refusing
from tokenring.runtime.bound_kernel import checked_scale
from tokenring.sequence.layout import Layout, contiguous, zigzag
from tokenring.sequence.mask import Full
from tokenring.sequence.mask_words import MaskLike, mask_of
from tokenring.sequence.workload import Request, Workload

LOG = logging.getLogger("tokenring")
MOST_SHAPES = 256  # of packs for which the choice is kept
USUAL = {"zigzag": zigzag, "contiguous": contiguous}


def chosen_layout(
    cp: ContextParallel, size: Workload, mask: MaskLike, device: torch.device | str, training: bool | None
) -> Layout:
    """Return the layout of a call; see `sharding.choose_layout`."""
    check_context(cp)
    with refusing(cp, "forward", device):
        request = _request(cp, size, mask, device, training)
    usual = [make(cp.world_size, size.q_length) for make in USUAL.values()]
    if cp.world_size == 1:
        return usual[0]
    if not cp.plans:
        return cp.cuts.of(size.q_length, request.mask)
    # A shape tells of the call's sizes and passes, too.
    shapes = [pack_shape(request, (each, each)) for each in usual]
    key: Hashable = tuple(shapes) if None not in shapes else request
    known = cp.cuts.chosen.get(key)
    if known in USUAL:
        return usual[list(USUAL).index(known)]
    if known is not None:
        return (cp.cuts.even if known == EVEN else cp.cuts.of)(size.q_length, request.mask)
    best = _best(cp, request, usual)
    _remember(cp.cuts.chosen, key, best.name)
    return best


def _request(
    cp: ContextParallel, size: Workload, mask: MaskLike, device: torch.device | str, training: bool | None
) -> Request:
    """Return the request of the call, as `attention` makes it. Raises ConfigurationError."""
    cp.check_open()
    if not isinstance(size, Workload):
        raise ConfigurationError(f"choose_layout wants a Workload as size; got one of type {type(size).__name__}")
    if size.q_length != size.kv_length:
        raise ConfigurationError(
            f"choose_layout is for q and kv of one sequence, and q has {size.q_length} positions, kv "
            f"{size.kv_length}: name a layout, such as zigzag or contiguous"
        )
    made = mask_of(mask) or Full()
    made.check_length(size.q_length)
    training = torch.is_grad_enabled() if training is None else training
    scale = checked_scale(None, size.head_dim)
    return Request(size, made, scale, training, _placed(device), wants_lse=training)


def _placed(device: torch.device | str) -> torch.device:
    """Return a device as tensors say it: with its index."""
    try:
        found = torch.device(device)
        return found if found.index is not None or found.type == "cpu" else torch.empty(0, device=found).device
    except (RuntimeError, TypeError, AssertionError) as error:  # AssertionError: torch without CUDA
        why = one_line(error, MOST_SAID)
        raise ConfigurationError(f"choose_layout: there is no device {device!r} here: {why}") from None


class _Timed(NamedTuple):
    """A layout, and the fastest schedule in it."""

    layout: Layout
    seconds: float
    schedule: str


def _best(cp: ContextParallel, request: Request, usual: list[Layout]) -> Layout:
    """Return the layout whose fastest schedule is fastest; the same on all ranks, as their plans are."""
    length, mask = request.workload.q_length, request.mask
    balanced = cp.cuts.of(length, mask)
    tried = [_timed(cp, request, each) for each in (*usual, *([] if balanced in usual else [balanced]))]
    timed = [each for each in tried if isinstance(each, _Timed)]
    if timed and timed[-1].layout.name == NAME:
        seconds = timed[-1].seconds, min(each.seconds for each in timed)
        even = cp.cuts.even(length, mask) if may_pay_to_even(mask, balanced, *seconds) else balanced
        if even.name == EVEN and isinstance(found := _timed(cp, request, even), _Timed):
            timed.append(found)
    if not timed:
        raise next(each for each in reversed(tried) if isinstance(each, ConfigurationError))
    best = min(timed, key=lambda each: each.seconds).layout
    texts = [f"{each.layout.name} {each.seconds * 1e3:.3g} ms ({each.schedule})" for each in timed]
    LOG.info("layout %s: %s", best.name, ", ".join(texts))
    return best


def _timed(cp: ContextParallel, request: Request, layout: Layout) -> _Timed | ConfigurationError:
    """Return what the plan in a layout takes; an error, as all ranks hear it, where nothing fits there."""
    try:
        plan = cp.agreed_plan(replace(request, layout=layout))
    except Disagreement:
        raise
    except ConfigurationError as error:
        return error
    seconds = plan.candidates[0].predicted_seconds or 0.0 if plan.candidates else 0.0
    return _Timed(layout, seconds, plan.name)


def _remember(chosen: dict[Hashable, str], key: Hashable, name: str) -> None:
    if len(chosen) >= MOST_SHAPES:  # on all ranks alike
        chosen.pop(next(iter(chosen)))
    chosen[key] = name
