"""Sequences of any length: exact on any number of ranks, some of them without a token; no padding is sent."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from cases import LIMITS, NAMES
from lengths import AnyLength, Made, check_sent, run_any_length
from oracle import cached64, error_of_terms
from ranks import Here, RankPools
from sampling import FULL_GRID

import tokenring as tr
from tokenring.cli.main import main as cli
from tokenring.errors import ConfigurationError
from tokenring.lowering.target import Target
from tokenring.planner.bounds.mask_density import is_even
from tokenring.proof.replay import replay_schedule
from tokenring.schedule.families import variants
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import Layout, Positions, make_layout, split_order
from tokenring.sequence.workload import Workload

LAYOUTS = ("contiguous", "zigzag", "striped", "zigzag/2")
SCHEDULES = (
    "ring", "tokenring", "direct-kv", "direct-q", "ulysses", "bidirectional", "ring/keep", "auto:ring,tokenring"
)
MASKS = ("full", "causal", "window", "documents")
OTHER_TARGETS = (Target(early_receives=False, collectives=True), Target(bundle_bytes=1 << 20, ahead_bytes=1 << 20))


def lengths_of(ranks: int) -> range:
    """Every residue of the chunks of every layout, and fewer tokens than ranks."""
    return range(1, 8 * ranks + 8)


def every_case() -> Iterator[AnyLength]:
    seed = random.Random(7)
    for ranks in (1, 2, 3, 4):
        for length, layout in product(lengths_of(ranks), LAYOUTS):
            name, mask, over = seed.choice(SCHEDULES), seed.choice(MASKS), seed.choice(("gloo", "shm"))
            kv_length = seed.choice(lengths_of(ranks)) if mask == "full" else length
            case = AnyLength(ranks, layout, name, length, kv_length, mask, over)
            if name != "bidirectional" or all(of.takes_pieces(2) for of in case.layouts()):
                yield case


CASES = list(every_case())
SAMPLE = CASES if FULL_GRID else random.Random(1).sample(CASES, 32)


def check_exact(case: AnyLength, made: Made) -> None:
    """Results within the limits of fp32.

    Queries that see one key have gradients of zero, the difference of two terms as large as dout: the error is one of
    these terms' size.
    """
    terms = float(case.inputs()[3].norm())
    for name, got, want in zip(NAMES, made.results, case.reference(), strict=True):
        empty = want == -torch.inf
        assert torch.equal(got == -torch.inf, empty), name
        got, want = got.double().masked_fill(empty, 0), want.masked_fill(empty, 0)
        size = max(float(want.norm()), 1.0) if want.any() else terms
        assert float((got - want).norm()) <= LIMITS[name] * size, name


@pytest.mark.sampled(20)
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_exact_and_nothing_is_padded(case: AnyLength, ranks: RankPools) -> None:
    made = ranks(case.ranks)(run_any_length, case)
    for each in made:
        check_exact(case, each)
    assert [each.parts for each in made] == list(zip(*(of.local_lengths for of in case.layouts()), strict=True))
    if "auto" not in case.schedule and case.ranks > 1:
        check_sent(case, made)


def test_bytes_are_those_of_the_tokens(ranks: RankPools) -> None:
    """Of 9 tokens in 4 parts of 3, 3, 3 and 0: three ranks send their k and v, and the last one nothing."""
    case = AnyLength(4, "contiguous", "direct-kv", 9, 9, "full")
    made = ranks(4)(run_any_length, case)
    token = 2 * 12 * 8 * 4  # k and v of 12 heads of 8 in fp32
    sent = [made[rank].sent["forward"] for rank in range(4)]
    assert sent == [{dst: 3 * token for dst in range(3) if dst != rank} for rank in range(3)] + [{}]


# ---------- proofs, of all families


def proved(seed: int) -> Schedule | None:
    """A schedule of some family, layout and mask, and lengths that need not divide; None if it does not fit."""
    draw = random.Random(seed)
    ranks = draw.randint(1, 6)
    length = draw.choice(lengths_of(ranks))
    kv_length = draw.choice(lengths_of(ranks)) if draw.random() < 0.3 else length
    masks = (tr.Full(), tr.Causal(), tr.SlidingWindow(draw.randint(0, 9), draw.randint(0, 5)),
             tr.Causal() & tr.Documents([0, length // 3, length // 2, length]))  # fmt: skip
    mask = draw.choice(masks) if length == kv_length else tr.Full()
    size = Workload(1, length, kv_length, 8, 4, 16)
    names = {name for local in range(1, ranks + 1) if ranks % local == 0 for name in variants(ranks, size, local)}
    name = draw.choice(sorted(names)) + draw.choice(("", "", "/late", "/keep", "/pieces2", "/pieces3"))
    layouts = [make_layout(draw.choice((*LAYOUTS, "striped/3")), ranks, n) for n in (length, kv_length)]
    try:
        return make_schedule(name, layouts[0], layouts[1], mask).verify()
    except ConfigurationError as error:
        assert "do not divide chunks" in str(error) or "use a multiple of" in str(error)
        return None


@pytest.mark.sampled(21)
@pytest.mark.parametrize("seed", range(1200 if FULL_GRID else 40))
def test_every_family_is_proved(seed: int) -> None:
    schedule = proved(seed)
    if schedule is None:
        return
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.from_json(schedule.to_json()) == schedule
    replay_schedule(schedule, OTHER_TARGETS)
    rows = {unit: len(schedule.positions(unit)) for move in schedule.moves for unit in (move.block,)}
    assert all(rows.values())  # nothing moves of what is not there


# ---------- how ranks know


def count_of_talks(here: Here, turns: list[tuple[int, bool]]) -> list[tuple[int, bool]]:
    """How often the ranks told each other more than digests in each of these calls, and whether the call was right."""
    transport = here.transport("shm")
    assert transport is not None
    cp = here.cp(layout="contiguous", schedule="ring", transport=transport)
    talks: list[str] = []
    plain = transport.exchange_text

    def talk(text: bytes, what: str) -> list[bytes]:
        talks.append(what)
        return plain(text, what)

    counted = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transport, "exchange_text", talk)
        for length, shards in turns:
            x = torch.randn(1, length, 2, 16, generator=torch.Generator().manual_seed(length))
            own = make_layout("contiguous", here.world_size, length).positions(here.rank)
            part = tr.shard(x, cp) if shards else x[:, own]
            out = tr.attention(part, part, part, cp, tr.Causal())
            want, terms = (cached64(x, x, v, torch.arange(length))[0][:, own] for v in (x, x.abs()))
            counted.append((len(talks), error_of_terms(out, want, terms) <= LIMITS["out"]))
            talks.clear()
    return counted


def test_ranks_talk_only_where_no_part_says_the_length(ranks: RankPools) -> None:
    """Lengths 9 and 12 on 4 ranks: three ranks have 3 tokens of both. 8 and 12 divide."""
    by_hand = [(9, False), (9, False), (12, False), (12, False), (8, False)]
    turns = [(8, False), (12, False), (9, True), (12, True), *by_hand]
    found = ranks(4)(count_of_talks, turns)
    assert [right for counts in found for _, right in counts] == [True] * 4 * len(turns)
    # As it shards them they know; by hand they take the length that they had last, and tell each other once.
    assert all([talks for talks, _ in counts] == [0, 0, 0, 0, 1, 0, 1, 0, 0] for counts in found)


def by_hand_in_backward(here: Here, compiled: bool) -> list[float]:
    """The gradient of q, where only the parts say the length, and a call of another length comes before backward."""
    cp = here.cp(layout="zigzag", schedule="tokenring")

    def call(x: torch.Tensor) -> torch.Tensor:
        return tr.attention(x, x, x, cp, tr.Causal())

    made: Any = torch.compile(call, backend="eager", fullgraph=True, dynamic=False) if compiled else call
    outs, parts = [], []
    for length in (13, 11):
        x = torch.randn(1, length, 2, 16, generator=torch.Generator().manual_seed(length))
        parts.append(x[:, make_layout("zigzag", here.world_size, length).positions(here.rank)].clone().requires_grad_())
        outs.append(made(parts[-1]).square().sum())
    grads = [torch.autograd.grad(out, part)[0] for out, part in zip(outs, parts, strict=True)]
    return [float(grad.double().square().sum()) for grad in grads]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_backward_is_of_the_length_of_its_forward(compiled: bool, ranks: RankPools) -> None:
    found = torch.tensor(ranks(2)(by_hand_in_backward, compiled)).sum(0)
    for length, got in zip((13, 11), found, strict=True):
        x = torch.randn(1, length, 2, 16, generator=torch.Generator().manual_seed(length)).requires_grad_()
        out = tr.attention(x, x, x, tr.ContextParallel("self"), tr.Causal()).square().sum()
        (grad,) = torch.autograd.grad(out, x)
        assert float(got) == pytest.approx(float(grad.double().square().sum()), rel=1e-5)


def refused(here: Here, what: str) -> tuple[str, bool]:
    """What is said of parts that go together in no way; and whether the ranks then go on."""
    cp = here.cp(layout="contiguous", schedule="ring")
    of = {"no parts": (3, 3, 4), "nothing": (0, 0, 0), "one mask": (3, 3, 3)}
    tokens = of.get(what, (3, 3, 2))[here.rank]
    x = torch.ones(1, tokens, 2, 16)
    kv = torch.ones(1, 3, 2, 16) if what == "kv" else x
    mask = tr.Causal() if what == "other masks" and here.rank == 1 else tr.Full()
    mask = tr.Documents([0, 5, 8]) if what == "kv" else mask
    mask = tr.Documents([0, 10]) if what == "one mask" and here.rank == 1 else mask
    said = ""
    try:
        tr.attention(x, kv, kv, cp, mask)
    except tr.TokenRingError as error:
        said = f"{type(error).__name__}: {error}"
    two = torch.ones(1, 2, 2, 16)
    again = tr.attention(two, two, two, cp)
    return said, bool((again == 1).all())


@pytest.mark.parametrize(
    ("what", "each"),
    [
        ("no parts", "tokens of q, but it holds|of 10|q_length: rank"),
        ("nothing", "holds no token of q"),
        ("other masks", "the ranks disagree.*mask"),
        ("one mask", "ConfigurationError: Documents end at 10|Disagreement: rank 1 refused: Documents end at 10"),
        ("kv", "numbers one sequence, but q has 8 positions and kv 9: only Full takes both"),
    ],
)
def test_parts_that_do_not_go_together_are_refused_on_all_ranks(what: str, each: str, ranks: RankPools) -> None:
    for said, goes_on in ranks(3)(refused, what):
        assert re.search(each, said) and goes_on, said


# ---------- shards


def sharded(here: Here, length: int) -> tuple[bool, bool, list[float]]:
    cp = here.cp(layout="zigzag")
    whole = torch.arange(2.0 * length).view(length, 2).requires_grad_()
    part = tr.shard(whole, cp, dim=0)
    same = torch.equal(part[:, 0].detach() / 2, tr.positions(cp, length).float())
    back = tr.unshard(part, cp, dim=0)
    (grad,) = torch.autograd.grad((back * torch.arange(1.0, length + 1)[:, None]).sum(), whole)
    return same, torch.equal(back, whole), grad[:, 0].tolist()


@pytest.mark.parametrize("length", [1, 2, 7, 8, 13])
def test_shards_are_put_together_again(length: int, ranks: RankPools) -> None:
    found = ranks(3)(sharded, length)
    assert all(same and back for same, back, _ in found)
    grads = torch.tensor([grad for _, _, grad in found]).sum(0)  # each counts the loss of all three
    assert grads.tolist() == [3.0 * (at + 1) for at in range(length)]


def test_one_host_stands_for_others_where_parts_are_about_equal() -> None:
    for length, even in ((8, True), (1001, True), (9, False), (1, False)):
        layout = make_layout("contiguous", 4, length)
        assert is_even(tr.Full(), layout, layout) == even


@pytest.mark.parametrize("topology", ["a10-pix-4", pytest.param("a10-pix-4*16", marks=pytest.mark.slow)])
def test_plans_for_any_length(topology: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where one host of many is simulated."""
    call = ["--seq", "100001", "--heads", "8", "--pass", "forward"]
    assert cli(["plan", "--topology", f"preset:{topology}", *call]) == 0
    assert "100,001 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("name", (*LAYOUTS, "striped/3", "contiguous/2"))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_layouts_of_any_length(name: str, ranks: int) -> None:
    for length in lengths_of(ranks):
        layout = make_layout(name, ranks, length)
        assert sorted(split_order(layout)) == list(range(length))
        assert [len(layout.positions(rank)) for rank in range(ranks)] == list(layout.local_lengths)
        assert layout.is_even == (len({len(chunk) for chunk in layout.chunks}) == 1)
        for rank in range(ranks):  # a chunk lies where it would if all were whole: what is missing is at the end
            for chunk in layout.owned_by(rank):
                at = layout.local_start[chunk]
                assert layout.positions(rank)[at : at + len(layout.chunks[chunk])] == [*range(*layout.chunks[chunk])]


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        ((Positions(0, 3), Positions(3, 8)), "its chunks are not equal parts of 8 positions"),
        ((Positions(0, 4), Positions(4, 4)), "a chunk is Positions(start=4, stop=4"),
        ((Positions(0, 5), Positions(5, 7)), "its chunks are not equal parts of 8 positions"),
        ((Positions(0, 5), Positions(6, 9)), "position 5 of 8 is in no chunk"),
    ],
)
def test_chunks_are_cut_at_the_end_alone(chunks: tuple[Positions, ...], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Layout("mine", 2, 8, chunks, (0, 1))
    assert says in str(caught.value)


def test_a_rank_has_one_chunk_that_is_cut() -> None:
    """Else the rows of the next would not lie where they would if all were whole."""
    chunks = (Positions(0, 3), Positions(3, 6), Positions(6, 9), Positions(9, 12), Positions(12, 16, 2),
              Positions(13, 16, 2))  # fmt: skip
    with pytest.raises(ConfigurationError, match="rank 1 has two chunks that the end of the sequence cuts"):
        Layout("mine", 2, 16, chunks, (0, 0, 1, 0, 1, 1))
    assert Layout("mine", 2, 16, chunks, (0, 1, 1, 0, 1, 0)).local_lengths == (8, 8)


def test_a_layout_of_ones_own_is_cut_at_the_end() -> None:
    mine = Layout("mine", 2, 8, (Positions(0, 5), Positions(5, 8)), (1, 0))
    assert mine.local_lengths == (3, 5) and not mine.is_even and mine.positions(0) == [5, 6, 7]
    schedule = make_schedule("ring", mine, mine, tr.Causal()).verify()
    assert Schedule.from_json(schedule.to_json()) == schedule and '"version": 2' in schedule.to_json()
    assert Schedule.parse(str(schedule)) == schedule
