"""The JSON form: exact round trips, errors that say where, and the checker of docs/schedule-json.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenring.errors import ScheduleError
from tokenring.ir import json as interchange
from tokenring.ir.json import to_json
from tokenring.ir.schedule_data import PARTIALS, REQUESTS, Block, Move, Tile
from tokenring.schedule import routes
from tokenring.schedule.by_name import schedule
from tokenring.schedule.names import SCHEMES, at_key, make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import Pair, Scheme, build
from tokenring.sequence.layout import Layout, Positions, make_layout, zigzag
from tokenring.sequence.mask import Causal, Documents, Full, Mask, SlidingWindow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedule-json.md"
LAYOUTS = ("zigzag", "contiguous", "striped")
MASKS = (
    Full(),
    Causal(),
    SlidingWindow(30, 3),
    Documents([0, 50, 60, 80]),
    Causal() & Documents([0, 5, 8]),
)


def named(name: str, ranks: int, layout: str, mask: Mask, pieces: int | None = None) -> Schedule:
    return schedule(name, ranks=ranks, layout=layout, mask=mask, pieces=pieces, length=ranks * 96)


schedules = st.builds(
    named,
    st.sampled_from(sorted(SCHEMES)),
    st.sampled_from((1, 2, 3, 4, 8)),
    st.sampled_from((*LAYOUTS, "zigzag/2", "striped/3")),
    st.sampled_from((*MASKS, Mask(low=3, high=-1))),
    st.sampled_from((None, 2, 4)),
)


def ulysses(ranks: int, layout: Layout, mask: Mask) -> Schedule:
    """Head group r of everything at rank r: several head groups, something kept, a codec."""

    def place(pair: Pair) -> int:
        return pair.heads

    scheme = Scheme(
        "ulysses", place, routes.all_to_all, routes.all_to_all, head_groups=ranks,
        keep=frozenset({"q", "kv"}), slack=1, codecs=(("kv", "bf16"), ("q", "fp16")),
    )  # fmt: skip
    return build(scheme, layout, layout, mask)


def uneven(name: str = "by hand") -> Schedule:
    """Layouts of one's own, of different lengths, and a partial that a third rank passes on."""
    q_layout = Layout("odd/even", 3, 6, (Positions(0, 4, 3), Positions(1, 6, 3), Positions(2, 6, 3)), (2, 0, 1))
    kv_layout = Layout("mine", 3, 3, (Positions(0, 1), Positions(1, 2), Positions(2, 3)), (1, 2, 0))
    return build(Scheme(name, at_key, routes.ring(1)), q_layout, kv_layout, Full())


def grouped() -> Schedule:
    """A ring whose every hop carries two head groups, which are blocks of their own."""
    layout = zigzag(3, 24)
    return build(Scheme("grouped", at_key, routes.ring(1), head_groups=2), layout, layout, Causal())


def relayed() -> Schedule:
    """Rank 0 computes for rank 2, and its partials go by way of rank 1, which makes none."""
    layout = zigzag(3, 6)
    q, kv = Block("q", 2), Block("kv", 0)
    moves = (
        Move(0, q, 2, 0, REQUESTS),
        Move(1, q.partial(0), 0, 1, PARTIALS),
        Move(2, q.partial(0), 1, 2, PARTIALS),
    )
    return Schedule("relayed", 3, layout, layout, Full(), (Tile(1, 0, (q,), (kv,)),), moves)


CUSTOM = (ulysses(4, zigzag(4, 64), Causal()), uneven(), uneven('a "name" | of: any kind'), grouped(), relayed())


class TestRoundTrip:
    @settings(max_examples=60, deadline=None)
    @given(schedules)
    def test_is_exact(self, made: Schedule) -> None:
        assert Schedule.from_json(to_json(made)) == made

    @pytest.mark.parametrize("made", CUSTOM, ids=lambda made: made.name)
    def test_of_what_no_name_makes(self, made: Schedule) -> None:
        assert Schedule.from_json(to_json(made)) == made

    def test_keeps_a_wrong_order_for_verify_to_refuse(self) -> None:
        made = schedule("ring", ranks=4)
        document = json.loads(to_json(made))
        document["moves"].reverse()
        with pytest.raises(ScheduleError, match="against the order"):
            Schedule.from_json(json.dumps(document)).verify()

    def test_text(self) -> None:
        """The very text, so that a change of the format is noticed: it needs another version."""
        assert to_json(schedule("tokenring", ranks=2, layout="contiguous", mask=Causal(), length=4)) == TEXT


TEXT = """{
  "format": "tokenring-schedule",
  "version": 1,
  "name": "tokenring",
  "world_size": 2,
  "mask": {"low": null, "high": 0, "cu_seqlens": null},
  "q_layout": {
    "name": "contiguous",
    "length": 4,
    "chunks": [
      {"start": 0, "stop": 2, "step": 1, "owner": 0},
      {"start": 2, "stop": 4, "step": 1, "owner": 1}
    ]
  },
  "kv_layout": {
    "name": "contiguous",
    "length": 4,
    "chunks": [
      {"start": 0, "stop": 2, "step": 1, "owner": 0},
      {"start": 2, "stop": 4, "step": 1, "owner": 1}
    ]
  },
  "head_groups": 1,
  "q_pieces": 1,
  "kv_pieces": 1,
  "keep": [],
  "slack": 2,
  "codecs": [],
  "tiles": [
    {"step": 0, "rank": 0, "heads": 0, "q": [{"chunk": 0, "piece": 0}], "kv": [{"chunk": 0, "piece": 0}]},
    {"step": 0, "rank": 1, "heads": 0, "q": [{"chunk": 1, "piece": 0}], "kv": [{"chunk": 1, "piece": 0}]},
    {"step": 1, "rank": 0, "heads": 0, "q": [{"chunk": 1, "piece": 0}], "kv": [{"chunk": 0, "piece": 0}]}
  ],
  "moves": [
    {"step": 0, "kind": "q", "chunk": 1, "heads": 0, "piece": 0, "src": 1, "dst": 0, "channel": "requests"}
  ],
  "returns": [
    {"step": 1, "kind": "q_partial", "chunk": 1, "heads": 0, "piece": 0, "made_at": 0, "src": 0, "dst": 1, \
"channel": "partials", "add": false}
  ]
}
"""


def document() -> Any:
    return json.loads(to_json(schedule("tokenring", ranks=8, mask=Causal())))


def put(document: Any, path: str, value: object) -> None:
    """Set document.a[3].b to a value; DROP removes it."""
    *way, last = [int(key) if key.isdigit() else key for key in re.findall(r"\w+", path)]
    for key in way:
        document = document[key]
    if value is DROP:
        del document[last]
    else:
        document[last] = value


DROP = object()
REFUSED = [
    ("moves[3].dst", 9, "moves[3].dst: 9 is not a rank of 8"),
    ("moves[3].src", -1, "moves[3].src: -1 is not a rank of 8"),
    ("moves[0].kind", "o", 'moves[0].kind: expected "q" or "kv", found "o"'),
    ("moves[0].kind", "q_partial", 'moves[0].kind: expected "q" or "kv", found "q_partial"'),
    ("moves[0].chunk", 16, "moves[0].chunk: 16 is not a q chunk of 16"),
    ("moves[0].channel", "partials", 'moves[0].channel: expected "requests", found "partials"'),
    ("moves[2]", DROP, None),  # still a document; that it proves nothing is for verify() to say
    ("moves[0].step", -1, "moves[0].step: -1 is not between 0 and 9007199254740991"),
    ("moves[0].step", True, "moves[0].step: expected an integer, found true"),
    ("moves[0].add", False, 'moves[0]: has an unknown key "add"'),
    ("moves", {}, "moves: expected a list, found an object of 0"),
    ("returns[1].made_at", 8, "returns[1].made_at: 8 is not a rank of 8"),
    ("returns[1].made_at", DROP, "returns[1]: has no key 'made_at'"),
    ("returns[1].add", 0, "returns[1].add: expected true or false, found 0"),
    ("returns[0].kind", "kv", 'returns[0].kind: expected "q_partial" or "kv_partial", found "kv"'),
    ("tiles[4].heads", 1, "tiles[4].heads: 1 is not a head group of 1"),
    ("tiles[4].kv[0].piece", 1, "tiles[4].kv[0].piece: 1 is not a kv piece of 1"),
    ("tiles[4].q", [], "tiles[4].q: a tile needs at least one q unit"),
    ("tiles[4].q[0]", 3, "tiles[4].q[0]: expected an object, found 3"),
    ("version", 3, "version: 3 is not known; this program reads versions 1 and 2"),
    ("version", "1", 'version: expected an integer, found "1"'),
    ("format", "gpx", 'format: expected "tokenring-schedule", found "gpx"'),
    ("slack", DROP, "document: has no key 'slack'"),
    ("slack", 1.5, "slack: expected an integer, found 1.5"),
    ("name", "two\nlines", 'name: expected a printable name, found "two\\nlines"'),
    ("name", "\ud800", 'name: expected a printable name, found "\\ud800"'),
    ("world_size", 0, "world_size: 0 is not between 1 and 9007199254740991"),
    ("world_size", 10**12, "q_layout.chunks: 16 chunks are too few for 1000000000000 ranks"),
    ("world_size", 10**30, f"world_size: {10**30} is not between 1 and 9007199254740991"),
    ("head_groups", 0, "head_groups: 0 is not between 1 and 9007199254740991"),
    ("q_pieces", 3, "q_pieces: 3 pieces do not divide chunks of 64 positions"),
    ("keep", ["kv", "kv"], "keep: names something twice"),
    ("keep", ["o"], 'keep[0]: expected "q" or "kv", found "o"'),
    ("codecs", [{"kind": "q", "codec": "bf16"}] * 2, "codecs: a kind stands twice"),
    ("mask.high", "0", 'mask.high: expected an integer, found "0"'),
    ("mask.cu_seqlens", [0], "mask.cu_seqlens: Documents wants [0, end of the first, ..., end of the last], integers"),
    ("mask.cu_seqlens", [0, 9, 4], "mask.cu_seqlens: Documents wants [0, end of the first, ..., end of the last], "),
    ("mask.cu_seqlens", [0, 1025], "mask.cu_seqlens[1]: 1025 is not between 0 and 1024"),
    ("q_layout.chunks[1].owner", 8, "q_layout.chunks[1].owner: 8 is not a rank of 8"),
    ("q_layout.chunks[1].owner", 0,
     "q_layout: layout 'zigzag': give each of the 8 ranks equally many chunks"),
    ("q_layout.chunks[1].stop", 64, "q_layout.chunks[1].stop: 64 is not between 65 and 9007199254740991"),
    ("q_layout.chunks[1].start", 65,
     "q_layout: layout 'zigzag': its chunks are not equal parts of 1024 positions"),
    ("kv_layout.chunks[1]", {"start": 0, "stop": 64, "step": 1, "owner": 1},
     "kv_layout: layout 'zigzag': position 64 of 1024 is in no chunk"),
    ("kv_layout.length", 10**15, "kv_layout: layout 'zigzag': its chunks are not equal parts of"),
]  # fmt: skip


def shown(value: object) -> str:
    return "dropped" if value is DROP else str(value)[:40]


class TestRefusals:
    @pytest.mark.parametrize("path, value, says", REFUSED, ids=shown)
    def test_says_where(self, path: str, value: object, says: str | None) -> None:
        changed = document()
        put(changed, path, value)
        if says is None:
            Schedule.from_json(json.dumps(changed))
            return
        with pytest.raises(ScheduleError) as refusal:
            Schedule.from_json(json.dumps(changed))
        assert str(refusal.value).startswith(says)

    @pytest.mark.parametrize(
        "text, says",
        [
            ("", "document: not JSON: Expecting value: line 1 column 1 (char 0)"),
            ("[" * 99999, "document: nested too deeply"),
            ('{"a": ' * 99999, "document: nested too deeply"),
            ("[]", "document: expected an object, found a list of 0"),
            ("null", "document: expected an object, found null"),
            ('{"format": 1, "format": 2}', 'document: the key "format" stands twice in one object'),
            ("9" * 9999, "document: not JSON: "),
            ("\ufeff{}", "document: not JSON: "),
        ],
        ids=range(8),
    )
    def test_of_no_document(self, text: str, says: str) -> None:
        with pytest.raises(ScheduleError) as refusal:
            Schedule.from_json(text)
        assert str(refusal.value).startswith(says)

    def test_of_a_layout_too_long_to_check(self) -> None:
        """Chunks that overlap and interleave: checking them position by position would take for ever."""
        changed = document()
        half = {"start": 0, "stop": 2**49, "step": 1, "owner": 0}
        huge = {"name": "mine", "length": 2**50, "chunks": [half, half]}
        changed |= {"world_size": 1, "tiles": [], "moves": [], "returns": [], "q_layout": huge, "kv_layout": huge}
        with pytest.raises(ScheduleError, match=r"q_layout: layout 'mine' is not one of tokenring's; .* too many"):
            Schedule.from_json(json.dumps(changed))
        huge["chunks"] = [half, {"start": 2**49, "stop": 2**50, "step": 1, "owner": 0}]
        assert Schedule.from_json(json.dumps(changed)).q_layout.length == 2**50

    @pytest.mark.parametrize("length", [2**53, 2**64, 10**400])
    def test_of_lengths_that_no_reader_holds(self, length: int) -> None:
        changed = document()
        changed["kv_layout"]["length"] = length
        with pytest.raises(ScheduleError, match=r"^kv_layout\.length: [0-9.]+ is not between 1 and 9007199254740991$"):
            Schedule.from_json(json.dumps(changed))

    def test_of_a_name_that_asks_for_too_much(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The name alone must not make us cut a sequence into more chunks than the document lists."""
        monkeypatch.setattr(interchange, "make_layout", None)
        changed = document()
        for layout in (changed["q_layout"], changed["kv_layout"]):
            layout["name"] = "zigzag/4"
        made = Schedule.from_json(json.dumps(changed))
        assert made.q_layout.name == "zigzag/4"  # a name like any other
        assert Schedule.parse(str(made)) == made

    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=4,
    )

    @settings(max_examples=80, deadline=None)
    @given(st.data(), values)
    def test_whatever_the_document_is(self, data: st.DataObject, value: object) -> None:
        """A random part of a good document, replaced by anything: read, or refused in our own words."""
        whole = json.loads(TEXT)
        part = whole
        while True:
            key = data.draw(st.sampled_from(sorted(part) if isinstance(part, dict) else range(len(part))))
            if not isinstance(part[key], dict | list) or not part[key] or data.draw(st.booleans()):
                break
            part = part[key]
        part[key] = value
        self.reads_or_refuses(json.dumps(whole))

    @settings(max_examples=100, deadline=None)
    @given(st.text() | st.builds(lambda at: TEXT[:at] + TEXT[at + 1 :], st.integers(0, len(TEXT))))
    def test_whatever_the_text_is(self, text: str) -> None:
        self.reads_or_refuses(text)

    def reads_or_refuses(self, text: str) -> None:
        try:
            made = Schedule.from_json(text)
        except ScheduleError:
            return
        assert Schedule.from_json(to_json(made)) == made


class TestWhatCannotBeWritten:
    made = schedule("tokenring", ranks=2)

    def test_tile_of_two_head_groups(self) -> None:
        tile = self.made.tiles[0]._replace(kv=(Block("kv", 0, heads=1),))
        with pytest.raises(ScheduleError, match="tokenring: step 0, rank 0: cannot be written"):
            to_json(self.made.replace(tiles=(tile,)))

    @pytest.mark.parametrize("kind, says", [("q", "not a request"), ("q_partial", "made nowhere")])
    def test_move(self, kind: str, says: str) -> None:
        move = next(move for move in self.made.moves if move.block.kind == kind)
        odd = move._replace(add=True, block=move.block._replace(made_at=None))
        with pytest.raises(ScheduleError, match=says):
            to_json(self.made.replace(moves=(odd,)))


@pytest.fixture(scope="module")
def check() -> Callable[[str], None]:
    """The checker that stands on the page, made from nothing but its text."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert "tokenring" not in re.sub('"tokenring-schedule"', "", code)
    space: dict[str, Any] = {"__name__": "checker"}
    exec(compile(code, str(PAGE), "exec"), space)
    found: Callable[[str], None] = space["check"]
    return found


Edit = Callable[[Any], object]


class TestCheckerOfThePage:
    @pytest.mark.parametrize("name", SCHEMES)
    @pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
    def test_accepts_every_named_schedule(self, check: Callable[[str], None], name: str, ranks: int) -> None:
        for layout in LAYOUTS:
            for mask in MASKS:
                check(to_json(named(name, ranks, layout, mask)))

    def test_accepts_pieces_head_groups_and_other_layouts(self, check: Callable[[str], None]) -> None:
        check(to_json(schedule("bidirectional", ranks=4, mask=Causal(), pieces=4)))
        check(to_json(ulysses(4, zigzag(4, 64), Causal()).verify()))
        check(to_json(uneven().verify()))

    @pytest.mark.parametrize("length", [1, 9, 13, 30])
    def test_accepts_any_length(self, check: Callable[[str], None], length: int) -> None:
        for name in SCHEMES:
            for layout in LAYOUTS:
                whole = make_layout(layout, 3, length)
                if whole.takes_pieces(2 if name == "bidirectional" else 1):
                    check(to_json(make_schedule(name, whole, whole, SlidingWindow(5))))

    MUTANTS: tuple[tuple[str, Edit, str], ...] = (
        ("tokenring", lambda doc: doc["returns"].pop(), "forward: partials never come home"),
        ("tokenring", lambda doc: doc["tiles"].pop(), "forward, step 3: rank 3 has no partial"),
        ("tokenring", lambda doc: doc["moves"].pop(0), "forward, step 1: rank 3 does not hold ('q', 7, 0, 0)"),
        ("tokenring", lambda doc: doc["moves"][-1].update(step=1), "does not hold ('q'"),
        ("ring", lambda doc: doc["tiles"].append(doc["tiles"][-1]), "forward: not computed exactly once, for q"),
        ("ring", lambda doc: doc["returns"].pop(), "backward: partials never come home"),
        ("ring", lambda doc: doc["returns"][0].update(add=False), "backward: partials never come home"),
        ("ring", lambda doc: doc["mask"].update(high=1), "forward: not computed exactly once"),
        ("direct-q", lambda doc: doc.update(head_groups=2), "forward: not computed exactly once"),
        ("direct-kv", lambda doc: doc.update(version=3), "not a schedule of version 1 or 2"),
    )

    @pytest.mark.parametrize("name, edit, says", MUTANTS)
    def test_refuses_mutants(self, check: Callable[[str], None], name: str, edit: Edit, says: str) -> None:
        changed = json.loads(to_json(schedule(name, ranks=4, mask=Causal())))
        check(json.dumps(changed))
        edit(changed)
        with pytest.raises(ValueError, match=re.escape(says)):
            check(json.dumps(changed))

    def test_kept_blocks_need_not_move_again(self, check: Callable[[str], None]) -> None:
        """Backward holds what forward gathered only where the document says so."""
        kept = json.loads(to_json(schedule("direct-kv", ranks=2).replace(keep=frozenset({"kv"}))))
        check(json.dumps(kept))
        kept["moves"].pop()
        with pytest.raises(ValueError, match="does not hold"):
            check(json.dumps(kept))
