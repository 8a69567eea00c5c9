"""Masks of transformers' models, read off the functions that make them: what is not understood is refused by name.

transformers builds the mask of each kind of layer from closures (`masking_utils`), and hands the result to the layers
as `attention_mask`. Under our name it hands over a `LayerMask` instead: what the mask says besides documents, which are
known from the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenring.errors import UnsupportedError
from tokenring.sequence.mask import Causal, Documents, Mask, SlidingWindow


@dataclass(frozen=True)
class LayerMask:
    """The causal mask of one kind of layer, of each document by itself.

    window: how many positions a token sees, its own among them. chunk: length of the chunks that see themselves only,
    counted from the begin of each document. None: no such limit.
    """

    window: int | None = None
    chunk: int | None = None

    def within(self, bounds: tuple[int, ...] | None, length: int) -> Mask:
        """Return the mask of packed documents that begin and end at `bounds`; None: of one of this length."""
        mask = Causal()
        if self.window is not None:
            mask &= SlidingWindow(self.window - 1)
        if self.chunk is not None:
            bounds = _chunked(bounds or (0, length), self.chunk)
        return mask if bounds is None else mask & Documents(bounds)


def _chunked(bounds: tuple[int, ...], chunk: int) -> tuple[int, ...]:
    starts = [each for start, stop in pairwise(bounds) for each in range(start, stop, chunk)]
    return (*starts, bounds[-1])


def layer_mask(*, mask_function: Callable[..., Any], attention_mask: Any = None, **_: Any) -> LayerMask:
    """Return what a mask of transformers' says; registered in its AttentionMaskInterface. Raises UnsupportedError."""
    if attention_mask is not None:
        raise UnsupportedError(
            "a model got an attention_mask beside tokenring's batch: give it to use_tokenring's model, or to "
            "cut_batch, together with the tokens of all ranks"
        )
    return read_mask_function(mask_function)


def read_mask_function(function: Callable[..., Any]) -> LayerMask:
    """Return what a mask function of transformers.masking_utils says. Raises UnsupportedError for any other function.

    Functions are known by their code, so that one of the same name, written elsewhere, is none of them.
    """
    from transformers import masking_utils as made_by

    if function is made_by.causal_mask_function:
        return LayerMask()
    inner = _closed_over(function)
    if _is(function, made_by.and_masks, made_by.causal_mask_function):
        return _joined([read for each in inner["mask_functions"] if (read := _part(each)) is not None])
    raise _refusal(function)


def _part(function: Callable[..., Any]) -> LayerMask | None:
    """Return what one of several masks says that are joined by `and`; None: what the batch knows by itself."""
    from transformers import masking_utils as made_by

    inner = _closed_over(function)
    if _is(function, made_by.sliding_window_overlay, 1):
        return LayerMask(window=int(inner["sliding_window"]))
    if _is(function, made_by.chunked_overlay, 1, None):
        return LayerMask(chunk=int(inner["chunk_size"]))
    if _is(function, made_by.packed_sequence_mask_function, None):
        return None
    remapped = getattr(made_by, "remap_positions_for_packed_sequence", None)  # from 5.23 on
    if remapped is not None and _is(function, remapped, None, None):
        return read_mask_function(inner["mask_function"])
    return read_mask_function(function)


def _joined(parts: list[LayerMask]) -> LayerMask:
    windows = [each.window for each in parts if each.window is not None]
    chunks = {each.chunk for each in parts if each.chunk is not None}
    if len(chunks) > 1:
        raise UnsupportedError(f"a mask of chunks of {sorted(chunks)} tokens at once is not supported")
    return LayerMask(min(windows, default=None), next(iter(chunks), None))


def _is(function: Callable[..., Any], maker: Callable[..., Any], *arguments: Any) -> bool:
    """Tell whether a function is one that `maker` makes; arguments: any that it takes."""
    return getattr(function, "__code__", None) is maker(*arguments).__code__


def _closed_over(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables that a function took from where it was made."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    return {} if code is None else dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _refusal(function: Callable[..., Any]) -> UnsupportedError:
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
    return UnsupportedError(
        f"the model's mask function {name} is not one that tokenring reads (causal, sliding window, chunks, packed "
        f"documents): what it shows or hides would be lost; use a model without it, or set "
        f"attn_implementation='sdpa' and no context parallelism"
    )
