"""The right result, over the whole sequence, computed by all ranks together; and how far others are from it.

Written out in plain torch, block of rows by block of rows, apart from every kernel that is measured.
B batch, S sequence, H heads, D head dim, which may be another for v, out and their gradients; M query heads of one kv
head, R rows of a block, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from tokenring.backends.kernels.reference import dense_mask
from tokenring.cli.bench.results import RaceCase
from tokenring.ir.schedule_data import PASSES
from tokenring.lowering.footprint import flops_per_pair
from tokenring.sequence.layout import Positions
from tokenring.sequence.mask import Mask

FLOAT64_FLOPS = 5e11  # of all ranks together; above, float32
BLOCK_ROWS = 256
RESULTS = ("out", "dq", "dk", "dv")


def reference_dtype(case: RaceCase) -> torch.dtype:
    """Return the dtype of the reference: float64, unless that takes too long."""
    a_pair = float(sum(flops_per_pair(each, case.head_dim, case.of_values) for each in PASSES))
    work = a_pair * case.batch * case.heads * case.seq_len**2
    return torch.float64 if work <= FLOAT64_FLOPS else torch.float32


def reference(
    inputs_BSHD: Sequence[torch.Tensor], mask: Mask, backward: bool, rank: int, ranks: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return out and, with backward, dq, dk, dv, [B, S, H, D] each, on every rank.

    inputs: q, k, v and dout. Every rank computes some heads; the sum over ranks puts them together.
    """
    q, k, v, dout = inputs_BSHD
    results = {name: torch.zeros(x.shape, dtype=dtype) for name, x in zip(RESULTS, (dout, q, k, v), strict=True)}
    repeats = q.shape[2] // k.shape[2]
    for index in range(rank, q.shape[0] * k.shape[2], ranks):
        batch, head = divmod(index, k.shape[2])
        heads = slice(head * repeats, (head + 1) * repeats)
        q_MSD, dout_MSD = (inputs_BSHD[i][batch, :, heads].transpose(0, 1).to(dtype) for i in (0, 3))
        k_SD, v_SD = (inputs_BSHD[i][batch, :, head].to(dtype) for i in (1, 2))
        out, dq, dk, dv = _one_head(q_MSD, k_SD, v_SD, dout_MSD, mask, backward)
        results["out"][batch, :, heads] = out.transpose(0, 1)
        results["dq"][batch, :, heads] = dq.transpose(0, 1)
        results["dk"][batch, :, head], results["dv"][batch, :, head] = dk, dv
    wanted = RESULTS if backward else RESULTS[:1]
    for name in wanted:
        if ranks > 1:
            dist.all_reduce(results[name])
    return {name: results[name] for name in wanted}


def _one_head(
    q_MSD: torch.Tensor, k_SD: torch.Tensor, v_SD: torch.Tensor, dout_MSD: torch.Tensor, mask: Mask, backward: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, dq [M, S, D] and dk, dv [S, D] of one kv head. The gradients stay 0 without backward."""
    length, scale = q_MSD.shape[1], 1 / math.sqrt(q_MSD.shape[2])
    out, dq, dk, dv = (torch.zeros_like(x) for x in (dout_MSD, q_MSD, k_SD, v_SD))
    for start in range(0, length, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, length)
        cols, visible_RC = visible(mask, start, stop, length)
        q, k, v, dout = q_MSD[:, start:stop], k_SD[cols], v_SD[cols], dout_MSD[:, start:stop]
        p_MRC = ((q @ k.T) * scale).masked_fill(~visible_RC, -torch.inf).softmax(-1)
        p_MRC = p_MRC.masked_fill(~visible_RC, 0.0)  # rows that see nothing are NaN
        out[:, start:stop] = p_MRC @ v
        if backward:
            dp_MRC = dout @ v.T
            delta_MR1 = (dout * out[:, start:stop]).sum(-1, keepdim=True)
            ds_MRC = p_MRC * (dp_MRC - delta_MR1) * scale
            dq[:, start:stop] = ds_MRC @ k
            dk[cols] += torch.einsum("mrc,mrd->cd", ds_MRC, q)
            dv[cols] += torch.einsum("mrc,mrd->cd", p_MRC, dout)
    return out, dq, dk, dv


def visible(mask: Mask, start: int, stop: int, length: int) -> tuple[slice, torch.Tensor]:
    """Return the columns that rows [start, stop) see anything of, and booleans [rows, columns]."""
    region = mask.region(Positions(start, stop), Positions(0, length))
    first, last = min((p.col0 for p in region), default=0), max((p.col1 for p in region), default=1)
    seen = torch.zeros(stop - start, last - first, dtype=torch.bool)
    for patch in region:
        part = dense_mask(patch, seen.device)
        place = seen[patch.row0 : patch.row1, patch.col0 - first : patch.col1 - first]
        place |= torch.ones_like(place) if part is None else part
    return slice(first, last), seen


def errors(
    found: Mapping[str, torch.Tensor], wanted_BSHD: Mapping[str, torch.Tensor], positions: torch.Tensor, ranks: int
) -> dict[str, float]:
    """Return relative Frobenius errors over all ranks, of what each found for its positions [B, T, H, D]."""
    sums = torch.zeros(len(wanted_BSHD), 2, dtype=torch.float64)
    for row, (name, whole) in enumerate(wanted_BSHD.items()):
        if positions.numel():
            wanted = whole.index_select(1, positions).double()
            sums[row, 0] = (found[name].double() - wanted).square().sum()
            sums[row, 1] = wanted.square().sum()
    if ranks > 1:
        dist.all_reduce(sums)
    relative = (sums[:, 0] / sums[:, 1]).sqrt()
    relative[(sums == 0).all(dim=1)] = 0.0
    return dict(zip(wanted_BSHD, relative.tolist(), strict=True))
