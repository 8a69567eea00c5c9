"""Two levels: nodes of neighbours that are joined better than nodes are to each other. Rank = node · local + place."""

from __future__ import annotations

from tokenring.schedule import routes
from tokenring.schedule.families.basic import GRADIENT_SLACK, at_key, at_query
from tokenring.schedule.families.family import refuse
from tokenring.schedule.families.one_hop import to
from tokenring.schedule.routes import Gather, Hop, Makers, Origin
from tokenring.schedule.scheme import Pair, Scheme


def _nodes(world_size: int, local: int, what: str = "node") -> int:
    refuse(world_size % local != 0, f"{local} ranks a {what} do not divide {world_size}")
    return world_size // local


def usp(world_size: int, heads: int) -> Scheme:
    """Make Ulysses in groups of `heads` neighbours; KV rings join the ranks that have the same heads."""
    groups = _nodes(world_size, heads, "group")

    def here(origin: Origin) -> int:
        return origin.owner // heads * heads + origin.heads

    def gather_kv(origin: Origin) -> tuple[Hop, ...]:
        ring = [(here(origin) + step * heads) % world_size for step in range(groups)]
        around = [Hop(step + 1, ring[step], ring[step + 1]) for step in range(groups - 1)]
        return (*to(ring[0], origin), *around)

    def when(pair: Pair, due: int) -> int:
        return 1 + (pair.q_owner // heads - pair.kv_owner // heads) % groups

    return Scheme(
        "usp", lambda pair: pair.q_owner // heads * heads + pair.heads, lambda origin: to(here(origin), origin),
        gather_kv, head_groups=heads, when=when, placed_by_q=True, timed=True, straight=frozenset({"q"}),
        may_reach_kv=lambda origin, rank: rank % heads == origin.heads,
    )  # fmt: skip


def double_ring(world_size: int, local: int) -> Scheme:
    """Make KV rings inside each node, and from node to node; gradients are added up in a node before they cross."""
    nodes = _nodes(world_size, local)

    def gather_kv(origin: Origin) -> tuple[Hop, ...]:
        node, place = divmod(origin.owner, local)
        hops = []
        for turn in range(nodes):
            here = (node + turn) % nodes * local
            ring = [here + (place + step) % local for step in range(local)]
            if turn:
                before = (node + turn - 1) % nodes * local + place
                hops.append(Hop((turn - 1) * local, before, ring[0], turn * local))
            hops += [Hop(turn * local + step, ring[step], ring[step + 1]) for step in range(local - 1)]
        return tuple(hops)

    return Scheme(
        "double-ring", at_query, gather_kv=gather_kv, return_kv=routes.reduce_inside(local), slack=GRADIENT_SLACK,
        placed_by_q=True,
    )


def case_iii(world_size: int, local: int, direct: bool = False) -> Scheme:
    """Make a scheme with Q round (or straight) inside a node, KV from node to node; partials straight back inside."""
    nodes = _nodes(world_size, local)

    def gather_q(origin: Origin) -> tuple[Hop, ...]:
        node, place = divmod(origin.owner, local)
        ring = [node * local + (place + step) % local for step in range(local)]
        if direct:
            return tuple(Hop(0, ring[0], ring[step], step) for step in range(1, local))
        return tuple(Hop(step, ring[step], ring[step + 1]) for step in range(local - 1))

    def gather_kv(origin: Origin) -> tuple[Hop, ...]:
        ring = [(origin.owner + turn * local) % world_size for turn in range(nodes)]
        return tuple(Hop(turn * local, ring[turn], ring[turn + 1], (turn + 1) * local) for turn in range(nodes - 1))

    def place(pair: Pair) -> int:
        return pair.q_owner // local * local + pair.kv_owner % local

    def when(pair: Pair, due: int) -> int:
        turn = (pair.q_owner // local - pair.kv_owner // local) % nodes
        return turn * local + (pair.kv_owner - pair.q_owner) % local

    return Scheme("case-iii", place, gather_q, gather_kv, when=when, timed=True)


def case_iii_direct(world_size: int, local: int) -> Scheme:
    """Make Case III with Q straight to the ranks of its node."""
    return case_iii(world_size, local, direct=True)


def reduced(world_size: int, local: int) -> Scheme:
    """Make a scheme with Q straight to every rank; partials are added up inside the other node before they cross."""
    _nodes(world_size, local)
    return Scheme("reduced", at_key, gather_q=routes.direct, return_q=_through_relays(local))


def _through_relays(local: int) -> routes.Return:
    """Make the return route by which a relay in each node, in the owner's place, adds up what its node made.

    The relay sends it across.
    """

    def route(origin: Origin, makers: Makers) -> tuple[Hop, ...]:
        hops: list[Hop] = []
        for node in range(origin.world_size // local):
            relay = node * local + origin.owner % local
            inside = {rank: step for rank, step in makers.items() if rank // local == node and rank != origin.owner}
            if relay == origin.owner:
                hops += [Hop(step, rank, origin.owner) for rank, step in inside.items()]
            elif inside:
                others = {rank: step for rank, step in inside.items() if rank != relay}
                hops += [Hop(step, rank, relay, add=True) for rank, step in others.items()]
                crosses = max([inside.get(relay, 0), *(step + 1 for step in others.values())])
                hops.append(Hop(crosses, relay, origin.owner))
        return tuple(hops)

    return route


def relay(world_size: int, local: int) -> Scheme:
    """Make a scheme in which KV crosses once to each other node, by its place's own NIC, and is passed on inside it."""
    return mesh_kv(world_size, _nodes(world_size, local), local)


def relay_q(world_size: int, local: int) -> Scheme:
    """Make a scheme like `relay` with Q; partials come back the same way, added up in the node before they cross."""
    return mesh_q(world_size, _nodes(world_size, local), local)


def mesh_kv(world_size: int, *sizes: int) -> Scheme:
    """Make a scheme with KV gathered along one mesh dimension, then the next; gradients added up on the way back."""
    gather = _mesh(world_size, sizes)
    return Scheme("mesh-kv", at_query, gather_kv=gather, return_kv=routes.reduce_back(gather), placed_by_q=True)


def mesh_q(world_size: int, *sizes: int) -> Scheme:
    """Make a scheme with Q gathered along one mesh dimension, then the next; partials added up on the way back."""
    gather = _mesh(world_size, sizes)
    return Scheme("mesh-q", at_key, gather_q=gather, return_q=routes.reduce_back(gather))


def _mesh(world_size: int, sizes: tuple[int, ...]) -> Gather:
    total = 1
    for size in sizes:
        total *= size
    refuse(total != world_size, f"{' × '.join(map(str, sizes))} is {total}, not {world_size}")
    return routes.mesh(sizes)
