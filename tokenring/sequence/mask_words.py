"""Masks as users may give them: itself, its class where it takes nothing, its text, or is_causal."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenring.errors import ConfigurationError
from tokenring.sequence.mask import (
    Bidirectional,
    BlockCausal,
    Causal,
    Chunks,
    Documents,
    Full,
    Mask,
    PrefixLM,
    PrefixTree,
    Slices,
    SlidingWindow,
    of_numbers,
    parse_mask,
)

Integers = tuple[int, ...] | None
MaskLike = Mask | str | Callable[[], Mask] | None
USE = "use Full(), Causal(), SlidingWindow or Documents"
OF_TENSORS = "say which positions see which, as Causal() & Documents(cu_seqlens); padding is what Documents leave over"
SIZED = {
    SlidingWindow: "SlidingWindow(left, right)", Documents: "Documents([0, end of the first, ...])",
    PrefixLM: "PrefixLM(prefix_length)", BlockCausal: "BlockCausal(block_length)", Chunks: "Chunks(size)",
    Bidirectional: "Bidirectional([(start, stop), ...])", PrefixTree: "PrefixTree(lengths, parents)",
    Slices: "Slices([(q0, q1, kv0, kv1, low, high), ...])",
}  # fmt: skip


def mask_of(given: object, is_causal: object = None) -> Mask | None:
    """Return the mask that a call says, None where it says none. Raises ConfigurationError if wrong or ambiguous."""
    mask, wrong = read_mask(given, is_causal)
    if wrong is not None:
        raise ConfigurationError(wrong)
    return mask


def read_mask(given: object, is_causal: object = None) -> tuple[Mask | None, str | None]:
    """Return the mask that a call says, or what is wrong with it; raises nothing: torch.compile can follow it."""
    mask: Mask | None = None
    if isinstance(given, Mask):
        mask = given
    elif given is Causal:
        mask = Causal()
    elif given is Full:
        mask = Full()
    elif isinstance(given, str):
        low, high, cu_seqlens, numbers, wrong = _numbers(given)
        if wrong is not None:
            return None, wrong
        mask = Mask(low, high, cu_seqlens) if numbers is None else of_numbers(numbers)
    elif given is not None:
        return None, _no_mask(given)
    return (mask, None) if is_causal is None else _with_is_causal(mask, is_causal)


def _with_is_causal(mask: Mask | None, is_causal: object) -> tuple[Mask | None, str | None]:
    """Return the mask, or what is wrong where it says otherwise than is_causal of what comes later."""
    if is_causal is not True and is_causal is not False:
        return None, "is_causal is neither True nor False: leave it out, or give one of these; other masks as mask=..."
    if mask is None:
        return (Causal() if is_causal else Full()), None
    # A branch, since what a compiler makes of a comparison is no bool to compare with.
    agrees = is_causal if mask.looks_back else not is_causal
    if agrees:
        return mask, None
    shown = "this mask" if torch.compiler.is_compiling() else f"mask {mask}"  # which no compiler follows
    return None, (
        f"is_causal={is_causal} and {shown} say different things: leave is_causal out"
        + ("; what both see is Causal() & the other mask" if is_causal else "")
    )


def _numbers(text: str) -> tuple[int | None, int | None, Integers, Integers, str | None]:
    """Return what a mask's text says, or what is wrong with it: to a compiler, a constant of the text."""
    try:
        mask = parse_mask(text)
    except ConfigurationError as error:
        return None, None, None, None, str(error)
    return mask.low, mask.high, mask.cu_seqlens, mask.numbers, None


# All that torch.compiler.assume_constant_result does; that would import the compiler, which takes a second.
_numbers._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _no_mask(given: object) -> str:
    if (sized := next((text for kind, text in SIZED.items() if kind is given), None)) is not None:
        return f"mask={sized.partition('(')[0]} has no sizes: write {sized}; docs/masks.md has all masks"
    text = f"mask is of type {type(given).__name__}; {USE}"
    if isinstance(given, torch.Tensor):
        text = f"{text}: {OF_TENSORS}"
    elif isinstance(given, bool):
        text = f"{text}; is_causal={given} says what that seems to mean"
    return f"{text}; docs/masks.md has all masks"
