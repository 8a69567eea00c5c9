"""Schedules that several test modules look at: every named one, and some that nothing ships."""

from __future__ import annotations

from functools import cache

from tokenring.schedule import routes
from tokenring.schedule.names import at_key, make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import Pair, Scheme, build
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Causal, Documents, Full, Mask, SlidingWindow

NAMED = ("ring+", "ring-", "tokenring+", "tokenring-", "bidirectional", "direct-kv", "direct-q")
CHUNKS_A_RANK = {"contiguous": 1, "zigzag": 2, "striped": 1, "zigzag/2": 4, "contiguous/2": 2, "striped/2": 2}
MASKS = ("full", "causal", "window", "window both ways", "window to the right", "documents", "packed", "all three")
TOKENS = 8  # of a chunk


def mask_of(name: str, length: int) -> Mask:
    packed = Documents([0, length // 3, length // 2 + 1, length - 3])  # with padding
    return {
        "full": Full(),
        "causal": Causal(),
        "window": SlidingWindow(5),
        "window both ways": SlidingWindow(length // 3, 2),
        "window to the right": SlidingWindow(0, -1),
        "documents": packed,
        "packed": Causal() & packed,
        "all three": SlidingWindow(length // 4) & packed & Documents([0, length // 5, length]),
    }[name]


def make(ranks: int, named: str, layout: str, mask: str, pieces: int | None = None, tokens: int = TOKENS) -> Schedule:
    """A schedule by its name and, for rings, its direction; chunks of so many tokens."""
    length = ranks * CHUNKS_A_RANK[layout] * tokens
    whole = make_layout(layout, ranks, length)
    direction = {"+": 1, "-": -1}.get(named[-1])
    return make_schedule(named.rstrip("+-"), whole, whole, mask_of(mask, length), direction, pieces)


def two_by_two(pair: Pair) -> int:
    return pair.kv_owner // 2 * 2 + pair.q_owner % 2


def ulysses(ranks: int, keep: frozenset[str] = frozenset()) -> Scheme:
    """Rank r computes head group r of everything, in one kernel call."""
    return Scheme(
        "ulysses", lambda pair: pair.heads, routes.all_to_all, routes.all_to_all,
        head_groups=ranks, keep=keep, together=True,
    )  # fmt: skip


ROUND = routes.ring(1)
UNNAMED = {
    "q ring, partials follow it": Scheme("follow", at_key, gather_q=ROUND, return_q=routes.follow(ROUND)),
    "tiles": Scheme("tiles", two_by_two, routes.direct, routes.direct),
    "Ulysses": ulysses(4, frozenset({"q", "kv"})),
}


@cache
def bases() -> dict[str, Schedule]:
    """On 4 ranks, zigzag; nobody changes it."""
    whole = make_layout("zigzag", 4, 64)
    named = {f"{name}, {mask}": make(4, name, "zigzag", mask) for name in NAMED for mask in ("full", "causal")}
    return named | {
        f"{name}, {mask}": build(scheme, whole, whole, mask_of(mask, whole.length))
        for name, scheme in UNNAMED.items()
        for mask in ("full", "causal")
    }
