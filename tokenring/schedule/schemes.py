"""The named schemes. Each is a placement and routes; none is a loop over steps."""

from __future__ import annotations

from collections.abc import Callable

from tokenring.errors import ConfigurationError
from tokenring.layout import Layout
from tokenring.mask import Mask
from tokenring.schedule import routes
from tokenring.schedule.build import Pair, Scheme, build
from tokenring.schedule.ir import REQUESTS, Schedule

GRADIENT_SLACK = 1  # steps: what follows a ring is added to in the next step anyway
SMALL_TILE_TOKENS = 128  # shorter sides cost the CPU kernel a tenth to a half more for each pair
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


def bidirectional(pieces: int = 2) -> Scheme:
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


def direct_kv(pieces: int = 1, fused: bool = False) -> Scheme:
    """Every kv block goes straight to every rank: an all-gather over a full mesh.

    fused: one tile for all that is due of one piece; else a tile for each rank it came from.
    """
    return Scheme("direct-kv", at_query, gather_kv=_direct(fused), kv_pieces=pieces)


def direct_q(pieces: int = 1, fused: bool = False) -> Scheme:
    """Every q block goes straight to every rank, partials straight back; `fused` as in direct_kv."""
    return Scheme("direct-q", at_key, gather_q=_direct(fused), q_pieces=pieces)


def _direct(fused: bool) -> routes.Gather:
    return routes.direct_fused if fused else routes.direct


SCHEMES: dict[str, Callable[..., Scheme]] = {
    "ring": ring,
    "tokenring": tokenring,
    "bidirectional": bidirectional,
    "direct-kv": direct_kv,
    "direct-q": direct_q,
}
HAS_DIRECTION = frozenset({"ring", "tokenring"})
CAN_FUSE = frozenset({"direct-kv", "direct-q"})
PIECES = {"bidirectional": 2}  # how many pieces a scheme cannot do with fewer of


def make_schedule(
    name: str, q_layout: Layout, kv_layout: Layout, mask: Mask, direction: int | None = None, pieces: int | None = None
) -> Schedule:
    """The schedule `name` for these layouts and this mask.

    direction: +1 or -1, for rings alone; None takes the one that moves fewer bytes under the mask (at a tie, +1).
    pieces: parts of a chunk that move apart; None takes the fewest.
    Raises ConfigurationError for unknown names, a direction that a scheme does not have, and pieces
    that do not divide the chunks.
    """
    if name not in SCHEMES:
        raise ConfigurationError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEMES)}")
    pieces = _pieces(name, pieces, q_layout, kv_layout)
    options: dict[str, int | bool] = {"pieces": pieces}
    if name in CAN_FUSE:
        options["fused"] = _is_small(SCHEMES[name](pieces), q_layout, kv_layout)
    ways = [{"direction": way} for way in _directions(name, direction)] or [{}]
    built = [build(SCHEMES[name](**options, **way), q_layout, kv_layout, mask) for way in ways]
    return min(built, key=moved_tokens)


def _directions(name: str, asked: int | None) -> tuple[int, ...]:
    """The directions to choose from; none if the scheme has none."""
    if asked not in (None, 1, -1):
        raise ConfigurationError(f"direction {asked!r}: use 1 (towards rank + 1), -1 (towards rank - 1) or None")
    if name in HAS_DIRECTION:
        return (1, -1) if asked is None else (asked,)
    if asked is not None:
        raise ConfigurationError(
            f"direction {asked}: schedule {name!r} has none; leave it out, or choose one of "
            f"{', '.join(sorted(HAS_DIRECTION))}"
        )
    return ()


def _pieces(name: str, asked: int | None, q_layout: Layout, kv_layout: Layout) -> int:
    least = PIECES.get(name, 1)
    pieces = least if asked is None else asked
    if pieces < least or pieces % least:
        raise ConfigurationError(f"schedule {name!r} in {pieces} pieces: use a multiple of {least}")
    scheme = SCHEMES[name](pieces=pieces)
    for cut, layout in ((scheme.q_pieces, q_layout), (scheme.kv_pieces, kv_layout)):
        if layout.chunk_length % cut:
            raise ConfigurationError(
                f"schedule {name!r}: {cut} pieces do not divide chunks of {layout.chunk_length} tokens "
                f"(layout {layout.name!r} of {layout.length}); use fewer pieces or another length"
            )
    return pieces


def _is_small(scheme: Scheme, q_layout: Layout, kv_layout: Layout) -> bool:
    """Whether the tile of two ranks is so small that kernels are better off with those of all ranks in one."""
    rows, cols = q_layout.local_length // scheme.q_pieces, kv_layout.local_length // scheme.kv_pieces
    return min(rows, cols) < SMALL_TILE_TOKENS


def moved_tokens(schedule: Schedule) -> int:
    """Tokens times hops of all requests: what tells two directions of one ring apart."""
    return sum(schedule.unit_length(move.block.kind) for move in schedule.moves if move.channel == REQUESTS)
