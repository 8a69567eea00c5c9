"""Schedules to print, prove or export, without a process group."""

from __future__ import annotations

from math import lcm

from tokenring.errors import ConfigurationError
from tokenring.schedule.families.registry import parse
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import Scheme, build
from tokenring.sequence.layout import Layout, as_integer, make_layout, read_name
from tokenring.sequence.mask import Mask
from tokenring.sequence.mask_words import MaskLike, mask_of

NOMINAL_TOKENS = 64  # of a chunk


def schedule(
    name: str | Scheme,
    ranks: int,
    layout: str | Layout = "zigzag",
    mask: MaskLike = None,
    direction: int | None = None,
    pieces: int | None = None,
    length: int | None = None,
) -> Schedule:
    """Return a schedule to print, prove or export: `tr.schedule("tokenring", ranks=8, mask=tr.Causal())`.

    name: a named schedule, or a Scheme of your own (which says itself what moves in how many pieces).
    length: tokens of the whole sequence; the default gives each chunk 64, or a little more where the
    scheme cuts chunks into pieces that do not divide that. It matters for masks that count positions
    (windows, documents). Raises ConfigurationError.
    """
    ranks = _count("ranks", ranks)
    if length is None:
        length = layout.length if isinstance(layout, Layout) else _nominal_length(name, layout, ranks)
    length = _count("length", length)
    found = mask_of(mask)
    mask = Mask() if found is None else found
    mask.check_length(length)
    made = make_layout(layout, ranks, length)
    if isinstance(name, Scheme):
        return build(name, made, made, mask)
    return make_schedule(name, made, made, mask, direction, None if pieces is None else _count("pieces", pieces))


def _count(what: str, value: object) -> int:
    number = as_integer(value)
    if number is None or number < 1:
        raise ConfigurationError(f"{what}={value!r}: give a positive integer")
    return number


def _nominal_length(name: str | Scheme, layout: str, ranks: int) -> int:
    scheme = name if isinstance(name, Scheme) else parse(name).make(ranks)
    cut = lcm(scheme.q_pieces, scheme.kv_pieces)
    return 2 * ranks * -(-NOMINAL_TOKENS // cut) * cut * read_name(layout)[1]
