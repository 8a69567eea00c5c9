"""Packed documents as MindSpeed's --reset-attention-mask describes them: by their ends, without a 0 in front.

Where each document is cut by itself the ends are those of a rank's tokens; else those of the whole sequences, one
after another if a batch has several.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.megatron.packed import Packing
from tokenring.integrations.megatron.packs import DocumentChunk, mask_of_rows, slices_of_chunks
from tokenring.sequence.mask import Documents, Mask
from tokenring.sequence.slices import MOST_SLICES


def packing_of_ends(params: Any, rank: int, ranks: int, tokens: int) -> Packing:
    """Return the documents of which this rank holds so many `tokens`, each cut zigzag.

    Raises ConfigurationError for ends that are not those of this rank's tokens.
    """
    ends = _ends(params, tokens, "this rank's tokens")
    lengths = tuple((b - a) * ranks for a, b in pairwise(ends))
    if any(length % (2 * ranks) for length in lengths):
        raise ConfigurationError(
            f"packed documents of {', '.join(map(str, lengths[:8]))} tokens: {ranks} ranks cut each into {2 * ranks} "
            f"equal chunks; pad documents to a multiple of that, as MindSpeed's pad_data does"
        )
    return Packing(lengths, lengths, rank, ranks, tokens)


@dataclass(frozen=True)
class PackedSequences:
    """Whole sequences in equal parts on the ranks, and where their documents end, from 0 on, through all of them.

    masks: of all documents, by the mask of one and the number of sequences: all layers want the same.
    """

    ends: tuple[int, ...]
    ranks: int
    masks: dict[tuple[Mask, int], Mask] = field(default_factory=dict, compare=False, repr=False)

    def mask_of_all(self, mask: Mask, batch: int) -> Mask:
        """Return the mask of all documents in `batch` sequences, by the mask of one; see `mask_of_documents`."""
        if (mask, batch) not in self.masks:
            length = self.ends[-1] // batch
            self.masks[mask, batch] = mask_of_documents(self.ends, batch, self.ranks, length, mask)
        return self.masks[mask, batch]


def sequences_of_ends(params: Any, rank: int, ranks: int, tokens: int) -> PackedSequences:
    """Return the documents of whole sequences, of which each rank holds so many `tokens`."""
    return PackedSequences(_ends(params, tokens * ranks, f"the tokens of {ranks} ranks"), ranks)


def _ends(params: Any, most: int, whose: str) -> tuple[int, ...]:
    ends = (0, *(int(end) for end in params.cu_seqlens_q.tolist()))
    if any(a > b for a, b in pairwise(ends)) or ends[-1] != most:
        shown = ", ".join(map(str, ends[1:] if len(ends) < 10 else (*ends[1:8], "...", ends[-1])))
        raise ConfigurationError(
            f"packed documents end at {shown}: ends must rise to {most}, {whose}; keep MindSpeed's patches of "
            f"get_batch_on_this_tp_rank and of GPTModel.forward"
        )
    return ends


def mask_of_documents(ends: tuple[int, ...], batch: int, ranks: int, length: int, mask: Mask) -> Mask:
    """Return the mask of documents in `batch` sequences of `length` tokens each, by the mask of one document.

    Its positions are those of the one sequence. Of several they are the tokens of rank 0, a part of each sequence,
    then those of rank 1, and so on.
    """
    if batch == 1:
        return mask & Documents(ends)
    part = length // ranks
    documents = (_chunks(start, stop, batch, part, ranks) for start, stop in pairwise(ends))
    made = mask_of_rows(row for chunks in documents for row in slices_of_chunks(chunks, mask))
    if made is None:
        raise UnsupportedError(
            f"a batch of {batch} sequences with {len(ends) - 1} documents has more slices than a mask may "
            f"({MOST_SLICES}): set --micro-batch-size 1"
        )
    return made


def _chunks(start: int, stop: int, batch: int, part: int, ranks: int) -> list[DocumentChunk]:
    """Return where the ranks hold a document, of positions that count through all sequences."""
    found, at = [], start
    while at < stop:
        sequence, row = divmod(at, part * ranks)
        rank, index = divmod(row, part)
        size = min(stop - at, part - index)
        found.append(DocumentChunk((rank * batch + sequence) * part + index, at - start, size))
        at += size
    return found


def batched(x: torch.Tensor, batch: int) -> torch.Tensor:
    """Return [B, T, H, D] of a tensor [T, B, H, D], or [B · T, H, D] of so many sequences."""
    return x.transpose(0, 1) if x.dim() == 4 else x.view(batch, -1, *x.shape[1:])
