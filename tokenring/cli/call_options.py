"""The options of an attention call that a command runs on ranks: of bench and of trace."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
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
from tokenring.sequence.sizes import read_size

CACHED = "--cached"  # a step over a KV cache, with options of its own
CACHED_SEEN = "new tokens see all that is cached and each other up to themselves"
UNCACHED = {  # options of calls without a cache: the argument that reads them, and why they do not go with --cached
    "seq": (("--seq", "--seq-len"), "its lengths are those of --cached N and --tokens N"),
    "mask": (("--mask",), CACHED_SEEN),
    "passes": (("--pass",), "it is forward alone"),
    "layout": (("--layout",), "what is cached lies in equal parts, in the order of ranks"),
    "pieces": (("--pieces",), "its messages are not cut"),
    "peers": (("--peers",), "it races the ways beside a few lines by hand"),
    "operator": (("--operator",), "each is a call of its own"),
}


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


def check_rounds(options: argparse.Namespace) -> None:
    """Raise ConfigurationError unless --rounds is positive."""
    if options.rounds < 1:
        raise ConfigurationError(f"--rounds {options.rounds}: use 1 or more")


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
    check_rounds(options)
    if options.pieces is not None and options.pieces < 1:
        raise ConfigurationError(f"--pieces {options.pieces}: use 1 or more")
    check_transport(options.transport)
    names = ("heads", "batch", "layout", "transport", "pieces", "rounds")
    named = {name: getattr(options, name) for name in names}
    named |= {"seq_len": options.seq, "head_dim": options.dim, "value_dim": options.value_dim, "dtype": dtype}
    return named | {"kv_heads": kv_heads, "mask": str(mask), "backward": options.passes == "training"}


# ---------- a step over a KV cache


def add_cached_hint(parser: argparse.ArgumentParser, does: str, example: str) -> None:
    """Add --cached and its options to a command of other calls, whose help names them; `refuse_cached` refuses them.

    does: what the command does to a step. example: whose help has the options.
    """
    add = parser.add_argument
    add(CACHED, metavar="N", help=f"{does} a KV cache of N tokens, as in decode: {example} --help")
    add("--tokens", metavar="N", help="new tokens over --cached (1)")
    add("--latents", action="store_true", help="--cached is of latents")


def add_cached_options(parser: argparse.ArgumentParser, unused: Iterable[str]) -> None:
    """Add the options of a step over a KV cache; those of other calls in `unused` are read too, to be refused."""
    add = parser.add_argument
    add("--cached", required=True, metavar="N", help=f"tokens that are cached, {SIZES_TEXT}")
    add("--tokens", default="1", metavar="N", help="new tokens (1: decode)")
    add("--latents", action="store_true",
        help="latents are cached, --dim wide: --value-dim of them are values (DeepSeek: 576 and 512)")  # fmt: skip
    add("--ranks", type=int, metavar="P", help="start so many processes on this machine, with one thread each")
    add_heads(parser, 8, 64, "fp32")
    for name in unused:
        add(*UNCACHED[name][0], dest=name, help=argparse.SUPPRESS)
    if "passes" in unused:
        add("--forward-only", dest="passes", action="store_const", const="forward", help=argparse.SUPPRESS)


def refuse_uncached(options: argparse.Namespace, unused: Iterable[str]) -> None:
    """Raise ConfigurationError for an option that does not go with --cached. --pass forward says what is so anyway."""
    for name in unused:
        value = getattr(options, name)
        if value is not None and (name, value) != ("passes", "forward"):
            spelled, why = UNCACHED[name]
            raise ConfigurationError(f"{spelled[0]} {value} does not go with --cached: {why}")


def refuse_cached(options: argparse.Namespace) -> None:
    """Raise ConfigurationError for the options of a step over a cache, where --cached N was not written in full."""
    if options.cached is not None:
        raise ConfigurationError("write --cached in full: it has options of its own")
    for name in ("tokens", "latents"):
        if getattr(options, name):
            raise ConfigurationError(f"--{name} goes with --cached N, how many tokens are cached")


def cached_call_fields(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the options of a step over a cache as fields of a case. Raises ConfigurationError for what cannot run."""
    import torch

    from tokenring.sequence.workload import Workload

    check_counts(options)
    tokens, cached = read_size("--tokens", options.tokens), read_size("--cached", options.cached)
    if cached % ranks:
        raise ConfigurationError(
            f"--cached {cached}: {ranks} ranks have equal parts of it; give {max(cached // ranks, 1) * ranks}"
        )
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    kv_heads = heads_of_latents(options) if options.latents else kv_heads
    value_dim = options.dim if options.value_dim is None else options.value_dim
    dtype = DTYPES[options.dtype]
    Workload(
        options.batch, tokens, cached, options.heads, kv_heads, options.dim, getattr(torch, dtype), value_dim,
        options.dim if options.latents else None,
    )  # fmt: skip
    check_rounds(options)
    check_transport(options.transport)
    sizes = {"tokens": tokens, "cached": cached, "heads": options.heads, "kv_heads": kv_heads, "dtype": dtype}
    sizes |= {"head_dim": options.dim, "value_dim": value_dim, "latents": options.latents, "batch": options.batch}
    return sizes | {"transport": options.transport}


def heads_of_latents(options: argparse.Namespace) -> int:
    """Return 1, the heads of latents, which all query heads share. Raises ConfigurationError for other sizes."""
    if options.kv_heads not in (None, 1):
        raise ConfigurationError(f"--kv-heads {options.kv_heads} with --latents: they are of all heads; leave it out")
    if options.value_dim is None or options.value_dim > options.dim:
        raise ConfigurationError(
            f"--latents of --dim {options.dim} elements, --value-dim {options.value_dim}: the first elements of a "
            f"latent are its values, so give --value-dim N of at most {options.dim} (DeepSeek: --dim 576 --value-dim "
            f"512)"
        )
    return 1
