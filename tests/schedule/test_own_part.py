"""A rank's part of a schedule: its program is that of the whole schedule, which nobody has made."""

from __future__ import annotations

import pickle
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from sampling import FULL_GRID

from tokenring.errors import ConfigurationError
from tokenring.ir.passes import sight_of
from tokenring.ir.schedule_data import PASSES, Block, Joined, Kind
from tokenring.lowering.footprint import link_bytes
from tokenring.lowering.lower import lower
from tokenring.lowering.storage import Storage
from tokenring.lowering.target import APART, Target, links
from tokenring.schedule.families.change import arranged
from tokenring.schedule.families.registry import FAMILIES, parse
from tokenring.schedule.names import DIRECTIONS, direction_of, named_schedule, schedule_in_parts
from tokenring.schedule.own_part import OwnParts
from tokenring.schedule.placed import Placed
from tokenring.schedule.routes import Origin
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import STRAIGHT, WHOLE_UNITS, Pair, Scheme, nothing_moves_yet, units
from tokenring.schedule.sides import seen_units, units_in
from tokenring.sequence.layout import Layout, make_layout
from tokenring.sequence.mask import Causal, Full, Mask
from tokenring.sequence.mask_words import mask_of
from tokenring.sequence.workload import Workload

OPTIONS = ["", "/late", "/pieces2", "/pieces4", "/keep"]
HEADS = {"packed": (12, 4), "uneven": (24, 24)}  # by which some of a family fit; the others take 8 and 8
CAUSAL: Mask = Causal()
LAID = (("zigzag", "zigzag"), ("striped", "striped"), ("contiguous", "zigzag/2"), ("striped", "zigzag"))  # q, and kv
CASES = 40 if FULL_GRID else 2  # of a family


def workload(layout: Layout, heads: tuple[int, int] = (8, 8)) -> Workload:
    return Workload(1, layout.length, layout.length, *heads, 16, torch.bfloat16)


def cases(family: str, count: int) -> list[tuple[str, Workload, Layout, Mask, list[int] | None]]:
    """Return some members of a family as they fit, on two to eight ranks, in several layouts, masks and orders."""
    random, found = Random(family), []
    for _ in range(100):
        ranks = random.randint(2, 8)
        nominal = workload(make_layout("zigzag", ranks, ranks * 64), HEADS.get(family, (8, 8)))
        names = FAMILIES[family].variants(ranks, nominal, random.choice([None, 2, 4]))
        name = random.choice(names or ["none"]) + random.choice(OPTIONS)
        length = ranks * random.choice([64, 512]) - random.choice([0, 0, 7])
        layout = make_layout(random.choice(["contiguous", "zigzag", "striped", "zigzag/2"]), ranks, length)
        if random.random() < 0.3:  # by hand: neighbouring chunks may be one rank's
            owners = random.sample(layout.owners, len(layout.owners))
            layout = Layout("by hand", ranks, layout.length, layout.chunks, tuple(owners))
        order, mask = random.choice([None, random.sample(range(ranks), ranks)]), random.choice([Full(), Causal()])
        size = workload(layout, HEADS.get(family, (8, 8)))
        try:
            made = schedule_in_parts(name, size, layout, layout, mask, order=order)
        except ConfigurationError:  # it does not fit so many ranks, tokens or heads
            continue
        if made.is_in_parts:
            found.append((name, size, layout, mask, order))
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_of_every_family(family: str) -> None:
    some = cases(family, CASES)
    assert some
    for name, size, layout, mask, order in some:
        whole = named_schedule(name, size, layout, layout, mask, order=order)
        for rank in {0, 1, layout.world_size - 1}:
            part = schedule_in_parts(name, size, layout, layout, mask, order=order)
            for direction, target in zip(PASSES, APART, strict=True):
                mine = lower(part, rank, direction, size, target)
                assert mine == lower(whole, rank, direction, size, target), (name, layout.name, mask, order, rank)
        assert {each: links(part, (each,)) for each in PASSES} == {each: links(whole, (each,)) for each in PASSES}
        assert part.moves_by_pair == whole.moves_by_pair
        assert part.is_in_parts
        assert part == whole
        assert not part.is_in_parts


def one(name: str = "usp/2", ranks: int = 8) -> tuple[Schedule, Schedule, Workload]:
    layout = make_layout("zigzag", ranks, ranks * 64)
    size = workload(layout)
    given = name, size, layout, layout, CAUSAL
    return schedule_in_parts(*given), named_schedule(*given), size


@pytest.mark.parametrize("what", ["str", "hash", "pickle", "replace", "of", "json", "verify"])
def test_the_rest_is_made_for_who_asks(what: str) -> None:
    part, whole, _ = one()
    asked = {
        "str": str,
        "hash": hash,
        "pickle": lambda each: pickle.loads(pickle.dumps(each)),
        "replace": lambda each: each.replace(name="other"),
        "of": Schedule.of,
        "json": Schedule.to_json,
        "verify": Schedule.verify,
    }[what]
    assert part.is_in_parts
    assert asked(part) == asked(whole)  # type: ignore[operator]
    assert not part.is_in_parts


def test_all_is_there_at_once() -> None:
    part, whole, size = one()
    assert repr(part) == repr(whole)
    assert lower(part, 3, "forward", size) == lower(whole, 3, "forward", size)
    part, _, _ = one()
    assert link_bytes(part, size) == link_bytes(whole, size)
    with pytest.raises(AttributeError, match="'no_such'"):
        getattr(part, "no_such")  # noqa: B009


@pytest.mark.parametrize("name", ["ring/late/pieces2", "ring"])
def test_the_whole_where_parts_are_not_known(name: str) -> None:
    """Halves of a tile in pieces may lie elsewhere than the tile, and of other masks only some rows of units go."""
    layout = make_layout("zigzag", 4, 1024)
    mask = mask_of("window(100)") if name == "ring" else CAUSAL
    assert mask is not None
    assert not schedule_in_parts(name, workload(layout), layout, layout, mask).is_in_parts


def test_the_whole_of_a_family_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its routes may go by chunk."""
    from dataclasses import replace

    monkeypatch.setitem(FAMILIES, "ring", replace(FAMILIES["ring"], source="somebody"))
    assert not one("ring")[0].is_in_parts


@pytest.mark.parametrize("target", [Target(bundle_bytes=1 << 20), Target(early_receives=False, collectives=True)])
def test_messages_that_go_together_are_found_in_the_whole(target: Target) -> None:
    part, whole, size = one("ulysses")
    mine = lower(part, 1, "forward", size, target)
    assert mine.collectives == lower(whole, 1, "forward", size, target).collectives != ()


MUTANTS: dict[str, tuple[str, type, str, Any]] = {
    "units of others lie apart": ("ulysses", OwnParts, "joined_at", lambda self, _, block: {_key(self.empty, block)}),
    "nobody passes anything on": ("ring", OwnParts, "_needed", lambda *given: _first_alone(*given)),
    "what nobody made goes home": ("reduced/2", OwnParts, "_fed", lambda self, *given: _all(*given)),
    "partials go as soon as q is there": ("tokenring", Placed, "_step", lambda self, rank, q, kv: 0),
    "nobody gets what others own": ("ulysses", OwnParts, "_reaching", lambda self, side, rank: side.owned(rank)),
}


def _key(schedule: Schedule, block: Block) -> Joined:
    return schedule.owner(block), block.heads, block.piece


def _first_alone(parts: OwnParts, side: Any, key: Any, hops: Any) -> object:
    return (each for each in NEEDED(parts, side, key, hops) if each[1].src == key[0])


def _all(side: Any, key: Any, hops: Any) -> object:
    return ((block, hop) for block in side.blocks[key] for hop in hops)


NEEDED = OwnParts._needed


@pytest.mark.parametrize("mutant", MUTANTS)
def test_other_programs_are_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, owner, method, instead = MUTANTS[mutant]
    monkeypatch.setattr(owner, method, instead)
    _, whole, size = one(name)
    ranks = range(whole.world_size)
    assert [lower(one(name)[0], rank, "forward", size) for rank in ranks] != [
        lower(whole, rank, "forward", size) for rank in ranks
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_lies_together_at_others_is_what_their_tiles_say(family: str) -> None:
    kinds: tuple[Kind, ...] = ("q", "kv")
    for name, size, layout, mask, order in cases(family, CASES):
        whole = named_schedule(name, size, layout, layout, mask, order=order)
        part = schedule_in_parts(name, size, layout, layout, mask, order=order)
        storage, parts = Storage(whole), vars(part)["_parts"]
        for block in (each for kind in kinds for each in units(whole, kind)):
            for rank in {0, 1, layout.world_size - 1}:
                told = parts.joined_at(rank, block)
                assert (told is None) == (not layout.is_even)
                slab = {_key(whole, each) for each in storage.slab(rank, block).blocks}
                assert told is None or set(told) == slab, (name, layout.name, mask, order, rank, block)


def passed_on(scheme: Scheme, ranks: int) -> set[Kind]:
    """The kinds of which some unit is passed on by another than its owner."""
    kinds: tuple[Kind, ...] = ("q", "kv")
    found, gathers = set[Kind](), (scheme.gather_q, scheme.gather_kv)
    for kind, gather in zip(kinds, gathers, strict=True):
        if any(hop.src != origin.owner for origin in origins(scheme, ranks, kind) for hop in gather(origin)):
            found.add(kind)
    return found


def origins(scheme: Scheme, ranks: int, kind: Kind) -> list[Origin]:
    """Return where the units of a kind begin."""
    pieces = scheme.q_pieces if kind == "q" else scheme.kv_pieces
    starts = product(range(ranks), range(scheme.head_groups), range(pieces))
    return [Origin(owner, ranks, heads=heads, piece=piece, pieces=pieces) for owner, heads, piece in starts]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_that_goes_straight_is_passed_on(family: str) -> None:
    for name, _, layout, _, order in cases(family, CASES):
        named, ranks = parse(name), layout.world_size
        scheme = named.make(ranks) if order is None else arranged(named.make(ranks), order)
        assert not scheme.straight & passed_on(scheme, ranks), name


def test_what_is_passed_on_is_seen() -> None:
    assert passed_on(parse("ring").make(4), 4) == {"kv"} and passed_on(parse("relay-q/2").make(4), 4) == {"q"}
    assert parse("ulysses").make(4).straight == STRAIGHT and parse("usp/2").make(4).straight == {"q"}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_schemes_say_beforehand_is_what_routes_say(family: str) -> None:
    """Whom kv never reaches, and that a step does not depend on when blocks are due."""
    for name, _, layout, _, order in cases(family, CASES):
        named, ranks = parse(name), layout.world_size
        scheme = named.make(ranks) if order is None else arranged(named.make(ranks), order)
        may_reach, when = scheme.may_reach_kv, scheme.when
        for origin in origins(scheme, ranks, "kv") if may_reach else ():
            reached = {hop.dst for hop in scheme.gather_kv(origin)} - {origin.owner}
            assert may_reach is not None and all(may_reach(origin, rank) for rank in reached), name
        for q_owner, kv_owner in product(range(ranks), repeat=2) if scheme.timed else ():
            asked = Pair(q_owner, kv_owner, 0, 0, 0, ranks)
            assert when is not None and len({when(asked, due) for due in (0, 1, ranks)}) == 1, name


def test_what_is_said_beforehand_says_something() -> None:
    found = parse("usp/4").make(8)
    assert found.may_reach_kv is not None
    reached = [[rank for rank in range(8) if found.may_reach_kv(each, rank)] for each in origins(found, 8, "kv")]
    assert reached == [[heads, heads + 4] for _ in range(8) for heads in range(4)]
    assert found.timed and parse("case-iii/2").make(8).timed and not parse("ring").make(8).timed


@pytest.mark.parametrize("name", ["ring", "tokenring", "usp/2", "double-ring/4", "ulysses"])
def test_a_direction_that_is_told_makes_the_same(name: str) -> None:
    layout = make_layout("contiguous", 8, 512)
    given = name, workload(layout), layout, layout, CAUSAL
    told = direction_of(*given)
    assert (told is None) == (name == "ulysses")
    assert schedule_in_parts(*given, direction=told) == named_schedule(*given)
    if told is not None:
        assert schedule_in_parts(*given, direction=-told) != named_schedule(*given)
    else:
        with pytest.raises(ConfigurationError, match="direction -1"):
            schedule_in_parts(*given, direction=-1)


@pytest.mark.parametrize("name", ["ring", "tokenring", "usp/2", "double-ring/3", "case-iii/3"])
@pytest.mark.parametrize("laid", ["contiguous", "zigzag"])
def test_units_of_some_owners_show_the_direction(name: str, laid: str) -> None:
    """As of very many ranks; where both directions move about as much, either is as good."""
    layout = make_layout(laid, 36, 36 * 16)
    moved = {}
    for every in (1, 5):
        ways = [OwnParts(parse(name).make(36, way), layout, layout, CAUSAL) for way in DIRECTIONS]
        moved[every] = [each.requested_tokens(every) for each in ways]
    less, more = sorted(moved[1])
    if more > 1.1 * less:
        assert moved[5].index(min(moved[5])) == moved[1].index(less)
    assert max(moved[5]) < 0.4 * more


def test_no_direction_is_told_of_what_is_made_whole() -> None:
    layout = make_layout("contiguous", 8, 512)
    assert direction_of("ring/late/pieces2", workload(layout), layout, layout, CAUSAL) is None
    mask = mask_of("window(100)")
    assert mask is not None and direction_of("ring", workload(layout), layout, layout, mask) is None


@pytest.mark.parametrize("mask", WHOLE_UNITS)
@pytest.mark.parametrize("length", [240, 233, 130])
def test_units_that_see_each_other(mask: Mask, length: int) -> None:
    """As `sight_of` finds them, unit by unit; of 130 tokens some ranks have none."""
    scheme = parse("sub-sharded/2x2x2").make(8)
    for q_name, kv_name in LAID:
        layouts = make_layout(q_name, 8, length), make_layout(kv_name, 8, length)
        empty = nothing_moves_yet(scheme, *layouts, mask)
        sees = sight_of(empty)
        found = [frozenset(units_in(bits)) for bits in seen_units(empty)]
        assert found == [sees.seen_by(unit) for unit in range(len(found))]


def test_who_asks_for_several_ranks_gets_the_whole() -> None:
    """The parts of all ranks would cost several times as much."""
    part, whole, size = one()
    assert [part.of_rank(2) is part, part.of_rank(2) is part, part.of_rank(3) is part] == [False, False, True]
    assert part.of_rank(2) is not part and part.is_in_parts
    assert part.peak_bytes(size) == whole.peak_bytes(size) and not part.is_in_parts


def test_pickled_while_another_thread_makes_the_whole() -> None:
    """Between giving it all tiles and moves and taking its parts away."""
    part, whole, _ = one()
    parts = vars(part)["_parts"]
    assert part.tiles
    vars(part)["_parts"] = parts
    assert pickle.loads(pickle.dumps(part)) == whole


@pytest.mark.parametrize("order", [[1, 0], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("make", [schedule_in_parts, named_schedule])
def test_an_order_of_other_ranks_is_refused_at_once(order: list[int], make: Any) -> None:
    layout = make_layout("zigzag", 4, 256)
    with pytest.raises(ConfigurationError, match="ranks; the layout has 4"):
        make("ulysses", workload(layout), layout, layout, CAUSAL, order=order)


@pytest.mark.parametrize("kv_layout", ["contiguous", "zigzag/3"])
def test_keys_that_lie_otherwise_than_queries(kv_layout: str) -> None:
    q_layout, kv = make_layout("zigzag", 4, 240), make_layout(kv_layout, 4, 240)
    for name in ("ring", "direct-kv", "usp/2", "tokenring/late", "reduced/2"):
        part = schedule_in_parts(name, workload(q_layout), q_layout, kv, CAUSAL)
        whole = named_schedule(name, workload(q_layout), q_layout, kv, CAUSAL)
        assert lower(part, 1, "backward", workload(q_layout)) == lower(whole, 1, "backward", workload(q_layout)), name
        assert part.is_in_parts


@pytest.mark.parametrize("family", FAMILIES)
def test_routes_of_our_families_go_by_owner(family: str) -> None:
    """Not by chunk: whatever chunks an owner has, they go together."""
    name, _, layout, *_ = cases(family, 1)[0]
    ranks = layout.world_size
    scheme = parse(name).make(ranks)
    one, other = Origin(1, ranks, chunk=1), Origin(1, ranks, chunk=2 * ranks - 2)
    for gather in (scheme.gather_q, scheme.gather_kv):
        assert gather(one) == gather(other)
    makers = {rank: rank // 2 for rank in range(ranks) if rank != 1}
    for back in (scheme.return_q, scheme.return_kv):
        assert back(one, makers) == back(other, makers)
