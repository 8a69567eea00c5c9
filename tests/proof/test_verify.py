"""verify accepts every named schedule and refuses every mutant, with step, rank and block."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable
from typing import Any

import pytest
from bases import CHUNKS_A_RANK, MASKS, NAMED, bases, make
from mutant_edits import Mutant
from mutants import KINDS
from pairwise import sample

from tokenring.errors import ConfigurationError, ScheduleError
from tokenring.ir.passes import order
from tokenring.ir.schedule_data import Block, Tile
from tokenring.proof.verify import verify
from tokenring.schedule.by_name import schedule
from tokenring.schedule.names import bidirectional, direct_kv, direct_q, make_schedule, ring, tokenring
from tokenring.schedule.scheme import Scheme, build, dense
from tokenring.sequence.layout import Layout, Positions, make_layout
from tokenring.sequence.mask import Causal, Documents, Full, Mask, SlidingWindow

FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2, 3, 4, 5, 6, 7, 8, 12),
    "named": NAMED,
    "layout": tuple(CHUNKS_A_RANK),
    "mask": MASKS,
    "pieces": (1, 2, 4),
}
BIG: dict[str, tuple[Any, ...]] = {
    "ranks": (16, 32),
    "named": NAMED,
    "pieces": (None, 4),
    "kind": (("zigzag", "full"), ("zigzag", "causal"), ("contiguous", "full"), ("striped", "causal")),
}


class TestAccepts:
    @pytest.mark.parametrize(tuple(FACTORS), sample(FACTORS, least=0))
    def test_named_schedule(self, ranks: int, named: str, layout: str, mask: str, pieces: int) -> None:
        """Any two circumstances meet somewhere."""
        pieces = max(pieces, 2) if named == "bidirectional" else pieces
        made = make(ranks, named, layout, mask, pieces)
        assert made.verify() is made

    @pytest.mark.parametrize("scheme", [ring(), ring(-1), tokenring(), bidirectional(), direct_kv(), direct_q()])
    def test_what_is_not_pruned(self, scheme: Scheme) -> None:
        """Under the full mask it is all needed; under others a dense schedule computes what is hidden."""
        whole = make_layout("zigzag", 3, 48)
        verify(order(dense(scheme, whole, whole, Full())))
        with pytest.raises(ScheduleError, match=r"which sees nothing in its tile|which the mask hides from its tile"):
            verify(order(dense(scheme, whole, whole, Documents([0, 8, 48]))))

    def test_nothing_but_padding(self) -> None:
        whole = make_layout("zigzag", 4, 64)
        made = make_schedule("ring", whole, whole, Documents([0, 0]))
        assert not made.tiles and not made.moves
        verify(made)

    @pytest.mark.parametrize(tuple(BIG), sample(BIG, least=0))
    def test_many_ranks(self, ranks: int, named: str, pieces: int | None, kind: tuple[str, str]) -> None:
        """16 ranks are replayed, too."""
        verify(make(ranks, named, *kind, pieces))

    def test_collector_is_left_as_it_was(self) -> None:
        """verify() stops it for a while."""
        made = make(2, "ring+", "zigzag", "full")
        refused = made.replace(tiles=())
        for enabled in (False, True):
            (gc.enable if enabled else gc.disable)()
            verify(made)
            assert gc.isenabled() == enabled
            with pytest.raises(ScheduleError):
                verify(refused)
            assert gc.isenabled() == enabled

    def test_leaves_nothing_to_collect(self) -> None:
        """Or all programs of a proof would be there until its end, and longer."""
        made = make(4, "direct-q", "zigzag", "full")
        verify(made)
        gc.collect()
        gc.disable()
        gc.freeze()  # what there is already, which threads of other tests may drop meanwhile, does not count
        try:
            verify(made)
            assert gc.collect() == 0
        finally:
            gc.unfreeze()
            gc.enable()


# ---------- refusals


BASES = bases()
WORD = re.compile(r"\b(?:q|kv|o|dkv)\d+(?:\.h\d+)?(?:\.p\d+)?(?:@\d+)?")


def check_refused(mutant: Mutant, base: str = "") -> None:
    made = mutant.make()
    try:
        verify(made)
    except ScheduleError as refusal:
        text = str(refusal)
    else:
        pytest.fail(f"accepted, though made of {base or made.name} with one thing wrong: {mutant}")
    parts = re.fullmatch(r"(.*?)(, forward|, backward|): step (-?\d+), rank (\d+): (.*)", text)
    assert parts, text
    assert parts[1] == made.name
    assert int(parts[3]) in mutant.steps, text
    assert int(parts[4]) in mutant.ranks, text
    assert set(WORD.findall(parts[5])) & {str(block) for block in mutant.blocks}, text
    assert re.search(mutant.says, parts[5]), text


def spread(mutants: Iterable[Mutant], most: int) -> list[Mutant]:
    """Some of them, from first to last."""
    found = list(mutants)
    return found if len(found) <= most else [found[i * (len(found) - 1) // (most - 1)] for i in range(most)]


class TestRefuses:
    @pytest.mark.parametrize("base", BASES)
    def test_not_what_they_are_made_of(self, base: str) -> None:
        verify(BASES[base])

    @pytest.mark.parametrize("kind", KINDS)
    def test_mutants_of_a_kind(self, kind: str) -> None:
        """Some of each base to which it applies, which are several schemes."""
        applies = set[str]()
        for base, made in BASES.items():
            for mutant in spread(KINDS[kind](made), 5):
                check_refused(mutant, base)
                applies.add(made.name)
        assert len(applies) >= 2

    @pytest.mark.parametrize(
        ("tile", "says"),
        [
            (Tile(0, 4, (Block("q", 0),), (Block("kv", 0),)), "step 0, rank 4: tile: 4 is not a rank of 4"),
            (Tile(-1, 0, (Block("q", 0),), (Block("kv", 0),)), "step -1, rank 0: tile: there is no step -1"),
            (Tile(0, 0, (), (Block("kv", 0),)), "step 0, rank 0: tile has no q or no kv block"),
            (Tile(0, 0, (Block("q", 8),), (Block("kv", 0),)), "step 0, rank 0: tile: there is no block q8"),
            (
                Tile(0, 0, (Block("q", 0, 1),), (Block("kv", 0),)),
                "step 0, rank 0: tile has kv0 among its kv blocks of head group 1",
            ),
        ],
    )
    def test_tile_of_wrong_form(self, tile: Tile, says: str) -> None:
        made = schedule("ring", 4).replace(tiles=(tile,), head_groups=2)
        with pytest.raises(ScheduleError, match=re.escape(f"ring: {says}")):
            verify(made)

    def test_tiles_out_of_order(self) -> None:
        made = schedule("ring", 4)
        with pytest.raises(ScheduleError, match=r"^ring: its tiles are not in order of step, rank and blocks"):
            verify(made.replace(tiles=made.tiles[::-1]))

    @pytest.mark.parametrize("change", [{"keep": frozenset({"o"})}, {"slack": -1}])
    def test_options_that_say_nothing(self, change: dict[str, object]) -> None:
        with pytest.raises(ScheduleError, match=r"^ring: keep is for q and kv, and slack is not negative$"):
            verify(schedule("ring", 4).replace(**change))

    @pytest.mark.parametrize("wrong", ["pieces", "layout", "ranks"])
    def test_units_that_are_not_all_positions(self, wrong: str) -> None:
        """Pieces that do not divide chunks, chunks that overlap, ranks that own nothing: tokens are lost."""
        whole, twice = make_layout("contiguous", 2, 8), overlapping()
        made, says = {
            "pieces": (build(ring(pieces=3), whole, whole, Full()), "3 pieces do not divide kv chunks of 4 positions"),
            "layout": (build(ring(), twice, twice, Full()), "layout 'twice': position 4 of 8 is in no chunk"),
            "ranks": (schedule("ring", 2).replace(world_size=3), "its q layout is for 2 ranks, not 3"),
        }[wrong]
        with pytest.raises(ScheduleError, match=f"^ring: {says}$"):
            verify(made)

    def test_unknown_codec(self) -> None:
        says = "ring: codec 'int3' of kv is not known; use one of bf16, fp16, mxint8, mxfp8, mxfp8-e5m2, mxfp4"
        with pytest.raises(ScheduleError, match=f"^{says}$"):
            verify(schedule("ring", 4).replace(codecs=(("q", "bf16"), ("kv", "int3"))))
        verify(schedule("ring", 4).replace(codecs=(("q", "bf16"), ("kv", "fp16"))))

    def test_two_codecs_for_one_kind(self) -> None:
        with pytest.raises(ScheduleError, match=r"^ring: it has two codecs for one kind$"):
            verify(schedule("ring", 4).replace(codecs=(("q", "bf16"), ("q", "fp16"))))

    def test_mask_that_does_not_fit_the_length(self) -> None:
        whole = make_layout("contiguous", 2, 8)
        verify(build(ring(), whole, whole, Documents([0, 5, 8])))
        with pytest.raises(ScheduleError, match=r"^ring: Documents end at 9, but the sequence has 8 positions: "):
            verify(build(ring(), whole, whole, Documents([0, 5, 9])))

    @pytest.mark.parametrize("mask", [Causal(), SlidingWindow(3, 3), Documents([0, 8])])
    def test_mask_over_two_lengths(self, mask: Mask) -> None:
        q_layout, kv_layout = make_layout("contiguous", 2, 8), make_layout("contiguous", 2, 16)
        verify(build(ring(), q_layout, kv_layout, Full()))
        verify(build(ring(), q_layout, q_layout, mask))
        says = f"ring: mask {mask} compares positions of one sequence, but there are 8 of q and 16 of kv; use Full()"
        with pytest.raises(ScheduleError, match=f"^{re.escape(says)}$"):
            verify(build(ring(), q_layout, kv_layout, mask))

    def test_layout_that_is_none_is_refused_when_it_is_made(self) -> None:
        with pytest.raises(ConfigurationError, match=r"^layout 'twice': position 4 of 8 is in no chunk$"):
            Layout("twice", 2, 8, OVERLAPPING, (0, 1))


OVERLAPPING = (Positions(0, 4), Positions(0, 4))


def overlapping() -> Layout:
    """A layout that got round its own check: verify() does not rest on it."""
    layout = make_layout("contiguous", 2, 8)
    object.__setattr__(layout, "name", "twice")
    object.__setattr__(layout, "chunks", OVERLAPPING)
    return layout
