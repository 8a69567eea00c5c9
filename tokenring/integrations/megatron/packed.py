"""Packed sequences: documents of unequal lengths one after another (Megatron's format "thd").

Every rank holds a part of each document, which is cut zigzag by itself: document i of padded length n gives each of P
ranks n / P tokens, in the order of the documents. All documents are one call: of a sequence that is what rank 0 holds,
then what rank 1 holds, and so on, under a mask of slices that says which of these tokens see each other.

t tokens held here, of all documents; B documents of one length, T tokens of each held here, H heads, D head dim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.megatron.packs import mask_of_rows, slices_of
from tokenring.sequence.layout import zigzag
from tokenring.sequence.mask import Documents, Mask

# q, k, v [B, T, H, D], mask, and the pack if the mask is of all its documents → out
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mask, "PackKind | None"], torch.Tensor]
MOST_RECENT = 8  # packs of which masks are kept
MOST_NOMINAL = 16  # documents for which "auto" plans: more make planning longer and change no choice


class PackKind(NamedTuple):
    """Number of documents in one call, ranks that hold them, and the mask of each."""

    documents: int
    ranks: int
    mask: Mask

    def nominal(self, length: int) -> Mask:
        """Return the mask of about as many documents, of equal length, in so many tokens: 2^n times 2 · ranks."""
        count = min(1 << self.documents.bit_length() - 1, length // (2 * self.ranks), MOST_NOMINAL)
        lengths = (length // count,) * count
        found = Packing(lengths, lengths, 0, self.ranks, length // self.ranks).mask_of_all(self.mask)
        return self.mask if found is None else found


@dataclass(frozen=True)
class Packing:
    """Documents of a packed sequence, whole: each one's tokens with and without the padding at its end.

    padded, real: of each document. rank, ranks: of the group that holds them together. tokens: held here, t; those
    behind the last document are padding. masks: of all documents, by the mask of one: all layers want the same.
    """

    padded: tuple[int, ...]
    real: tuple[int, ...]
    rank: int
    ranks: int
    tokens: int
    masks: dict[Mask, Mask | None] = field(default_factory=dict, compare=False, repr=False)

    @property
    def held(self) -> tuple[int, ...]:
        """The tokens of each document on one rank."""
        return tuple(length // self.ranks for length in self.padded)

    @property
    def has_padding(self) -> bool:
        """True if any document has padding."""
        return self.padded != self.real

    def mask_of_all(self, mask: Mask) -> Mask | None:
        """Return the mask of all documents in one call, by the mask of one; None: it has more slices than a mask may.

        Its positions are the tokens of rank 0, then those of rank 1, and so on: layout contiguous.
        """
        if mask not in self.masks:
            self.masks[mask] = mask_of_rows(slices_of(self.padded, self.real, self.ranks, self.tokens, mask))
        return self.masks[mask]

    def alike(self, mask: Mask) -> dict[tuple[int, Mask], list[int]]:
        """Return the documents that go as one batch, longest first: by padded length, and by the mask of one document.

        A mask that looks back only needs no padding in it: no token sees what comes after it.
        """
        looks_back = mask.looks_back
        found: dict[tuple[int, Mask], list[int]] = defaultdict(list)
        for index, (length, real) in enumerate(zip(self.padded, self.real, strict=True)):
            if real:
                whole = looks_back or real == length
                found[length, mask if whole else mask & Documents([0, real])].append(index)
        return dict(sorted(found.items(), key=lambda item: -item[0][0]))

    @cached_property
    def real_rows(self) -> torch.Tensor:
        """Booleans [t] of the tokens held here: True where a token is not padding."""
        rows = [torch.arange(0)]
        for length, real in zip(self.padded, self.real, strict=True):
            rows.append(self._positions(length) < real)
        return torch.cat([each.bool() for each in rows])

    def _positions(self, length: int) -> torch.Tensor:
        """Return the positions in a document of the tokens that this rank holds of it."""
        if self.ranks == 1 or length == 0:
            return torch.arange(length)
        return torch.tensor(zigzag(self.ranks, length).positions(self.rank))


def packing_of(params: Any, rank: int, ranks: int, tokens: int) -> Packing:
    """Return the documents that packed_seq_params describes, of which `tokens` tokens are held here.

    Reads cu_seqlens_q, and cu_seqlens_q_padded where it is set. Raises ConfigurationError for documents that cannot be
    cut or are more than there is, UnsupportedError where keys and values are packed otherwise than queries.
    """
    ends = _bounds(params, "q")
    if _bounds(params, "kv") != ends:
        raise UnsupportedError(
            "packed sequences with other cu_seqlens for keys than for queries are not supported: pack both alike"
        )
    real, padded = (tuple(b - a for a, b in pairwise(bounds)) for bounds in ends)
    cut = 1 if ranks == 1 else 2 * ranks
    for index, (length, held) in enumerate(zip(padded, real, strict=True)):
        if not 0 <= held <= length:
            raise ConfigurationError(
                f"packed document {index} has {held} tokens and {length} with its padding: cu_seqlens and "
                f"cu_seqlens_padded must not decrease, nor the padded lengths be shorter"
            )
        if length % cut:
            raise ConfigurationError(
                f"packed document {index} has {length} tokens, which {ranks} ranks cannot cut into {cut} equal chunks: "
                f"pad each document to a multiple of {cut} and give the padded ends as cu_seqlens_q_padded"
            )
    if sum(padded) > tokens * ranks:
        raise ConfigurationError(
            f"cu_seqlens end at {sum(padded)}, but {ranks} ranks hold {tokens} tokens each, {tokens * ranks} together: "
            f"cu_seqlens count tokens of the whole sequence, over all ranks of the context-parallel group"
        )
    return Packing(padded, real, rank, ranks, tokens)


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, mask: Mask, attend: Attend
) -> torch.Tensor:
    """Compute attention of each document to itself: out [t, Hq, Dv] of q [t, Hq, D], k [t, Hkv, D], v [t, Hkv, Dv].

    Padding, inside documents and after the last, gets out 0 and no gradient. mask: of one document. attend: is called
    once, with the mask of all; where that has too many slices, and under torch.compile, once for each length.
    """
    whole = None if torch.compiler.is_compiling() else packing.mask_of_all(mask)
    if whole is not None:
        return attend(q[None], k[None], v[None], whole, PackKind(len(packing.real), packing.ranks, mask))[0]
    return _attend_lengths(q, k, v, packing, mask, attend)


def _attend_lengths(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, mask: Mask, attend: Attend
) -> torch.Tensor:
    """Compute `attend_packed` by one call for each length, of documents as a batch."""
    rest, device = q.shape[0] - sum(packing.held), q.device
    parts = [torch.split(x, [*packing.held, rest]) for x in (q, k, v)]
    outs = [part.new_zeros(*part.shape[:2], v.shape[-1]) for part in parts[0]]
    for (_, document_mask), members in packing.alike(mask).items():
        q, k, v = (torch.stack([part[index] for index in members]) for part in parts)
        for index, out in zip(members, attend(q, k, v, document_mask, None), strict=True):
            outs[index] = out
    whole = torch.cat(outs)
    if packing.has_padding:
        hidden = ~torch.nn.functional.pad(packing.real_rows, (0, rest)).to(device)
        whole = whole.masked_fill(hidden[:, None, None], 0.0)
    return whole


class LastPacking:
    """The documents that were read last: all layers of a step get the same, and reading waits for the device.

    Those of some steps before are kept with their masks, as where a pipeline computes micro-batches again.
    """

    def __init__(self) -> None:
        self._tensors: tuple[Any, ...] = ()  # they live on here: an address alone could be another tensor's by now
        self._key: tuple[object, ...] = ()
        self._found: Any = None
        self._recent: dict[Any, Any] = {}

    def of(
        self, params: Any, rank: int, ranks: int, tokens: int, read: Callable[[Any, int, int, int], Any] = packing_of
    ) -> Any:
        """Return what `read` makes of these arguments; what was read last, if they are unchanged."""
        tensors = tuple(getattr(params, name, None) for name in (*_names("q"), *_names("kv")))
        key = (*map(_version, tensors), rank, ranks, tokens, read)
        same = key == self._key and all(a is b for a, b in zip(tensors, self._tensors, strict=True))
        if self._found is None or not same:
            self._found = self._known(read(params, rank, ranks, tokens))
            self._tensors, self._key = tensors, key
        return self._found

    def _known(self, found: Any) -> Any:
        """Return the same documents as they were read before, with their masks."""
        found = self._recent.pop(found, found)
        self._recent[found] = found
        if len(self._recent) > MOST_RECENT:
            self._recent.pop(next(iter(self._recent)))
        return found


def _names(of: str) -> tuple[str, str]:
    return f"cu_seqlens_{of}", f"cu_seqlens_{of}_padded"


def _bounds(params: Any, of: str) -> tuple[list[int], list[int]]:
    """Return the ends of documents without and with padding, from 0 on. Raises ConfigurationError if they are wrong."""
    plain, padded = (getattr(params, name, None) for name in _names(of))
    if plain is None and padded is None:
        raise ConfigurationError(f"packed_seq_params of format thd without cu_seqlens_{of}: give the documents' ends")
    given: tuple[Any, Any] = (padded if plain is None else plain, plain if padded is None else padded)
    bounds = given[0].tolist(), given[1].tolist()
    if len(bounds[0]) != len(bounds[1]) or any(not each or each[0] != 0 for each in bounds):
        raise ConfigurationError(
            f"cu_seqlens_{of} has {len(bounds[0])} entries and its padded form {len(bounds[1])}: both start with 0 and "
            f"have one entry more than there are documents"
        )
    return bounds


def _version(x: torch.Tensor | None) -> object:
    """Return a value that changes when the tensor does.

    Where a change cannot be seen, as of tensors made in inference mode, the value is new at every call.
    """
    if x is None:
        return None
    return object() if x.is_inference() else x._version
