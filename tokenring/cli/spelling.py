"""One spelling of each option in all commands; former spellings go on working, without being shown in help."""

from __future__ import annotations

import argparse
import copy
from typing import Any

from tokenring.display.console import LARGEST
from tokenring.errors import ConfigurationError, one_line
from tokenring.sequence.sizes import read_size

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LONG_DTYPES = {long: short for short, long in DTYPES.items()}
MOST_OF_A_MASK = 1 << 24  # characters of a file
PRINTED = "-"  # of an option that prints, or writes the file that it names
SIZES_TEXT = "as 4096, 4k or 1M (k is 1024)"


def also(parser: argparse._ActionsContainer, action: argparse.Action, *names: str) -> None:
    """Let an option be written in these ways too, which help does not show."""
    for name in names:
        other = copy.copy(action)
        other.option_strings, other.required = [name], False
        other.help = other.default = argparse.SUPPRESS
        parser._add_action(other)


def tokens(text: str) -> int:
    """Read a number of tokens: 4096, 4k, 1M. Raises ArgumentTypeError if it is none, or too large."""
    if text.isdecimal() and int(text) > LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is too large: {LARGEST} at most")
    try:
        return read_size("", text)
    except ConfigurationError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, {SIZES_TEXT}") from None


def mask_text(text: str) -> str:
    """Return a mask's text, which stands in a file where "@FILE" is given. Raises ArgumentTypeError."""
    if not text.startswith("@"):
        return text
    try:
        with open(text[1:], encoding="utf-8") as file:
            found = file.read(MOST_OF_A_MASK + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read a mask from {text[1:]!r}: {one_line(error)}") from None
    if len(found) > MOST_OF_A_MASK:
        raise argparse.ArgumentTypeError(f"{text[1:]!r} is not a mask: it has more than {MOST_OF_A_MASK} characters")
    return found.strip()


def dtype(text: str) -> str:
    """Return a dtype's short name, from either of its names."""
    return LONG_DTYPES.get(text, text)


def add_seq(parser: argparse._ActionsContainer, was: tuple[str, ...] = (), **how: Any) -> None:
    """Add the option of the length of the whole sequence."""
    also(parser, parser.add_argument("--seq", type=tokens, metavar="N", **how), *was)


def add_mask(parser: argparse._ActionsContainer, default: str | None, **how: Any) -> None:
    """Add the option of the mask, by its text or by a file that has it."""
    said = f'full, causal, "window(128,0)", ... (docs/masks.md), or @FILE ({default or "full"})'
    parser.add_argument("--mask", type=mask_text, default=default, metavar="MASK", help=said, **how)


def add_heads(parser: argparse._ActionsContainer, heads: int, dim: int, kind: str) -> None:
    """Add the options of the heads, their dimensions, the dtype and the batch of a call."""
    add = parser.add_argument
    add("--heads", type=int, default=heads, metavar="N", help=f"query heads ({heads})")
    add("--kv-heads", type=int, metavar="N", help="kv heads (as many as query heads)")
    also(parser, add("--dim", type=int, default=dim, metavar="N", help=f"dimension of a head ({dim})"), "--head-dim")
    add_value_dim(parser)
    add_dtype(parser, kind)
    add("--batch", type=int, default=1, metavar="N", help="sequences (1)")


def add_value_dim(parser: argparse._ActionsContainer) -> None:
    """Add the option of the dimension of values, where it is not that of queries and keys."""
    parser.add_argument("--value-dim", type=int, metavar="N", help="dimension of a head of values, as 128 (as --dim)")


def new_tokens_text(tokens: int) -> str:
    """Return how many tokens a step over a cache adds: 1 new token; 1,024 new tokens."""
    return f"{tokens:,} new token{'' if tokens == 1 else 's'}"


def heads_text(head_dim: int, value_dim: int) -> str:
    """Return the dimensions of a head as text: 128, or 192/128 where those of values are others."""
    return f"{head_dim}" if value_dim == head_dim else f"{head_dim}/{value_dim}"


def add_dtype(parser: argparse._ActionsContainer, kind: str) -> None:
    """Add the option of the dtype, by its short name; torch's name is understood."""
    parser.add_argument("--dtype", type=dtype, choices=tuple(DTYPES), default=kind, help=f"({kind})")


def add_passes(parser: argparse._ActionsContainer, *was: str) -> None:
    """Add the option of the passes: forward alone, or forward and backward as in training. was: former spellings."""
    made = parser.add_argument("--pass", dest="passes", choices=("forward", "training"), default="training",
        help="forward alone, or forward and backward (training)")  # fmt: skip
    also(parser, made, *was)
    parser.add_argument("--forward-only", dest="passes", action="store_const", const="forward",
        default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # fmt: skip


def check_counts(options: argparse.Namespace) -> None:
    """Raise ConfigurationError, with the option's name, if a size of a call is below 1."""
    for name in ("seq", "heads", "kv_heads", "dim", "value_dim", "batch"):
        value = getattr(options, name, None)
        if isinstance(value, int) and value < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} {value}: use 1 or more")
