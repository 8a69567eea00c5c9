"""Moves carry the rows that are needed, and no others: bytes, messages, texts; and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from tokenring.errors import ScheduleError
from tokenring.ir.schedule_data import PASSES, Move, Pass
from tokenring.lowering.exact_rows import JOINED_ROWS, MOST_RUNS, bounded, outside, union
from tokenring.lowering.exchanges import exchanges
from tokenring.lowering.lower import lower
from tokenring.lowering.program import Recv, Send, message_bytes
from tokenring.lowering.records import slot_bytes
from tokenring.lowering.storage import storage_of
from tokenring.proof.verify import verify
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Causal, Documents, Full, Mask, SlidingWindow
from tokenring.sequence.workload import Workload

WINDOW = SlidingWindow(64)
PACKED = Causal() & Documents([0, 100, 360, 700, 1000])
FAMILIES = ("ring", "tokenring", "bidirectional", "direct-kv", "direct-q", "mesh-kv/2x2", "mesh-q/2x2", "reduced/2",
            "double-ring/2", "relay/2", "all-gather-kv", "ulysses/2")  # fmt: skip


def made(name: str, layout: str = "contiguous", mask: Mask = WINDOW, ranks: int = 4, length: int = 1024) -> Schedule:
    whole = make_layout(layout, ranks, length)
    return make_schedule(name, whole, whole, mask)


@cache
def verified(name: str, layout: str, mask: Mask) -> Schedule:
    return made(name, layout, mask).verify()


def size(schedule: Schedule) -> Workload:
    length = schedule.q_layout.length
    return Workload(1, length, length, 8, 8, 16, torch.bfloat16)


class TestBytes:
    @pytest.mark.parametrize("window", [1, 64, 200])
    def test_a_window_moves_as_many_rows_over_a_boundary(self, window: int) -> None:
        schedule = made("direct-kv", mask=SlidingWindow(window), length=4096)
        rows: dict[tuple[int, int], int] = {}
        for move in schedule.moves_in("forward"):
            rows[move.src, move.dst] = rows.get((move.src, move.dst), 0) + schedule.moved_rows(move)
        assert rows == {(0, 1): window, (1, 2): window, (2, 3): window}
        record = 2 * 8 * 16 * 2  # k and v of 8 heads of 16 in bf16
        assert schedule.link_bytes(size(schedule)) == dict.fromkeys(rows, window * record)

    def test_documents_move_no_row_of_another(self) -> None:
        """Unit 0 ends within the document from 100 to 360; of unit 1 that one's rest is needed by nobody."""
        schedule = made("direct-kv", mask=PACKED)
        rows = {(move.block.chunk, move.dst, move.block.piece): move.rows for move in schedule.moves_in("forward")}
        assert schedule.kv_pieces == 1
        assert rows == {(0, 1, 0): ((100, 256),), (1, 2, 0): ((104, 256),), (2, 3, 0): ((188, 256),)}

    @pytest.mark.sampled(28)
    @pytest.mark.parametrize("name", FAMILIES)
    @pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "zigzag/2"])
    def test_links_carry_what_programs_send(self, name: str, layout: str) -> None:
        for mask in (WINDOW, PACKED):
            schedule = verified(name, layout, mask)
            for direction in PASSES:
                sent, received = (posted_bytes(schedule, direction, kind) for kind in (Send, Recv))
                assert sent == received == schedule.link_bytes(size(schedule), direction)

    @pytest.mark.parametrize("name", FAMILIES)
    def test_a_relay_gets_what_is_used_beyond_it(self, name: str) -> None:
        """In no family more moves than whole units; in any that has relays each hop is enough, as verify finds."""
        for mask in (WINDOW, PACKED):
            schedule = verified(name, "zigzag", mask)
            whole = schedule.replace(moves=tuple(move._replace(rows=None) for move in schedule.moves))
            assert sum(map(schedule.moved_rows, schedule.moves)) <= sum(map(whole.moved_rows, whole.moves))
            assert whole.verify()

    @pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
    def test_whole_units_go_where_they_are_needed(self, mask: Mask) -> None:
        for name in FAMILIES:
            for layout in ("contiguous", "zigzag", "striped"):
                assert not made(name, layout, mask).cuts_rows

    def test_exchanges_are_of_equal_parts(self) -> None:
        """Several messages of a pair are cut into parts of one unit each: no exchange where they carry some rows."""
        for name in FAMILIES:
            for layout in ("contiguous", "zigzag", "striped/2"):
                schedule = made(name, layout, SlidingWindow(300, 300))
                for direction in PASSES:
                    for each in exchanges(storage_of(schedule), direction):
                        pairs = {(m.src, m.dst) for m in each.messages}
                        assert all(m.whole for m in each.messages) or len(pairs) == len(each.messages)

    @pytest.mark.parametrize("padding", [40, 400])
    def test_an_exchange_stays_one_for_a_few_rows(self, padding: int) -> None:
        """Of equal parts, as collectives want them: with a little padding at the end, and not with much."""
        mask = Causal() & Documents([0, 300, 1024 - padding])
        schedule = made("ulysses", "contiguous", mask).verify()
        found = [exchanges(storage_of(schedule), direction) for direction in PASSES]
        assert schedule.cuts_rows == (padding == 400)
        assert all(found) == (padding == 40)

    def test_exchanges_of_groups_of_ranks_stay_too(self) -> None:
        """Ulysses inside groups of four: each group is an exchange of its own."""
        layout = make_layout("contiguous", 8, 512)
        padded, whole = (
            make_schedule("usp/4", layout, layout, Causal() & Documents([0, 256, end])).verify() for end in (508, 512)
        )
        for direction in PASSES:
            assert len(exchanges(storage_of(padded), direction)) == len(exchanges(storage_of(whole), direction)) > 0


def posted_bytes(schedule: Schedule, direction: Pass, kind: type[Send | Recv]) -> dict[tuple[int, int], int]:
    """What the posts of all programs carry, by link, in order of links."""
    workload = size(schedule)
    found: dict[tuple[int, int], int] = {}
    for rank in range(schedule.world_size):
        program = lower(schedule, rank, direction, workload)
        nbytes = message_bytes(slot_bytes(schedule, workload, program), program)
        for post in program.instructions:
            if isinstance(post, Recv | Send) and isinstance(post, kind):
                link = (rank, post.dst) if isinstance(post, Send) else (post.src, rank)
                found[link] = found.get(link, 0) + nbytes[post.message]
    return dict(sorted(found.items()))


class TestMessages:
    def test_runs_that_are_neighbours_at_both_ends_are_one(self) -> None:
        """Of units that lie side by side: the end of one, all of the next ones, the beginning of the last."""
        layout = make_layout("contiguous/8", 2, 1024)
        schedule = make_schedule("direct-q", layout, layout, SlidingWindow(200, 0))
        labels = [
            [post.label for post in lower(schedule, rank, "forward", size(schedule)).instructions if type(post) is Send]
            for rank in range(2)
        ]
        assert labels == [["step 1, o8@0,o9@0,o10@0,o11@0[0:8]"], ["step 0, q8,q9,q10,q11[0:8]"]]

    def test_two_runs_are_two_messages_with_names_of_their_own(self) -> None:
        """Documents that nobody else sees lie between those that its neighbours see."""
        layout = make_layout("contiguous", 3, 3 * 256)
        schedule = make_schedule("ring", layout, layout, Documents([0, 300, 400, 768]))
        labels = {
            post.label
            for rank in range(3)
            for post in lower(schedule, rank, "forward", size(schedule)).instructions
            if isinstance(post, Send)
        }
        verify(schedule)
        assert any("[0:44]" in label for label in labels) and any("[144:256]" in label for label in labels)

    def test_runs_are_few(self) -> None:
        assert bounded(((0, 4), (4 + JOINED_ROWS, 40))) == ((0, 40),)
        assert bounded(((0, 4), (5 + JOINED_ROWS, 40))) == ((0, 4), (5 + JOINED_ROWS, 40))
        many = tuple((100 * n + 10 * n * n, 100 * n + 10 * n * n + 5) for n in range(9))  # ever further apart
        few = bounded(many)
        assert len(few) == MOST_RUNS and few == bounded(few)
        assert outside(many, few) is None and few[1:] == many[-MOST_RUNS + 1 :]

    def test_union_and_what_is_outside(self) -> None:
        assert union([(5, 9), (0, 3), (3, 4), (8, 10)]) == ((0, 4), (5, 10))
        assert outside(((0, 4),), ((0, 2), (3, 9))) == (2, 3)
        assert outside(((6, 12),), ((0, 2), (3, 9))) == (9, 12)
        assert outside(((0, 2), (3, 8)), ((0, 2), (3, 9))) is None


class TestTexts:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_read_back(self, name: str) -> None:
        for layout in ("contiguous", "zigzag/2"):
            for mask in (WINDOW, PACKED):
                schedule = made(name, layout, mask)
                assert Schedule.parse(str(schedule)) == schedule
                assert Schedule.from_json(schedule.to_json()) == schedule

    def test_a_cell_names_the_rows(self) -> None:
        text = str(made("direct-kv"))
        assert "kv0[192:256]>1" in text and "dkv0[192:256]>0" in text and "# Rows: " in text
        assert "[" not in str(made("direct-kv", mask=Causal()))

    def test_documents_have_version_2_only_where_rows_are_named(self) -> None:
        assert '"version": 2' in made("direct-kv").to_json()
        assert '"rows": [[192, 256]]' in made("direct-kv").to_json()
        assert '"version": 1' in made("direct-kv", mask=Causal()).to_json()

    @pytest.mark.parametrize(
        ("rows", "says"),
        [
            ("[[192, 257]]", "257 is not between 0 and 256"),
            ("[[192, 192]]", "is not a run"),
            ("[[200, 256], [192, 199]]", "is not a run"),
            ("[[192, 256, 3]]", "is not a run"),
            ("[]", "names no row, or all of them"),
            ("[[0, 256]]", "names no row, or all of them"),
            ("7", "expected a list"),
        ],
    )
    def test_json_is_refused_where_it_is_wrong(self, rows: str, says: str) -> None:
        text = made("direct-kv").to_json().replace("[[192, 256]]", rows, 1)
        with pytest.raises(ScheduleError, match=rf"^moves\[0\]\.rows.*{re.escape(says)}"):
            Schedule.from_json(text)

    def test_json_of_version_1_has_no_rows(self) -> None:
        text = made("direct-kv").to_json().replace('"version": 2', '"version": 1')
        with pytest.raises(ScheduleError, match="unknown key"):
            Schedule.from_json(text)

    @pytest.mark.parametrize(
        ("written", "says"),
        [
            ("kv0[192:257]>1", "is not a run of 256 rows"),
            ("kv0[192]>1", "is not start:stop"),
            ("kv0[192:200+199:256]>1", "is not a run of 256 rows"),
            ("kv0[]>1", "is not start:stop"),
        ],
    )
    def test_text_is_refused_where_it_is_wrong(self, written: str, says: str) -> None:
        with pytest.raises(ScheduleError, match=rf"^line \d+, column \d+: .*{says}"):
            Schedule.parse(str(made("direct-kv")).replace("kv0[192:256]>1", written))

    def test_tiles_name_no_rows(self) -> None:
        with pytest.raises(ScheduleError, match="names no rows"):
            Schedule.parse(str(made("direct-kv")).replace("q1×kv0", "q1×kv0[192:256]"))


def with_rows(schedule: Schedule, at: int, rows: object) -> Schedule:
    move = schedule.moves[at]._replace(rows=rows)  # type: ignore[arg-type]
    return schedule.replace(moves=(*schedule.moves[:at], move, *schedule.moves[at + 1 :]))


def mutants(schedule: Schedule, move: Move) -> Iterator[tuple[object, str]]:
    """Rows that this move cannot have, and what is said of them."""
    (start, stop), *more = schedule.runs(move)
    lacks = r"without its rows \d+ to \d+|does not hold its rows \d+ to \d+"
    ill = r"its rows are .*; give runs \(start, stop\) of the \d+ rows"
    yield ((start + 1, stop), *more), lacks  # one short
    yield ((start, stop - 1), *more), lacks
    yield ((start, stop), (stop - 1, stop + 1)), ill  # one twice
    yield ((start, stop), (start, stop)), ill
    length = schedule.unit_length(move.block.kind)
    wrong = (0, start) if start else (stop, length)
    yield (wrong,), lacks
    yield ((start, length + 1),), ill
    yield (), ill


@pytest.mark.parametrize(
    "name", ["ring", "tokenring", "direct-kv", "direct-q", "mesh-kv/2x2", "mesh-q/2x2", "reduced/2"]
)
@pytest.mark.parametrize("mask", [SlidingWindow(30, 30), PACKED], ids=["window", "documents"])
def test_wrong_rows_are_refused_with_rank_step_and_block(name: str, mask: Mask) -> None:
    schedule = made(name, mask=mask, length=1024).verify()
    cut = [at for at, move in enumerate(schedule.moves) if move.rows is not None]
    assert cut
    for at in cut[:: max(1, len(cut) // 6)]:
        move = schedule.moves[at]
        for rows, says in mutants(schedule, move):
            with pytest.raises(ScheduleError, match=rf"step \d+, rank \d: .*{says}") as error:
                verify(with_rows(schedule, at, rows))
            assert str(move.block) in str(error.value)


def test_programs_are_not_given_rows_that_did_not_come() -> None:
    """The replay finds it as well, where nothing else looked."""
    from tokenring.proof.replay import replay_schedule

    schedule = made("direct-kv")
    at = next(at for at, move in enumerate(schedule.moves) if move.rows is not None and move.block.kind == "kv")
    with pytest.raises(ScheduleError, match="which hold nothing from row 192 on"):
        replay_schedule(with_rows(schedule, at, ((193, 256),)))
