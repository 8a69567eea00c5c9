"""A batch of torchtitan's, whole on every rank of a ContextParallel, cut into this rank's part.

B rows of S tokens each, with the place of each token in its document; a document begins where that is 0, as in
torchtitan's own masks. Rows that are packed each in its own way are laid end to end, as one row of B · S tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenring.api.compiled import with_number
from tokenring.api.context import ContextParallel
from tokenring.api.inputs import check_context
from tokenring.api.sharding import shard
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.comparing import agree_on_batch, facts_of
from tokenring.runtime.agreement import refusing
from tokenring.sequence.layout import AUTO, Layout
from tokenring.sequence.mask import Causal, Documents, Mask, SlidingWindow

Window = int | None  # how many tokens a token sees, its own among them; None: all before it


@dataclass(frozen=True, eq=False)
class TitanBatch:
    """Facts of a whole batch that the attention needs: a model gets it as its attention_masks.

    masks: over the whole row, by the layers' sliding windows. layout: by which the row is cut, where that follows from
    the mask.
    """

    cp: ContextParallel
    masks: Mapping[Window, Mask]
    layout: Layout | None

    def mask_of(self, window: Window) -> Mask:
        """Return the mask of a layer with this sliding window. Raises ConfigurationError where it was not foreseen."""
        if window not in self.masks:
            raise ConfigurationError(
                f"a layer has a sliding window of {window} tokens, and the batch was cut for {list(self.masks)}: give "
                f"cut_batch(..., windows=...) those of all layers"
            )
        return self.masks[window]


def cut_batch(
    inputs: torch.Tensor, labels: torch.Tensor, extra: Mapping[str, Any], cp: ContextParallel, *,
    windows: Iterable[Window] = (None,),
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:  # fmt: skip
    """Return this rank's part of a batch, with what a model of torchtitan gets besides its tokens.

    inputs, labels: [B, S], whole, the same on every rank of cp; labels are those of torchtitan, shifted before. extra:
    the model's other arguments, with positions [B, S]. windows: the sliding windows of the model's layers. The part has
    [B, T] tokens here, or [1, T'] where rows are packed each in its own way; positions are cut with the tokens, and
    attention_masks is a TitanBatch.

    The ranks compare their batches: one exchange of 32 bytes. Raises, on all ranks of cp, Disagreement where these
    differ, UnsupportedError for other tensors of all tokens, ConfigurationError for what does not fit together or is
    too short to be cut; PeerLost.
    """
    check_context(cp)
    windows = tuple(windows)
    with refusing(cp, "forward", inputs):
        tensors = _checked(inputs, labels, extra)
        facts = facts_of({**tensors, "windows": sorted(windows, key=str)}) if cp.world_size > 1 else {}
        part, batch = _cut(tensors, cp, windows)
    if cp.world_size > 1:
        agree_on_batch(cp, facts, inputs.device)
    rest = {name: value for name, value in extra.items() if name != "attention_masks"}
    return part["inputs"], part["labels"], {**rest, "positions": part["positions"], "attention_masks": batch}


def _checked(inputs: torch.Tensor, labels: torch.Tensor, extra: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that are cut, [B, S] each."""
    places = extra.get("positions")
    if places is None or extra.get("attention_masks") is not None:
        found = "attention_masks of its own" if places is not None else "no positions"
        raise ConfigurationError(
            f"a batch came with {found}: give positions [B, S], which begin at 0 for each document, and no "
            f"attention_masks: tokenring makes masks of positions"
        )
    tensors = {"inputs": inputs, "labels": labels, "positions": places}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.shape != inputs.shape:
            shape = list(x.shape) if isinstance(x, torch.Tensor) else f"of type {type(x).__name__}"
            raise ConfigurationError(f"{name} are {shape}, inputs {list(inputs.shape)}: give [B, S] each")
    for name, x in extra.items():
        if name != "positions" and isinstance(x, torch.Tensor) and x.dim() > 0:
            raise UnsupportedError(
                f"{name} {list(x.shape)} in a batch is not supported: tokenring cuts inputs, labels and positions, and "
                f"another tensor would stay whole; leave it out"
            )
    return tensors


def _cut(
    tensors: dict[str, torch.Tensor], cp: ContextParallel, windows: tuple[Window, ...]
) -> tuple[dict[str, torch.Tensor], TitanBatch]:
    rows, length = tensors["inputs"].shape
    ends = _documents(tensors["positions"])
    if any(each != ends[0] for each in ends):
        tensors = {name: x.flatten()[None] for name, x in tensors.items()}
        ends = [(0, *(row * length + end for row, each in enumerate(ends) for end in each[1:]))]
        length *= rows
    documents = ends[0] if len(ends[0]) > 2 else None
    mask = mask_of(None, documents)
    layout = cp.layout_for(length, mask)
    if min(layout.local_lengths) < 1:
        raise ConfigurationError(
            f"a batch of {length} tokens gives some of {cp.world_size} ranks none in layout {layout.name!r}: models "
            f"want one at least; make training.seq_len longer"
        )
    batch = TitanBatch(
        cp, {each: with_number(mask_of(each, documents)) for each in windows}, layout if cp.layout == AUTO else None
    )
    return {name: shard(x, cp, dim=1, mask=mask) for name, x in tensors.items()}, batch


def mask_of(window: Window, documents: tuple[int, ...] | None) -> Mask:
    """Return the causal mask of a layer. documents: where they end, from 0 on; None: there is one.

    Raises ConfigurationError for a window without a token.
    """
    check_window(window, f"a layer has a sliding window of {window} tokens")
    mask = Causal() if window is None else Causal() & SlidingWindow(window - 1)
    return mask if documents is None else mask & Documents(documents)


def check_window(window: Window, said: str) -> None:
    """Raise ConfigurationError for a window without a token. said: how somebody asked for it."""
    if window is not None and window < 1:
        raise ConfigurationError(f"{said}: a token sees itself at least, so give 1 or more, or None")


def _documents(places: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the ends of each row's documents, from 0 on: one begins at each place 0, and at the begin of the row."""
    begins = (places[:, 1:] == 0).cpu()
    return [(0, *(row.nonzero().flatten() + 1).tolist(), places.shape[1]) for row in begins]
