"""The named schemes. Each is a placement and routes; none is a loop over steps."""

from __future__ import annotations

from collections.abc import Callable

from tokenring.errors import ConfigurationError
from tokenring.layout import Layout, make_layout
from tokenring.mask import Mask
from tokenring.schedule import routes
from tokenring.schedule.build import Pair, Scheme, build
from tokenring.schedule.ir import REQUESTS, Schedule

GRADIENT_SLACK = 1  # steps: what follows a ring is added to in the next step anyway
PARTIAL_SLACK = 2  # steps: a partial sent after tile s arrives while tile s+1 runs, or a little later


def at_query(pair: Pair) -> int:
    """q stays, kv travels."""
    return pair.q_owner


def at_key(pair: Pair) -> int:
    """kv stays, q travels."""
    return pair.kv_owner


def ring(direction: int = 1, pieces: int = 1) -> Scheme:
    """Ring Attention (arXiv:2310.01889): kv blocks circulate; in backward their gradients follow them."""
    gather = routes.ring(direction)
    return Scheme(
        "ring", at_query, gather_kv=gather, return_kv=routes.follow(gather), kv_pieces=pieces, slack=GRADIENT_SLACK
    )


def tokenring(direction: int = 1, pieces: int = 1) -> Scheme:
    """TokenRing (arXiv:2412.20501): q blocks circulate, partials go straight back to their owner."""
    return Scheme("tokenring", at_key, gather_q=routes.ring(direction), q_pieces=pieces, slack=PARTIAL_SLACK)


def bidirectional(direction: int = 1, pieces: int = 2) -> Scheme:
    """Half of each kv block goes round each way."""
    gather = routes.both_ways
    return Scheme(
        "bidirectional",
        at_query,
        gather_kv=gather,
        return_kv=routes.follow(gather),
        kv_pieces=pieces,
        slack=GRADIENT_SLACK,
    )


def direct_kv(direction: int = 1, pieces: int = 1) -> Scheme:
    """Every kv block goes straight to every rank: an all-gather over a full mesh."""
    return Scheme("direct-kv", at_query, gather_kv=routes.direct, kv_pieces=pieces)


def direct_q(direction: int = 1, pieces: int = 1) -> Scheme:
    """Every q block goes straight to every rank, partials straight back."""
    return Scheme("direct-q", at_key, gather_q=routes.direct, q_pieces=pieces)


SchemeMaker = Callable[[int, int], Scheme]
SCHEMES: dict[str, SchemeMaker] = {
    "ring": ring,
    "tokenring": tokenring,
    "bidirectional": bidirectional,
    "direct-kv": direct_kv,
    "direct-q": direct_q,
}
HAS_DIRECTION = frozenset({"ring", "tokenring"})
PIECES = {"bidirectional": 2}  # how many pieces a scheme cannot do with fewer of


def make_schedule(
    name: str, q_layout: Layout, kv_layout: Layout, mask: Mask, direction: int | None = None, pieces: int | None = None
) -> Schedule:
    """The schedule `name` for these layouts and this mask.

    direction: +1 or -1 for rings; None takes the one that moves fewer bytes under the mask (at a tie, +1).
    pieces: parts of a chunk that move apart; None takes the fewest.
    Raises ConfigurationError for unknown names and for pieces that do not divide the chunks.
    """
    if name not in SCHEMES:
        raise ConfigurationError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEMES)}")
    if direction not in (None, 1, -1):
        raise ConfigurationError(f"direction {direction!r}: use 1 (towards rank + 1), -1 (towards rank - 1) or None")
    least = PIECES.get(name, 1)
    pieces = least if pieces is None else pieces
    if pieces < least or pieces % least:
        raise ConfigurationError(f"schedule {name!r} in {pieces} pieces: use a multiple of {least}")
    scheme = SCHEMES[name](1, pieces)
    _check_pieces(name, scheme.q_pieces, q_layout)
    _check_pieces(name, scheme.kv_pieces, kv_layout)
    if name not in HAS_DIRECTION:
        return build(SCHEMES[name](1, pieces), q_layout, kv_layout, mask)
    wanted = (1, -1) if direction is None else (direction,)
    built = [build(SCHEMES[name](way, pieces), q_layout, kv_layout, mask) for way in wanted]
    return min(built, key=moved_tokens)


def _check_pieces(name: str, pieces: int, layout: Layout) -> None:
    if layout.chunk_length % pieces:
        raise ConfigurationError(
            f"schedule {name!r}: {pieces} pieces do not divide chunks of {layout.chunk_length} tokens "
            f"(layout {layout.name!r} of {layout.length}); use fewer pieces or another length"
        )


def moved_tokens(schedule: Schedule) -> int:
    """Tokens times hops of all requests: what tells two directions of one ring apart."""
    return sum(schedule.unit_length(move.block.kind) for move in schedule.moves if move.channel == REQUESTS)


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
