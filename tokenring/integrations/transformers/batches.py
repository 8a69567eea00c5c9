"""A batch of whole sequences, which all ranks hold, cut into this rank's part.

B sequences of S tokens each. Sequences that are packed each in its own way are laid end to end, as one of B · S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad

from tokenring.api.context import ContextParallel
from tokenring.api.sharding import shard
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.comparing import facts_of
from tokenring.integrations.transformers.masks import LayerMask
from tokenring.integrations.transformers.refusals import check_positions
from tokenring.runtime.agreement import refusing
from tokenring.sequence.layout import AUTO, Layout
from tokenring.sequence.mask import Mask

IGNORED = -100  # labels of tokens without a loss
BATCH = "tokenring_batch"  # the keyword by which it goes through the model to its attention
TOKENS = ("input_ids", "inputs_embeds")
READ = (*TOKENS, "labels", "shift_labels", "attention_mask", "position_ids", "num_items_in_batch", "use_cache", BATCH)
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # as transformers' collators


@dataclass(frozen=True, eq=False)
class CutBatch:
    """Facts of a whole batch that the attention of a model needs.

    length: of each sequence, over all ranks. bounds: ends of its documents, from 0 on; None: it is one document.
    layout: by which it is cut, where that follows from the mask. facts: of the whole batch, which ranks compare.
    attended: names of the layers that called attention in the last forward pass, in turn.
    """

    cp: ContextParallel
    length: int
    bounds: tuple[int, ...] | None
    layout: Layout | None = None
    facts: dict[str, str] = field(default_factory=dict)
    masks: dict[LayerMask, Mask] = field(default_factory=dict)
    attended: list[str] = field(default_factory=list)

    def mask_of(self, layer: LayerMask) -> Mask:
        """Return the mask of a layer over the whole sequence."""
        if layer not in self.masks:
            self.masks[layer] = layer.within(self.bounds, self.length)
        return self.masks[layer]

    def __deepcopy__(self, memo: dict[int, Any]) -> CutBatch:
        return self


def cut_batch(batch: Mapping[str, Any], cp: ContextParallel, config: Any = None) -> dict[str, Any]:
    """Return this rank's part of a batch, for a model that `use_tokenring` has changed.

    batch: what the model would take in one process, the same on every rank of cp: input_ids [B, S] or inputs_embeds
    [B, S, width]; labels or shift_labels [B, S]; attention_mask [B, S] of right padding; position_ids [B, S], which
    begin anew at each packed document; cu_seq_lens_q. config: the model's, to check what it makes of long sequences.

    The part has input_ids, position_ids, labels (shifted before they were cut) and num_items_in_batch: with it the
    model's loss is this rank's share, and the shares of all ranks add up to the loss of the whole batch.

    Nothing is sent here: the model's call compares the batches of all ranks. What one rank refuses, all ranks hear.

    Raises UnsupportedError for padding at the left, masks [B, 1, S, S] and unknown tensors, ConfigurationError for
    what does not fit together or is too short to be cut.
    """
    with refusing(cp, "forward", *batch.values()):
        facts = facts_of({name: x for name, x in batch.items() if x is not None}) if cp.world_size > 1 else {}
        return _checked_and_cut(batch, cp, config, facts)


def _checked_and_cut(
    batch: Mapping[str, Any], cp: ContextParallel, config: Any, facts: dict[str, str]
) -> dict[str, Any]:
    rest = {name: value for name, value in batch.items() if name not in READ + PACKING and value is not None}
    tokens_name, tokens = _tokens(batch)
    rows, length = tokens.shape[:2]
    _check_rest(rest, length)
    labels = _shifted_labels(batch, rows, length)
    _check_padding(batch.get("attention_mask"), labels, rows, length)
    places = _places(batch, rows, length, tokens.device)
    ends = _documents(batch, places)
    per_token = {tokens_name: tokens, "position_ids": places, "labels": labels}
    if ends is not None and any(each != ends[0] for each in ends):  # each row in its own way: one row of all
        per_token = {name: x if x is None else x.flatten(0, 1)[None] for name, x in per_token.items()}
        ends = [(0, *(row * length + end for row, each in enumerate(ends) for end in each[1:]))]
        length *= rows
    check_positions(config, int(places.max()) + 1 if places.numel() else 0, length)
    bounds = ends[0] if ends else None
    return _cut(per_token, CutBatch(cp, length, bounds, facts=facts), batch.get("num_items_in_batch"), rest)


def _cut(
    per_token: dict[str, torch.Tensor | None], whole: CutBatch, items: Any, rest: dict[str, Any]
) -> dict[str, Any]:
    """Return this rank's part of tensors of all tokens, with what the model needs besides."""
    cp, mask = whole.cp, whole.mask_of(LayerMask())
    layout = cp.layout_for(whole.length, mask)
    if min(layout.local_lengths) < 1:
        raise ConfigurationError(
            f"a batch of {whole.length} tokens gives some of {cp.world_size} ranks none in layout {layout.name!r}: "
            f"models want one at least; pad it, or train short sequences without context parallelism"
        )
    if cp.layout == AUTO:
        whole = replace(whole, layout=layout)
    part = {name: shard(x, cp, dim=1, mask=mask) for name, x in per_token.items() if x is not None}
    if (labels := per_token["labels"]) is not None:
        part["shift_labels"] = part["labels"]
        part["num_items_in_batch"] = labels.ne(IGNORED).sum() if items is None else items
    return {**rest, **part, "use_cache": False, BATCH: whole}


def _tokens(batch: Mapping[str, Any]) -> tuple[str, torch.Tensor]:
    found = [(name, batch[name]) for name in TOKENS if batch.get(name) is not None]
    if len(found) != 1 or found[0][1].dim() not in (2, 3):
        raise ConfigurationError(
            f"a batch for tokenring has {[name for name, _ in found] or sorted(batch)}: give input_ids [B, S], or "
            f"inputs_embeds [B, S, width], of all ranks"
        )
    return found[0]


def _check_rest(rest: Mapping[str, Any], length: int) -> None:
    """Raise UnsupportedError for a tensor that says something of each token, and would not be cut with them."""
    for name, value in rest.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            raise UnsupportedError(
                f"{name} {list(value.shape)} in a batch of {length} tokens is not supported: tokenring cuts "
                f"{', '.join(READ[:6])}; leave it out, or give the model inputs_embeds"
            )


def _shifted_labels(batch: Mapping[str, Any], rows: int, length: int) -> torch.Tensor | None:
    """Return the label of each token's successor [B, S], as the model's loss takes it; None: there are none."""
    shifted, labels = batch.get("shift_labels"), batch.get("labels")
    if shifted is None and labels is not None:
        shifted = pad(labels, (0, 1), value=IGNORED)[:, 1:]
    if shifted is not None and shifted.shape != (rows, length):
        raise ConfigurationError(f"labels are {list(shifted.shape)}, the tokens [{rows}, {length}]: give both alike")
    return None if shifted is None else shifted.contiguous()


def _check_padding(mask: Any, labels: torch.Tensor | None, rows: int, length: int) -> None:
    """Raise UnsupportedError unless this is right padding without a loss: no token then sees any of it."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        shape = f" {list(mask.shape)}" if isinstance(mask, torch.Tensor) else f" of type {type(mask).__name__}"
        raise UnsupportedError(
            f"attention_mask{shape} is not supported: tokenring reads right padding, [B, S] of ones and then zeros; "
            f"say documents by position_ids"
        )
    if mask.shape != (rows, length):
        raise ConfigurationError(f"attention_mask is {list(mask.shape)}, and the tokens [{rows}, {length}]")
    real = mask.bool()
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise UnsupportedError(
            "attention_mask has zeros before ones (left padding, or holes), which is not supported: pad at the right "
            "(tokenizer.padding_side = 'right')"
        )
    if labels is not None and bool((labels[~real] != IGNORED).any()):
        raise UnsupportedError(
            f"some padding has labels, which would train the model on it: set labels of padding to {IGNORED}"
        )


def _places(batch: Mapping[str, Any], rows: int, length: int, device: torch.device) -> torch.Tensor:
    """Return the position of each token, [B, S]."""
    given: torch.Tensor | None = batch.get("position_ids")
    if given is None:
        return torch.arange(length, device=device).expand(rows, -1)
    if given.dim() != 2 or given.shape[1] != length or given.shape[0] not in (1, rows):
        raise UnsupportedError(f"position_ids {list(given.shape)} are not supported: give [{rows}, {length}]")
    return given.expand(rows, -1).to(device)


def _documents(batch: Mapping[str, Any], places: torch.Tensor) -> list[tuple[int, ...]] | None:
    """Return the ends of each row's documents, from 0 on; None: every row is one."""
    said = _said_documents(batch, places)
    if batch.get("position_ids") is None:
        return said
    found = _by_position(places, batch.get("attention_mask"))
    if batch.get("attention_mask") is not None and (said is not None or any(len(each) > 2 for each in found)):
        raise UnsupportedError(
            "packed documents beside an attention_mask are not supported: transformers takes position_ids that begin "
            "anew for documents only without an attention_mask; leave it out"
        )
    if said is not None and said != found and any(len(each) > 2 for each in found):
        raise ConfigurationError(f"cu_seq_lens_q says documents {said[0]}, and position_ids say {found[0]}: give one")
    return said or (found if any(len(each) > 2 for each in found) else None)


def _by_position(places: torch.Tensor, mask: torch.Tensor | None) -> list[tuple[int, ...]]:
    """Return the ends of each row's documents: a token is the first of one if it does not follow the one before."""
    begins = places.diff(dim=1) != 1
    if mask is not None:
        begins = begins & mask[:, 1:].bool()  # padding may have any positions
    length = places.shape[1]
    return [(0, *(row.nonzero().flatten() + 1).tolist(), length) for row in begins.cpu()]


def _said_documents(batch: Mapping[str, Any], places: torch.Tensor) -> list[tuple[int, ...]] | None:
    """Return the documents of cu_seq_lens_q, of one row; None: it is not given."""
    given, of_keys = batch.get("cu_seq_lens_q"), batch.get("cu_seq_lens_k")
    if given is None and of_keys is None:
        return None
    if given is None or (of_keys is not None and not torch.equal(given, of_keys)):
        raise UnsupportedError("cu_seq_lens_k other than cu_seq_lens_q is not supported: give both alike")
    ends = tuple(int(each) for each in given.flatten().tolist())
    if len(places) != 1 or ends[:1] != (0,) or ends[-1] != places.shape[1] or any(a >= b for a, b in pairwise(ends)):
        raise ConfigurationError(
            f"cu_seq_lens_q {list(ends)} are not the ends of documents in a batch {list(places.shape)}: give one row, "
            f"and ends from 0 to its length, counted over all ranks"
        )
    return [ends]
