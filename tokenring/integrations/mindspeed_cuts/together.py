"""Flags of MindSpeed that do not go together here: cuts are not what they say, or a rank has a part of the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenring.integrations.mindspeed_cuts.layouts import (
    GATHER,
    HYBRID,
    MEGATRON,
    ULYSSES,
    algorithm,
    is_general,
    is_packed,
)

ROTARY = ("rope", "yarn")


def _hides_mask(args: Any) -> bool:
    return is_general(args) and not is_packed(args) and algorithm(args) != ULYSSES


def _cuts_otherwise(args: Any) -> bool:
    """Tell whether documents, or sequences of general masks, are cut in another way than the algorithm's name says."""
    return is_packed(args) and (algorithm(args), is_general(args)) in ((HYBRID, False), (GATHER, True))


def _turns_otherwise(args: Any) -> bool:
    """Tell whether rotary embeddings are cut in another way than the documents."""
    rotary = getattr(args, "position_embedding_type", None) in ROTARY
    cut = is_packed(args) and not is_general(args) and algorithm(args) in (MEGATRON, GATHER)
    return rotary and cut and not getattr(args, "reset_position_ids", False)


TOGETHER: dict[str, tuple[Callable[[Any], bool], str]] = {  # attribute → with which others, and why
    "attention_mask_type": (
        _hides_mask, f"each rank has a part of the mask only: use causal, or --context-parallel-algo {ULYSSES}"
    ),
    "reset_attention_mask": (
        _cuts_otherwise,
        f"with {HYBRID} and causal masks, and with {GATHER} and general ones, MindSpeed cuts documents otherwise than "
        f"it says: use {MEGATRON} or {ULYSSES}",
    ),
    "position_embedding_type": (
        _turns_otherwise,
        "with --reset-attention-mask MindSpeed cuts its embeddings otherwise than the documents: say "
        "--reset-position-ids",
    ),
    "mtp_num_layers": (
        lambda args: is_packed(args) and bool(getattr(args, "mtp_num_layers", None)),
        "documents that differ by layer are not supported: leave out --reset-attention-mask, or this",
    ),
}  # fmt: skip
