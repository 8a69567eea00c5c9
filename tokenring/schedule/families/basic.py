"""Rings and straight routes: what stays is Q or KV, whole."""

from __future__ import annotations

from dataclasses import replace

from tokenring.schedule import routes
from tokenring.schedule.scheme import STRAIGHT, Pair, Scheme

GRADIENT_SLACK = 1  # steps: what follows a ring is added to in the next step anyway
PARTIAL_SLACK = 2  # steps: a partial sent after tile s arrives while tile s+1 runs, or a little later


def at_query(pair: Pair) -> int:
    """Place a pair at the owner of q: q stays, kv travels."""
    return pair.q_owner


def at_key(pair: Pair) -> int:
    """Place a pair at the owner of kv: kv stays, q travels."""
    return pair.kv_owner


def ring(direction: int = 1, pieces: int = 1) -> Scheme:
    """Make Ring Attention (arXiv:2310.01889): kv blocks circulate; in backward their gradients follow them."""
    gather = routes.ring(direction)
    return Scheme(
        "ring", at_query, gather_kv=gather, return_kv=routes.follow(gather), kv_pieces=pieces, slack=GRADIENT_SLACK,
        placed_by_q=True,
    )


def tokenring(direction: int = 1, pieces: int = 1) -> Scheme:
    """Make TokenRing (arXiv:2412.20501): q blocks circulate, partials go straight back to their owner."""
    return Scheme("tokenring", at_key, gather_q=routes.ring(direction), q_pieces=pieces, slack=PARTIAL_SLACK)


def bidirectional(pieces: int = 2) -> Scheme:
    """Make the scheme in which half of each kv block goes round each way."""
    gather = routes.both_ways
    return Scheme(
        "bidirectional",
        at_query,
        gather_kv=gather,
        return_kv=routes.follow(gather),
        kv_pieces=pieces,
        slack=GRADIENT_SLACK,
        placed_by_q=True,
    )


def direct_kv(pieces: int = 1, fused: bool = False) -> Scheme:
    """Make the scheme in which every kv block goes straight to every rank: an all-gather over a full mesh.

    fused: one tile for all that is due of one piece; else a tile for each rank it came from.
    """
    return Scheme(
        "direct-kv", at_query, gather_kv=_direct(fused), kv_pieces=pieces, placed_by_q=True, straight=STRAIGHT
    )


def direct_q(pieces: int = 1, fused: bool = False) -> Scheme:
    """Make a scheme with every q block straight to every rank, partials straight back; `fused` as in direct_kv."""
    return Scheme("direct-q", at_key, gather_q=_direct(fused), q_pieces=pieces, straight=STRAIGHT)


def _direct(fused: bool) -> routes.Gather:
    return routes.direct_fused if fused else routes.direct


def all_gather_kv(world_size: int) -> Scheme:
    """Make a scheme with every kv block straight to every rank, which computes all it has to in one tile."""
    return Scheme(
        "all-gather-kv", at_query, gather_kv=routes.all_to_all, together=True, placed_by_q=True, straight=STRAIGHT
    )


def kv_cut(scheme: Scheme, pieces: int) -> Scheme:
    """Return the scheme with kv in so many pieces, whose order the routes know themselves."""
    return replace(scheme, kv_pieces=pieces)


def q_cut(scheme: Scheme, pieces: int) -> Scheme:
    """Return the scheme with q in so many pieces, whose order the routes know themselves."""
    return replace(scheme, q_pieces=pieces)


def fused(scheme: Scheme) -> Scheme:
    """Return the scheme with straight routes on which all blocks of one piece are due together."""
    q, kv = (routes.direct_fused if of is routes.direct else of for of in (scheme.gather_q, scheme.gather_kv))
    return replace(scheme, gather_q=q, gather_kv=kv)
