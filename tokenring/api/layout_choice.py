"""The layout of a pack, chosen together with the schedule: by the simulator, in a job, the same on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from dataclasses import replace

import torch

from tokenring.api.context import ContextParallel
from tokenring.api.inputs import check_context
from tokenring.errors import MOST_SAID, ConfigurationError, one_line
from tokenring.planner.choosing.pack_shapes import pack_shape
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.layouts.balanced import EVEN, may_pay_to_even
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


def _best(cp: ContextParallel, request: Request, usual: list[Layout]) -> Layout:
    """Return the layout whose fastest schedule is fastest; the same on all ranks, as their plans are."""
    seconds: dict[str, float] = {}
    layouts, texts, refused = {}, [], None
    for layout, plan in _plans(cp, request, usual, seconds):
        if isinstance(plan, ConfigurationError):
            refused = plan
            continue
        seconds[layout.name] = plan.candidates[0].predicted_seconds or 0.0 if plan.candidates else 0.0
        layouts[layout.name] = layout
        texts.append(f"{layout.name} {seconds[layout.name] * 1e3:.3g} ms ({plan.name})")
    if refused is not None and not seconds:
        raise refused
    best = min(seconds, key=lambda name: seconds[name])
    LOG.info("layout %s: %s", best, ", ".join(texts))
    return layouts[best]


def _plans(
    cp: ContextParallel, request: Request, usual: list[Layout], seconds: dict[str, float]
) -> Iterator[tuple[Layout, Plan | ConfigurationError]]:
    """Yield the layouts that are compared, each with its plan; `seconds` are those of the plans that there were."""
    for layout in _compared(cp, request, usual, seconds):
        try:
            yield layout, cp.agreed_plan(replace(request, layout=layout))
        except Disagreement:
            raise
        except ConfigurationError as error:  # as all ranks hear it: nothing fits in this layout
            yield layout, error


def _compared(
    cp: ContextParallel, request: Request, usual: list[Layout], seconds: dict[str, float]
) -> Iterator[Layout]:
    yield from usual
    found = cp.cuts.of(request.workload.q_length, request.mask)
    if found in usual:
        return
    yield found
    times = seconds.get(found.name), min(seconds.values(), default=0.0)
    if times[0] is not None and may_pay_to_even(request.mask, found, times[0], times[1]):
        even = cp.cuts.even(request.workload.q_length, request.mask)
        if even.name == EVEN:
            yield even


def _remember(chosen: dict[Hashable, str], key: Hashable, name: str) -> None:
    if len(chosen) >= MOST_SHAPES:  # on all ranks alike
        chosen.pop(next(iter(chosen)))
    chosen[key] = name
