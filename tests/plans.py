"""Schedules that nothing ships yet, built from placements and routes alone: what the IR must be able to say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tokenring.schedule import routes
from tokenring.schedule.build import Pair, Scheme
from tokenring.schedule.routes import Hop, Makers, Origin
from tokenring.schedule.schemes import at_key, at_query, direct_kv, direct_q

KEEP = frozenset({"q", "kv"})


def ulysses(ranks: int, keep: frozenset[str] = KEEP) -> Scheme:
    """P × 1 × 1: rank r computes head group r of everything."""
    return Scheme(
        f"ulysses-{ranks}", lambda pair: pair.heads, routes.all_to_all, routes.all_to_all,
        head_groups=ranks, keep=keep, together=True,
    )  # fmt: skip


def usp(heads: int, keep: frozenset[str] = frozenset()) -> Scheme:
    """heads × 1 × P/heads (arXiv:2405.07719): Ulysses in groups of neighbours, a KV ring over the groups."""

    def place(pair: Pair) -> int:
        return pair.q_owner // heads * heads + pair.heads

    def gather_q(origin: Origin) -> tuple[Hop, ...]:
        at = origin.owner // heads * heads + origin.heads
        return () if at == origin.owner else (Hop(0, origin.owner, at),)

    def gather_kv(origin: Origin) -> tuple[Hop, ...]:
        at = origin.owner // heads * heads + origin.heads
        ring = [(at + step * heads) % origin.world_size for step in range(origin.world_size // heads)]
        first = () if at == origin.owner else (Hop(0, origin.owner, at),)
        around = [
            Hop(step + 1, ring[step], ring[step + 1]) for step in range(len(ring) - 1) if ring[step + 1] != origin.owner
        ]
        return (*first, *around)

    return Scheme(f"usp-{heads}", place, gather_q, gather_kv, head_groups=heads, keep=keep)


def tiles(columns: int) -> Scheme:
    """1 × a × b, b = columns: rank (x, y) computes Q of all (x', y) with KV of all (x, y')."""

    def place(pair: Pair) -> int:
        return pair.kv_owner // columns * columns + pair.q_owner % columns

    return Scheme(f"tiles-{columns}", place, routes.direct, routes.direct)


def sub_sharded(heads: int, q_pieces: int, kv_pieces: int) -> Scheme:
    """u × a × b tiles of everybody's pieces, all in one hop: what indivisible heads need."""

    def place(pair: Pair) -> int:
        return (pair.heads * q_pieces + pair.q_piece) * kv_pieces + pair.kv_piece

    return Scheme(
        f"sub-sharded-{heads}-{q_pieces}-{kv_pieces}", place, routes.all_to_all, routes.all_to_all,
        head_groups=heads, q_pieces=q_pieces, kv_pieces=kv_pieces, together=True,
    )  # fmt: skip


def two_level_ring(local: int) -> Scheme:
    """LoongTrain's double ring (arXiv:2406.18485): KV rings inside each node, and from node to node."""

    def gather_kv(origin: Origin) -> tuple[Hop, ...]:
        nodes, (node, place) = origin.world_size // local, divmod(origin.owner, local)
        hops = []
        for turn in range(nodes):
            here = (node + turn) % nodes * local
            ring = [here + (place + step) % local for step in range(local)]
            if turn:
                before = (node + turn - 1) % nodes * local + place
                hops.append(Hop((turn - 1) * local, before, ring[0], turn * local))
            hops += [Hop(turn * local + step, ring[step], ring[step + 1]) for step in range(local - 1)]
        return tuple(hops)

    return Scheme(f"two-level-ring-{local}", at_query, gather_kv=gather_kv)


def reduced_in_node(local: int) -> Scheme:
    """Q goes straight to every rank; partials are added up inside the other node before they cross."""

    def return_q(origin: Origin, makers: Makers) -> tuple[Hop, ...]:
        hops = []
        for node in range(origin.world_size // local):
            relay = node * local + origin.owner % local
            inside = {rank: step for rank, step in makers.items() if rank // local == node and rank != origin.owner}
            if relay == origin.owner:
                hops += [Hop(step, rank, origin.owner) for rank, step in inside.items()]
                continue
            hops += [Hop(step, rank, relay, add=True) for rank, step in inside.items() if rank != relay]
            others = [step for rank, step in inside.items() if rank != relay]
            crosses = max([inside.get(relay, 0), *(step + 1 for step in others)])
            hops.append(Hop(crosses, relay, origin.owner))
        return tuple(hops)

    return Scheme(f"reduced-in-node-{local}", at_key, gather_q=routes.direct, return_q=return_q)


def own_nic(local: int) -> Scheme:
    """Each KV block crosses once, by its owner's own NIC, and is redistributed on the other node's mesh."""

    def gather_kv(origin: Origin) -> tuple[Hop, ...]:
        hops = []
        for node in range(origin.world_size // local):
            first = node * local + origin.owner % local
            if first != origin.owner:
                hops.append(Hop(0, origin.owner, first))
            step = 0 if first == origin.owner else 1
            hops += [Hop(step, first, rank) for rank in range(node * local, (node + 1) * local) if rank != first]
        return tuple(hops)

    return Scheme(f"own-nic-{local}", at_query, gather_kv=gather_kv)


def mixed_stationary() -> Scheme:
    """Q moves here and KV there: each pair is computed at one of its two owners, by turns."""

    def place(pair: Pair) -> int:
        return pair.q_owner if (pair.q_owner + pair.kv_owner) % 2 else pair.kv_owner

    return Scheme("mixed-stationary", place, routes.direct, routes.direct)


def direct_by_peer(kind: str, pieces: int) -> Scheme:
    """What large tiles get: a tile for each rank that a block came from."""
    return (direct_kv if kind == "kv" else direct_q)(pieces, fused=False)


def on_the_wire(scheme: Scheme, codecs: Mapping[str, str]) -> Scheme:
    """The same scheme with its requests encoded."""
    return replace(scheme, name=f"{scheme.name}-coded", codecs=tuple(codecs.items()))
