"""Pieces of a block go round different rings at once, so that every link of a full mesh carries one at a time."""

from __future__ import annotations

from tokenring.schedule import routes
from tokenring.schedule.families.basic import GRADIENT_SLACK, PARTIAL_SLACK, at_key, at_query
from tokenring.schedule.families.cycles import Cycles, hamiltonian
from tokenring.schedule.families.family import refuse
from tokenring.schedule.routes import Gather, Hop, Origin
from tokenring.schedule.scheme import Scheme


def multi_ring(world_size: int) -> Scheme:
    """Make a scheme with piece i of each KV block round Hamiltonian cycle i; in backward gradients follow."""
    gather = _rings(_cycles(world_size, "direct-kv"))
    return Scheme(
        "multi-ring", at_query, gather_kv=gather, return_kv=routes.follow(gather), placed_by_q=True,
        kv_pieces=max(1, world_size - 1), slack=GRADIENT_SLACK,
    )  # fmt: skip


def multi_ring_q(world_size: int) -> Scheme:
    """Make the scheme in which piece i of each Q block goes round Hamiltonian cycle i; partials go straight back."""
    gather = _rings(_cycles(world_size, "direct-q"))
    return Scheme("multi-ring-q", at_key, gather_q=gather, q_pieces=max(1, world_size - 1), slack=PARTIAL_SLACK)


def _cycles(world_size: int, instead: str) -> Cycles:
    found = hamiltonian(world_size)
    exist = "exist" if world_size in (4, 6) else "were found"
    refuse(found is None, f"no {world_size - 1} Hamiltonian cycles without a common link {exist}; take {instead}")
    return found or ()


def _rings(cycles: Cycles) -> Gather:
    def route(origin: Origin) -> tuple[Hop, ...]:
        if not cycles:
            return ()
        after, at, hops = cycles[origin.piece], origin.owner, []
        for step in range(origin.world_size - 1):
            hops.append(Hop(step, at, after[at]))
            at = after[at]
        return tuple(hops)

    return route
