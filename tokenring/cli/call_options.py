"""The attention call that a command runs on ranks, as options: of bench and of trace."""

from __future__ import annotations

import argparse
from typing import Any

from tokenring.errors import ConfigurationError


def add_call_options(parser: argparse.ArgumentParser, dtypes: tuple[str, ...]) -> None:
    """Which ranks, and which attention call."""
    add = parser.add_argument
    add("--ranks", type=int, metavar="P", help="start so many processes on this machine, with one thread each")
    add("--seq-len", type=int, default=4096, metavar="N", help="tokens of the whole sequence (4096)")
    add("--heads", type=int, default=8, metavar="N", help="query heads (8)")
    add("--kv-heads", type=int, metavar="N", help="kv heads (as many as query heads)")
    add("--head-dim", type=int, default=64, metavar="N", help="dimension of a head (64)")
    add("--batch", type=int, default=1, metavar="N", help="sequences (1)")
    add("--dtype", choices=dtypes, default="float32", help="of the inputs (float32)")
    add("--mask", default="causal", metavar="MASK", help='full, causal, "window(128,0)", ... (causal)')
    add("--forward-only", action="store_true", help="no backward pass")


def check_call(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """The options of a call by name, in order. Raises ConfigurationError for what no rank could run."""
    import torch

    from tokenring.lowering.backend_names import TRANSPORTS
    from tokenring.sequence.layout import make_layout
    from tokenring.sequence.mask import parse_mask
    from tokenring.sequence.workload import Workload

    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    size = (options.heads, kv_heads, options.head_dim, getattr(torch, options.dtype))
    Workload(options.batch, options.seq_len, options.seq_len, *size)
    make_layout(options.layout, ranks, options.seq_len)
    mask = parse_mask(options.mask)
    mask.check_length(options.seq_len)
    if options.rounds < 1:
        raise ConfigurationError(f"--rounds {options.rounds}: use 1 or more")
    if options.pieces is not None and options.pieces < 1:
        raise ConfigurationError(f"--pieces {options.pieces}: use 1 or more")
    if options.transport not in ("auto", *TRANSPORTS):
        known = ", ".join(TRANSPORTS)
        raise ConfigurationError(f"--transport {options.transport}: unknown; choose one of auto, {known}")
    names = ("seq_len", "heads", "head_dim", "dtype", "batch", "layout", "transport", "pieces", "rounds")
    named = {name: getattr(options, name) for name in names}
    return named | {"kv_heads": kv_heads, "mask": str(mask), "backward": not options.forward_only}
