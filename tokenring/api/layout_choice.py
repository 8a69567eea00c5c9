"""The layout of a pack, chosen together with the schedule: by the simulator, in a job, the same on all ranks.

`tr.choose_layout` chooses before anything is cut. Layout "auto" chooses after the first call of each shape of packs,
which is planned in the usual layouts too; packs of this shape that are cut later get the layout that was best.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tokenring.api.context import ContextParallel
from tokenring.api.inputs import check_context
from tokenring.errors import MOST_SAID, ConfigurationError, one_line
from tokenring.planner.choosing.learned_layouts import USUAL, shapes, usual_layouts
from tokenring.runtime.agreement import refusing
from tokenring.runtime.bound_kernel import checked_scale
from tokenring.sequence.layout import Layout
from tokenring.sequence.mask import Full
from tokenring.sequence.mask_words import MaskLike, mask_of
from tokenring.sequence.workload import Request, Workload


def chosen_layout(
    cp: ContextParallel, size: Workload, mask: MaskLike, device: torch.device | str, training: bool | None
) -> Layout:
    """Return the layout of a call; see `sharding.choose_layout`."""
    check_context(cp)
    with refusing(cp, "forward", device):
        request = _request(cp, size, mask, device, training)
    usual, learned = usual_layouts(cp.world_size, size.q_length), cp.cuts.learned
    if cp.world_size == 1:
        return usual[0]
    if not cp.plans:
        return cp.cuts.searched(size.q_length, request.mask)
    key: Hashable = shapes(request, cp.world_size) or request
    known = learned.known(key)
    if known in USUAL:
        return usual[list(USUAL).index(known)]
    found = cp.cuts.searched(size.q_length, request.mask)
    return found if known is not None else learned.choose(key, request, found, cp.agreed_plan)


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
    return Request(size, made, checked_scale(None, size.head_dim), training, _placed(device))


def _placed(device: torch.device | str) -> torch.device:
    """Return a device as tensors say it: with its index."""
    try:
        found = torch.device(device)
        return found if found.index is not None or found.type == "cpu" else torch.empty(0, device=found).device
    except (RuntimeError, TypeError, AssertionError) as error:  # AssertionError: torch without CUDA
        why = one_line(error, MOST_SAID)
        raise ConfigurationError(f"choose_layout: there is no device {device!r} here: {why}") from None
