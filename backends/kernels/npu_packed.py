"""Several patches in one call of npu_fusion_attention: each is a sequence of the layout TND.

Lengths go as lists on the host, of each sequence's end, without a leading 0. The statistics look like [T, N, 8];
unless softmax_layout="TND" can be asked for (`npu_trials`), their memory holds a block [N, S, 8] for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from tokenring.backends.kernels.npu_call import PlainRows
from tokenring.backends.kernels.npu_masks import TRIANGLE, Triangle, packed_options
from tokenring.backends.kernels.npu_operator import Operator, row_lse
from tokenring.backends.kernels.npu_trials import PACKED, packs_in_token_order
from tokenring.sequence.region import Patch

LAYOUT = PACKED
MOST_SEQUENCES = 1024  # of a call, in all entries of its batch: the documents say 1K for some products, 2K for others
MOST_TOKENS = 1 << 20
Made = tuple[torch.Tensor, ...]


def in_calls(
    patches: Sequence[Patch],
    batch: int,
    call: Callable[[NpuPacking, slice], list[Made]],
    triangle: Triangle = TRIANGLE,
) -> list[Made]:
    """Compute each patch in as few calls as the operator's limits allow; return what each gives.

    call: computes patches, for batch entries.
    """
    largest = max(max(patch.rows, patch.cols) for patch in patches)
    entries = min(batch, MOST_SEQUENCES, max(1, MOST_TOKENS // largest))  # of a call
    parts = [slice(start, min(start + entries, batch)) for start in range(0, batch, entries)]
    made: list[Made] = []
    for group in _groups(patches, MOST_SEQUENCES // entries, MOST_TOKENS // entries):
        found = [call(NpuPacking(group, part.stop - part.start, triangle), part) for part in parts]
        made += found[0] if len(parts) == 1 else [_joined_entries(each) for each in zip(*found, strict=True)]
    return made


def _groups(patches: Sequence[Patch], most: int, most_tokens: int) -> Iterator[Sequence[Patch]]:
    """Yield patches in their order, cut where there would be too many of them, of their rows or of their columns."""
    start, rows, cols = 0, 0, 0
    for at, patch in enumerate(patches):
        rows, cols = rows + patch.rows, cols + patch.cols
        if at > start and (at - start == most or max(rows, cols) > most_tokens):
            yield patches[start:at]
            start, rows, cols = at, patch.rows, patch.cols
    yield patches[start:]


def _joined_entries(parts: Sequence[Made]) -> Made:
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


class NpuPacking:
    """Patches with rows and columns one after another, as sequences; every entry of a batch has all of them."""

    def __init__(self, patches: Sequence[Patch], batch: int, triangle: Triangle = TRIANGLE) -> None:
        self.patches = tuple(patch.shifted(-patch.row0, -patch.col0) for patch in patches)
        self.batch, self._triangle = batch, triangle
        self.rows = [(patch.row0, patch.row1) for patch in patches]
        self.cols = [(patch.col0, patch.col1) for patch in patches]

    def forward(
        self, operator: Operator, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> list[Made]:
        """Return (out [B, H, rows, D], lse [B, H, rows]) of each patch."""
        in_token_order = packs_in_token_order(operator, q.device)
        made = operator(
            self._tokens(q, self.rows), self._tokens(k, self.cols), self._tokens(v, self.cols), q.shape[1], LAYOUT,
            scale=scale, **self._options(in_token_order, q.device),
        )  # fmt: skip
        out, largest, total = made[:3]
        outs = self._parts(out, self.rows)
        lses = self._row_lses(row_lse(largest, total), in_token_order)
        return list(zip(outs, lses, strict=True))

    def backward(
        self,
        operator: Operator,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor | None,
        out: torch.Tensor | None,
        scale: float,
        rows: PlainRows,
    ) -> list[Made]:
        """Return (dq, dk, dv) of each patch, [B, H, rows or columns, D].

        Rows that belong to none are not read: they may be still to come.
        """
        in_token_order = packs_in_token_order(operator, q.device)
        lse = self._packed_lse(lse, in_token_order)
        dout = _alone(dout, self.rows)
        delta, out = (None if x is None else _alone(x, self.rows) for x in (delta, out))
        whole = rows.out(dout, delta, out, q.dtype)
        made = operator(
            self._tokens(q, self.rows), self._tokens(k, self.cols), self._tokens(v, self.cols),
            _in_tokens(dout.to(q.dtype)), q.shape[1], LAYOUT, scale=scale,
            attention_in=_in_tokens(whole), **rows.statistics(lse), **self._options(in_token_order, q.device),
        )  # fmt: skip
        dq, dk, dv = (self._parts(x, which) for x, which in zip(made, (self.rows, self.cols, self.cols), strict=False))
        return list(zip(dq, dk, dv, strict=True))

    def _options(self, in_token_order: bool, device: torch.device) -> dict[str, object]:
        options = packed_options(self.patches, device, self._triangle)
        assert options is not None  # `packs` said so
        options |= {
            "actual_seq_qlen": self._ends(self.rows),
            "actual_seq_kvlen": self._ends(self.cols),
        }
        return options | ({"softmax_layout": LAYOUT} if in_token_order else {})

    def _ends(self, spans: list[tuple[int, int]]) -> list[int]:
        return list(accumulate([stop - start for start, stop in spans] * self.batch))

    # ---------- tokens

    def _tokens(self, x: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
        """Return [B, H, S, D] as [T, H, D]: the spans' rows, without those that belong to none."""
        return _in_tokens(_alone(x, spans))

    def _parts(self, x: torch.Tensor, spans: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Return [B, H, rows, D] of each span, from [T, H, D]: the opposite of `_tokens`."""
        entries = x.view(self.batch, -1, *x.shape[1:])
        return [entries[:, start:stop].transpose(1, 2) for start, stop in _joined(spans)]

    # ---------- statistics

    def _row_lses(self, lse: torch.Tensor, in_token_order: bool) -> list[torch.Tensor]:
        """Return [B, H, rows] of each patch, from [T, H]."""
        heads = lse.shape[1]
        spans = list(_joined(self.rows))
        if in_token_order:
            entries = lse.view(self.batch, -1, heads)
            return [entries[:, start:stop].transpose(1, 2) for start, stop in spans]
        entries = lse.reshape(self.batch, -1)
        blocks = ((entries[:, start * heads : stop * heads], stop - start) for start, stop in spans)
        return [block.view(self.batch, heads, rows) for block, rows in blocks]

    def _packed_lse(self, lse: torch.Tensor, in_token_order: bool) -> torch.Tensor:
        """Return [T, H], in either order, from [B, H, S]."""
        heads, parts = lse.shape[1], [lse[:, :, start:stop] for start, stop in self.rows]
        if in_token_order:
            return torch.cat(parts, dim=2).transpose(1, 2).flatten(0, 1)
        return torch.cat([part.flatten(1) for part in parts], dim=1).reshape(-1, heads)


def _alone(x: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """Return [B, H, S, ...] without the rows that belong to no span."""
    if any(stop != start for (_, stop), (start, _) in pairwise(spans)):
        return torch.cat([x[:, :, start:stop] for start, stop in spans], dim=2)
    return x[:, :, spans[0][0] : spans[-1][1]]


def _in_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return [B, H, S, D] as [T, H, D]."""
    return x.transpose(1, 2).contiguous().flatten(0, 1)


def _joined(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the spans as they lie once the gaps between them are gone."""
    yield from pairwise(accumulate([stop - start for start, stop in spans], initial=0))
