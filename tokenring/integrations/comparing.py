"""Comparison of the ranks' batches: each rank cuts its own part, and a batch of another rank would go unnoticed."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch

from tokenring.api.context import ContextParallel
from tokenring.errors import TokenRingError
from tokenring.runtime.agreement import Description, agree, settle
from tokenring.sequence.workload import Workload

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
PIECE = 1 << 22  # elements that are summed at once: embeddings have more than memory has room for, eight bytes each
ODD, STRIDE, MIX = 0x2545F4914F6CDD1D, 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # below 2^63, without a pattern


def facts_of(batch: Mapping[str, Any]) -> dict[str, str]:
    """Return what ranks compare of a whole batch, by name: of tensors size, dtype and a checksum of all elements."""
    sums = {name: checksum(x) for name, x in batch.items() if isinstance(x, torch.Tensor) and _has_bits(x)}
    facts = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            facts[name] = f"{kind} of checksum {int(sums[name]) % (1 << 64):016x}" if name in sums else kind
        elif value is not None:
            facts[name] = _said(value)
    return dict(sorted(facts.items()))


def _said(value: Any) -> str:
    """Return a value as ranks compare it: numbers and texts as they are, of others the kind alone."""
    if isinstance(value, Mapping):
        return str({str(name): _said(each) for name, each in sorted(value.items(), key=str)})
    if isinstance(value, (list, tuple)):
        return str([_said(each) for each in value])
    if isinstance(value, torch.Tensor):
        return str(facts_of({"": value}))
    if isinstance(value, (Number, str)):  # numpy's scalars are numbers
        return repr(value.item() if hasattr(value, "item") else value)
    return f"a {type(value).__name__}"


def _has_bits(x: torch.Tensor) -> bool:
    return x.layout == torch.strided and x.device.type != "meta" and x.element_size() in BITS


@torch.no_grad()
def checksum(x: torch.Tensor) -> torch.Tensor:
    """Return an int64 scalar, where x lies, that depends on every bit of x and on its place, modulo 2^64."""
    bits = x.detach().contiguous().flatten().view(BITS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for at in range(0, bits.numel(), PIECE):
        piece = bits[at : at + PIECE].long()
        total = total + _mixed(piece * ODD + torch.arange(at, at + piece.numel(), device=x.device) * STRIDE).sum()
    return total


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Return other numbers for other numbers, which no shift or exchange of x's keeps the sum of."""
    for _ in range(2):
        x = x * (2 * x + 1) + MIX
    return x


def agree_on_batch(
    cp: ContextParallel, facts: Mapping[str, str], device: torch.device, size: Workload | None = None
) -> None:
    """Make sure that all ranks of cp call a model with one batch, in one exchange of 32 bytes.

    device: of the tokens. size: of the attention that follows, by which cp's transport is chosen at its first use.
    Raises Disagreement on every rank, which names the inputs that differ, or the rank that refused its own; PeerLost.
    """
    cp.check_open()
    with cp.turn:
        transport = cp.speaker(device, size)
        if transport is not None:
            agree(transport, Description.of({"pass": "forward", "call": "of a model", **facts}))
            settle(transport)


def expected_size(config: Any, rows: int, length: int) -> Workload | None:
    """Return the size of a model's attention over whole sequences, as its config says; None: it does not say."""
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "head_dim", None) or (heads and getattr(config, "hidden_size", 0) // heads)
    dtype = getattr(config, "dtype", None) or torch.get_default_dtype()
    try:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return Workload(rows, length, length, heads, kv_heads, width, dtype)  # type: ignore[arg-type]
    except TokenRingError:
        return None
