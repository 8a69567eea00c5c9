"""The options of an attention call that a command runs on ranks: of bench and of trace."""

from __future__ import annotations

import argparse
from typing import Any

from tokenring.cli.spelling import (
    DTYPES,
    PRINTED,
    SIZES_TEXT,
    add_heads,
    add_mask,
    add_passes,
    add_seq,
    also,
    check_counts,
)
from tokenring.errors import ConfigurationError
from tokenring.nearest import hint


def add_call_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which ranks run, and which attention call."""
    add = parser.add_argument
    add("--ranks", type=int, metavar="P", help="start so many processes on this machine, with one thread each")
    add_seq(parser, ("--seq-len",), default=4096, help=f"tokens of the whole sequence (4k), {SIZES_TEXT}")
    add_heads(parser, 8, 64, "fp32")
    add_mask(parser, "causal")
    add_passes(parser)


def add_report_options(parser: argparse.ArgumentParser, what: str, drawn: str) -> None:
    """Add the options of what is printed and written. --json FILE, once the only way to a file, still writes it."""
    add = parser.add_argument
    add("--json", nargs="?", const=PRINTED, metavar="FILE", help=f"print {what} as JSON, or write it to FILE")
    add("--save", metavar="FILE", help="write the JSON to a file, and print the table")
    also(parser, add("--svg", metavar="FILE", help=f"draw {drawn}"), "--picture")


def with_printed(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options with `printed` set if JSON is to be printed; `json` then names a file or is None."""
    options.printed = options.json == PRINTED
    if options.printed:
        options.json = None
    return options


def check_transport(name: str) -> None:
    """Raise ConfigurationError unless --transport is "auto" or the name of one."""
    from tokenring.lowering.backend_names import TRANSPORTS

    known = ("auto", *TRANSPORTS)
    if name not in known:
        raise ConfigurationError(f"--transport {name}: unknown; choose one of {', '.join(known)}{hint(name, known)}")


def check_call(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the options of a call by name, in order. Raises ConfigurationError for a call that no rank could run."""
    import torch

    from tokenring.planner.layouts.balanced import layout_of
    from tokenring.sequence.mask import parse_mask
    from tokenring.sequence.workload import Workload

    check_counts(options)
    dtype = DTYPES[options.dtype]
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    size = (options.heads, kv_heads, options.dim, getattr(torch, dtype))
    Workload(options.batch, options.seq, options.seq, *size, options.value_dim)
    mask = parse_mask(options.mask)
    mask.check_length(options.seq)
    layout_of(options.layout, ranks, options.seq, mask)
    if options.rounds < 1:
        raise ConfigurationError(f"--rounds {options.rounds}: use 1 or more")
    if options.pieces is not None and options.pieces < 1:
        raise ConfigurationError(f"--pieces {options.pieces}: use 1 or more")
    check_transport(options.transport)
    names = ("heads", "batch", "layout", "transport", "pieces", "rounds")
    named = {name: getattr(options, name) for name in names}
    named |= {"seq_len": options.seq, "head_dim": options.dim, "value_dim": options.value_dim, "dtype": dtype}
    return named | {"kv_heads": kv_heads, "mask": str(mask), "backward": options.passes == "training"}
