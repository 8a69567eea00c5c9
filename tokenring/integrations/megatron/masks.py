"""Masks of Megatron's layers and calls, as masks of ours."""

from __future__ import annotations

from typing import Any

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.sequence.mask import Causal, Full, Mask, SlidingWindow

WHY_NOT = {
    "padding": "a tensor says what is padding of each sequence: pack the sequences (packed_seq_params of format thd)",
    "arbitrary": "only masks of positions can be split: causal, no_mask, sliding windows and packed documents",
}
IGNORED_TENSOR = ("causal", "no_mask")  # Megatron's loader makes one for causal, too; the type says it all


def mask_of_call(mask_type: Any, attention_mask: Any, packed: bool, window: tuple[int, int] | None) -> Mask:
    """Return the mask of a layer's call, without the cut into documents.

    mask_type: an AttnMaskType, of which the name counts: its numbers differ between versions. window: positions
    before and after that a token sees, -1 for all, as config.window_size. Raises UnsupportedError.
    """
    name = getattr(mask_type, "name", str(mask_type))
    sees_later = name == "no_mask" or (packed and name == "padding")  # packed: documents say what is padding
    if not sees_later and name not in ("causal", "padding_causal"):
        why = WHY_NOT.get(name, "use causal, padding_causal, no_mask, or packed sequences")
        raise UnsupportedError(f"attention mask type {name!r} is not supported: {why}")
    if attention_mask is not None and not packed and name not in IGNORED_TENSOR:
        raise UnsupportedError(
            f"attention mask type {name!r} with a mask tensor is not supported: {WHY_NOT['padding']}, or use causal"
        )
    mask = Full() if sees_later else Causal()
    return mask if window is None else mask & SlidingWindow(*window)


def window_of_layer(config: Any, layer_number: int) -> tuple[int, int] | None:
    """Return the layer's config.window_size, unless config.window_attn_skip_freq gives it full attention; else None.

    layer_number counts from 1. A frequency n: every n-th layer is full; a list: for each layer, whether it is windowed.
    """
    window = getattr(config, "window_size", None)
    skip = getattr(config, "window_attn_skip_freq", None)
    if not window:
        return None
    if isinstance(skip, int):
        windowed = layer_number % skip != 0
    elif isinstance(skip, (list, tuple)):
        windowed = bool(skip[layer_number - 1])
    elif skip is None:
        windowed = True
    else:
        raise ConfigurationError(f"window_attn_skip_freq is {skip!r}: give an integer, or a list of one entry a layer")
    return (window[0], window[1]) if windowed else None
