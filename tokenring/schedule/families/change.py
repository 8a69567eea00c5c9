"""Change a scheme into another: other ranks in its places, finer pieces, its mirror image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenring.errors import ConfigurationError
from tokenring.schedule.routes import Gather, Hop, Makers, Origin, Return, return_direct, stay
from tokenring.schedule.scheme import Pair, Placement, Scheme


def arranged(scheme: Scheme, order: Sequence[int]) -> Scheme:
    """Return the scheme with its ranks renumbered: order[i] is the real rank that plays rank i.

    So a scheme whose neighbours or nodes are runs of numbers fits a machine that numbers its ranks otherwise.
    `place_for` speaks of real ranks anyway. Raises ConfigurationError unless `order` has each rank once.
    """
    order = tuple(order)
    if sorted(order) != list(range(len(order))):
        raise ConfigurationError(f"order {list(order)} does not name each of {len(order)} ranks once")
    if list(order) == sorted(order):
        return scheme
    part = [0] * len(order)
    for role, rank in enumerate(order):
        part[rank] = role

    def cast(pair: Pair) -> Pair:
        q_owner, kv_owner, heads, q_piece, kv_piece, world_size = pair
        if world_size != len(order):
            _check_size(scheme, order, world_size)
        return Pair(part[q_owner], part[kv_owner], heads, q_piece, kv_piece, world_size)

    def gather(of: Gather) -> Gather:
        def route(origin: Origin) -> tuple[Hop, ...]:
            _check_size(scheme, order, origin.world_size)
            hops = of(origin._replace(owner=part[origin.owner]))
            return tuple(Hop(step, order[src], order[dst], due, add) for step, src, dst, due, add in hops)

        return stay if of is stay else route

    def back(of: Return) -> Return:
        def route(origin: Origin, makers: Makers) -> tuple[Hop, ...]:
            hops = of(origin._replace(owner=part[origin.owner]), {part[rank]: makers[rank] for rank in makers})
            return tuple(Hop(step, order[src], order[dst], due, add) for step, src, dst, due, add in hops)

        return of if of is return_direct else route

    place, when, may_reach = scheme.place, scheme.when, scheme.may_reach_kv
    return replace(
        scheme,
        may_reach_kv=may_reach
        and (lambda origin, rank: may_reach(origin._replace(owner=part[origin.owner]), part[rank])),
        place=lambda pair: order[place(cast(pair))],
        when=when and (lambda pair, due: when(cast(pair), due)),
        gather_q=gather(scheme.gather_q),
        gather_kv=gather(scheme.gather_kv),
        return_q=back(scheme.return_q),
        return_kv=back(scheme.return_kv),
    )


def _check_size(scheme: Scheme, order: tuple[int, ...], world_size: int) -> None:
    if len(order) != world_size:
        raise ConfigurationError(f"schedule {scheme.name!r} was arranged for {len(order)} ranks, not {world_size}")


def mirrored(scheme: Scheme, world_size: int) -> Scheme:
    """Reverse the ranks of a scheme: what went to rank + 1 goes to rank - 1. Nodes of neighbours stay together."""
    return arranged(scheme, range(world_size - 1, -1, -1))


def in_pieces(scheme: Scheme, pieces: int) -> Scheme:
    """Return the scheme with what moves in so many pieces: q where q moves, else kv.

    Each stage of the scheme becomes `pieces` stages. So a piece is computed, passed on or sent home while the next is
    on its way.
    """
    if pieces == 1 or scheme.gather_q is scheme.gather_kv is stay:
        return scheme
    cuts_q = scheme.gather_q is not stay

    def whole(pair: Pair) -> Pair:
        q_owner, kv_owner, heads, q_piece, kv_piece, world_size = pair
        if cuts_q:
            return Pair(q_owner, kv_owner, heads, q_piece // pieces, kv_piece, world_size)
        return Pair(q_owner, kv_owner, heads, q_piece, kv_piece // pieces, world_size)

    def _piece(pair: Pair) -> int:
        return pair.q_piece if cuts_q else pair.kv_piece

    def when(pair: Pair, due: int) -> int:
        step = due // pieces
        step = step if scheme.when is None else scheme.when(whole(pair), step)
        return step * pieces + _piece(pair) % pieces

    def place_for(*call: object) -> Placement:
        place = scheme.place_for(*call)  # type: ignore[misc, arg-type]
        return lambda pair: place(whole(pair))

    place, may_reach = scheme.place, scheme.may_reach_kv
    return replace(
        scheme,
        may_reach_kv=may_reach
        and (lambda origin, rank: may_reach(origin if cuts_q else _uncut(origin, pieces), rank)),
        place=lambda pair: place(whole(pair)),
        place_for=scheme.place_for and place_for,
        when=when,
        gather_q=_slower(scheme.gather_q, pieces, cuts_q),
        gather_kv=_slower(scheme.gather_kv, pieces, not cuts_q),
        return_q=_of_whole(scheme.return_q, pieces) if cuts_q else scheme.return_q,
        return_kv=scheme.return_kv if cuts_q else _of_whole(scheme.return_kv, pieces),
        q_pieces=scheme.q_pieces * (pieces if cuts_q else 1),
        kv_pieces=scheme.kv_pieces * (1 if cuts_q else pieces),
    )


def _uncut(origin: Origin, pieces: int) -> Origin:
    return origin._replace(piece=origin.piece // pieces, pieces=origin.pieces // pieces)


def _slower(gather: Gather, pieces: int, cut: bool) -> Gather:
    """Return the route with `pieces` steps for each of its own; a piece has one of them."""
    if gather is stay:
        return stay

    def route(origin: Origin) -> tuple[Hop, ...]:
        late = origin.piece % pieces if cut else 0
        hops = gather(_uncut(origin, pieces) if cut else origin)
        return tuple(
            Hop(step * pieces + late, src, dst, (due or step + 1) * pieces + late, add)
            for step, src, dst, due, add in hops
        )

    return route


def _of_whole(back: Return, pieces: int) -> Return:
    def route(origin: Origin, makers: Makers) -> tuple[Hop, ...]:
        return back(_uncut(origin, pieces), makers)

    return back if back is return_direct else route
