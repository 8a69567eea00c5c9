"""MindSpeed's cuts of the sequence, one for each algorithm of its context parallelism, as layouts of ours.

args: those of the command line, or a TransformerConfig, into which MindSpeed puts all of them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tokenring.sequence.layout import Layout, contiguous, zigzag

MEGATRON, ULYSSES, HYBRID, GATHER = "megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo", "kvallgather_cp_algo"
ALGORITHMS = (MEGATRON, ULYSSES, HYBRID, GATHER)


def algorithm(args: Any) -> str:
    """Return the name of MindSpeed's algorithm."""
    return getattr(args, "context_parallel_algo", None) or MEGATRON


def is_general(args: Any) -> bool:
    """Tell whether masks are MindSpeed's general ones."""
    return getattr(args, "attention_mask_type", None) == "general"


def is_packed(args: Any) -> bool:
    """Tell whether sequences are packs of documents that see themselves only."""
    return bool(getattr(args, "reset_attention_mask", False))


def cuts_documents(args: Any) -> bool:
    """Tell whether each document of a pack is cut by itself, zigzag over all ranks."""
    return is_packed(args) and not is_general(args) and algorithm(args) == MEGATRON


def may_keep_mindspeed(args: Any) -> bool:
    """Tell whether MindSpeed's attention is a ring over all ranks, as which it may stay where it is hardly slower."""
    return algorithm(args) == MEGATRON and not is_general(args) and not is_packed(args)


def layout_of(args: Any, ranks: int, length: int) -> Layout | None:
    """Return the layout of a sequence that is not cut by its documents; None: zigzag.

    In equal parts for Ulysses, general masks and packs; or under hybrid_cp_algo zigzag over groups of
    neighbours, of whose two chunks each holds an equal part.
    """
    kind = algorithm(args)
    if kind == ULYSSES or is_general(args) or is_packed(args):
        return _contiguous(ranks, length)
    return hybrid_layout(ranks, length, int(args.ulysses_degree_in_cp)) if kind == HYBRID else None


_contiguous = lru_cache(maxsize=64)(contiguous)


@lru_cache(maxsize=64)
def hybrid_layout(ranks: int, length: int, neighbours: int) -> Layout:
    """Return the zigzag of groups, in which chunks are cut into as many equal parts as a group's ranks hold."""
    groups, cuts = ranks // neighbours, neighbours // 2 if neighbours % 2 == 0 else neighbours
    chunks, parts = zigzag(groups, length, cuts), 2 * cuts // neighbours  # of each rank
    owners, seen = [], dict.fromkeys(range(groups), 0)
    for group in chunks.owners:
        owners.append(group * neighbours + seen[group] // parts)
        seen[group] += 1
    return Layout(f"hybrid of {neighbours}", ranks, length, chunks.chunks, tuple(owners))
