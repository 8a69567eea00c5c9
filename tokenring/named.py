"""Schedules to print, prove or export, without a process group."""

from __future__ import annotations

from tokenring.errors import ConfigurationError
from tokenring.layout import Layout, make_layout
from tokenring.mask import Mask
from tokenring.schedule.build import Scheme, build
from tokenring.schedule.ir import Schedule
from tokenring.schedule.schemes import make_schedule


def schedule(
    name: str | Scheme,
    ranks: int,
    layout: str | Layout = "zigzag",
    mask: Mask | None = None,
    direction: int | None = None,
    pieces: int | None = None,
    length: int | None = None,
) -> Schedule:
    """A schedule to print, prove or export: `tr.schedule("tokenring", ranks=8, mask=tr.Causal())`.

    name: a named schedule, or a Scheme of your own (which says itself what moves in how many pieces).
    length: tokens of the whole sequence; the default gives each chunk 64. It matters for masks
    that count positions (windows, documents). Raises ConfigurationError.
    """
    if ranks < 1:
        raise ConfigurationError(f"ranks={ranks}: at least one is needed")
    if length is None:
        length = layout.length if isinstance(layout, Layout) else _nominal_length(layout, ranks)
    mask = Mask() if mask is None else mask
    mask.check_length(length)
    made = make_layout(layout, ranks, length)
    if isinstance(name, Scheme):
        return build(name, made, made, mask)
    return make_schedule(name, made, made, mask, direction, pieces)


def _nominal_length(layout: str, ranks: int) -> int:
    cuts = layout.partition("/")[2]
    return 2 * ranks * 64 * (int(cuts) if cuts.isdigit() and int(cuts) else 1)
