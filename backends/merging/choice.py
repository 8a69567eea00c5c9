"""The choice of a merger for a device: the first of its kind that is installed, fits, and passes its trial.

A merger is tried once in a process on each device, on a few rows that are compared with float64: one that cannot be
compiled, or accumulates in less than fp32, is not taken, and the log says why. On NPUs torch's own operators are tried
as well: where they fail, as at infinities, another form of them is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple, cast

import torch

from tokenring.backends.interfaces import Merger
from tokenring.backends.merging.torch_merger import TorchMerger
from tokenring.errors import BackendUnavailable, one_line

LOG = logging.getLogger("tokenring")
MERGERS: Mapping[str, str] = {
    "triton": "tokenring.backends.merging.triton:make",
    "npu-update": "tokenring.backends.merging.npu:make",
    "torch": "tokenring.backends.merging.torch_merger:TorchMerger",
    "finite": "tokenring.backends.merging.finite:make",
}
OF_DEVICE: Mapping[str, tuple[str, ...]] = {"cuda": ("triton",), "npu": ("npu-update",)}  # by what tensors say
ANYWHERE = ("torch", "finite")  # what every device has, in this order
DOUBTED = ("npu",)  # where torch's operators are tried, too
WHY: Mapping[str, str] = {
    "triton": "one kernel, one pass over both parts",
    "npu-update": "npu_attention_update, where a result in fp32 is replaced as a whole; torch's operators elsewhere",
    "torch": "torch's operators, which every device has",
    "finite": "torch's operators in a form without infinities",
}
LIMIT = 1e-5  # relative, of the trial: vector units' exp is good to 1e-6 or so, fp16 would give 5e-4 and bf16 2e-3
INF = float("inf")
SATURATED = -1e38  # what a device without infinities (INF_NAN_MODE_ENABLE=0) has for -inf is below
TRIED = (  # lse of what is there, and of what comes
    (0.3, -1.2), (-1.1, 2.1), (-INF, 0.7), (0.7, -INF), (-INF, -INF), (40.1, -40.1), (-3.1, 60.3), (7.7, 7.7),
)  # fmt: skip
FAR = ((120.5, -3.0), (-95.5, 101.5), (-130.0, -130.5), (-INF, -97.0))  # beyond where exp is a number in fp32


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # out, lse, new_out, new_lse


class MergerChoice(NamedTuple):
    """The merger for a device, why, and (name, why not) of those that were passed over."""

    merger: Merger
    why: str
    others: tuple[tuple[str, str], ...]


def merger_for(device: torch.device, head_dim: int) -> Merger:
    """Return the merger for accumulators on a device. Mergers that are passed over are logged."""
    made = choose_merger(device, head_dim)
    for name, why in made.others:
        _log(str(device), name, why)
    return made.merger


@lru_cache(maxsize=256)  # once each
def _log(device: str, name: str, why: str) -> None:
    LOG.info("merging on %s: not by %s: %s", device, name, why)


def choose_merger(device: torch.device, head_dim: int) -> MergerChoice:
    """Return the first that merges right. Raises BackendUnavailable if torch's own operators do in neither form."""
    others: list[tuple[str, str]] = []
    for name in (*OF_DEVICE.get(device.type, ()), *ANYWHERE):
        if name == "torch" and device.type not in DOUBTED:
            return MergerChoice(TorchMerger(), WHY[name], tuple(others))
        try:
            merger = _load(name)
            reason = merger.supports(head_dim) or trial(merger, device, head_dim)
        except Exception as error:  # a package that is missing or broken, in whatever way
            reason = one_line(error)
        if reason is None:
            return MergerChoice(merger, WHY[name], tuple(others))
        others.append((name, reason))
    found = "; ".join(f"{name}: {why}" for name, why in others)
    raise BackendUnavailable(
        f"nothing merges partial results right on {device.type} ({found}): leave INF_NAN_MODE_ENABLE as it is by "
        f"default, take the CANN that belongs to this torch_npu (`tokenring doctor`), and report it"
    )


def merge_refusal(device: torch.device, head_dim: int) -> str | None:
    """Say why partial results cannot be merged there; None: they can."""
    if device.type not in DOUBTED:
        return None
    try:
        choose_merger(device, head_dim)
    except BackendUnavailable as error:
        return str(error)
    return None


def _load(name: str) -> Merger:
    module, _, attribute = MERGERS[name].partition(":")
    return cast(Merger, getattr(import_module(module), attribute)())


@lru_cache(maxsize=256)
def trial(merger: Merger, device: torch.device, head_dim: int) -> str | None:
    """Return None, or what is wrong with a merger's results for a few rows of fp32 and bf16, in place and not."""
    doubted = device.type in DOUBTED
    for dtype in (torch.float32, torch.bfloat16):
        given = _rows(head_dim, dtype, TRIED + FAR if doubted else TRIED)
        wanted = _merged64(*given)
        for way in (_in_place, _replaced, _in_records) if doubted else (_in_place, _replaced):
            out, lse, new_out, new_lse = (x.to(device, copy=True) for x in given)
            made = [x.cpu().double() for x in way(merger, out, lse, new_out, new_lse)]
            if doubted:
                made[1] = made[1].masked_fill(made[1] < SATURATED, -INF)
            for name, found, right in zip(("out", "lse"), made, wanted, strict=True):
                error = _error(found, right)
                if not error <= LIMIT:  # NaN too
                    return f"tried on {device.type}, its {name} has an error of {error:.1e}: it does not merge in fp32"
    return None


def _rows(head_dim: int, dtype: torch.dtype, lses: tuple[tuple[float, float], ...] = TRIED) -> Parts:
    """Make out, lse, new_out, new_lse [rows, 1, 2 heads(, D)] on the CPU; out is 0 where lse is -inf."""
    generator = torch.Generator().manual_seed(1)
    made: list[torch.Tensor] = []
    for which, kind in ((0, torch.float32), (1, dtype)):
        lse = torch.tensor([pair[which] for pair in lses])[:, None, None].repeat(1, 1, 2)
        out = torch.randn(len(lses), 1, 2, head_dim, generator=generator).to(kind)
        made += [out.masked_fill((lse == -INF)[..., None], 0.0), lse]
    return made[0], made[1], made[2], made[3]


def _merged64(
    out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge by the definition, in float64."""
    total = torch.logaddexp(lse.double(), new_lse.double())
    shift = total.clamp(min=-1e300)
    weights = [torch.exp(each.double() - shift)[..., None] for each in (lse, new_lse)]
    return weights[0] * out.double() + weights[1] * new_out.double(), total


def _in_place(
    merger: Merger, out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    merger.merge_(out, lse, new_out, new_lse, lse.new_empty(2, *lse.shape))
    return out, lse


def _replaced(
    merger: Merger, out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return merger.merged(out, lse, new_out, new_lse, lse.new_empty(2, *lse.shape))


def _in_records(
    merger: Merger, out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge into accumulators as they lie in the pool: for each row a record, out and then lse."""
    rows, wide = out.shape[0], out[0].numel()
    records = torch.cat([out.flatten(1), lse.flatten(1)], dim=1)
    out, lse = records[:, :wide].view(out.shape), records[:, wide:].view(lse.shape)
    merger.merge_(out, lse, new_out, new_lse, lse.new_empty(2, rows, *lse.shape[1:]))
    return out, lse


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest error of a number, relative to what numbers there are in its row.

    Rows without any must agree.
    """
    same = found == right  # -inf too
    difference = torch.where(same, 0.0, found - right).abs()
    size = right.abs().masked_fill(right.isinf(), 0.0).amax(dim=-1, keepdim=True).clamp(min=1.0)
    return float((difference / size).max())
