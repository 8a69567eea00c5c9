"""What a trace shows of a made-up call: the table, the JSON, the Chrome trace and the picture, to the letter.

After a change that is meant, `python tests/cli/test_trace_report.py` writes tests/data/trace.* anew; look at them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tokenring.cli.bench.results import RaceCase, RaceMachine
from tokenring.cli.trace.chrome import to_chrome
from tokenring.cli.trace.picture import simulation_of, timeline_of, to_svg
from tokenring.cli.trace.record import Bar, Simulated, Stretch, Traced, TracedMessage
from tokenring.cli.trace.table import spent, table, to_json
from tokenring.display.console import Ink
from tokenring.ir.schedule_data import PASSES

DATA = Path(__file__).resolve().parents[1] / "data"
CASE = RaceCase(
    seq_len=64, heads=4, kv_heads=2, head_dim=16, dtype="float32", mask="causal", batch=1, backward=True,
    layout="zigzag", transport="auto", pieces=None, schedules=["ring"], peers=[], rounds=3,
)  # fmt: skip
MACHINE = RaceMachine("A <Processor> & more", 1, 1, 2, "2.13.0+cpu")


def bars(rank: int, direction: str, start: float) -> list[Bar]:
    """Two steps of a pass: a post, a tile; a wait, a tile with its merge."""
    late = 0.002 * rank
    at = [start + late + each for each in (0.0001, 0.0002, 0.0102, 0.0142, 0.0242, 0.0252)]
    tile = f"q{rank},{3 - rank}×kv{rank}"
    to = 1 - rank
    found: list[tuple[str, str, str, int, str, dict[str, int | str]]] = [
        ("post", f"post the send of kv{rank} to rank {to}", "", 0, f"send kv{rank} to {to}", {"bytes": 8192}),
        ("compute", f"attention of {tile}, 32 × 32 tokens, causal", tile, 0, f"attend {tile}", {"rows": 32}),
        ("wait", f"wait for kv{to} from rank {to}", "", 1, f"wait kv{to} from {to}", {}),
        ("compute", "attention of a <tile>", "t", 1, "attend t", {"rows": 16}),
        ("merge", "write or merge the result", "", 1, "merge result", {"rows": 16}),
    ]  # fmt: skip
    return [
        Bar(rank, direction, kind, label, short, at[number], at[number + 1], step, name, details)
        for number, (kind, label, short, step, name, details) in enumerate(found)
    ]


STARTS = {"forward": 0.0, "backward": 0.04}
BARS = [bar for rank in range(2) for direction in PASSES for bar in bars(rank, direction, STARTS[direction])]
STRETCHES = [
    Stretch(rank, direction, STARTS[direction] + 0.002 * rank, STARTS[direction] + 0.002 * rank + 0.03)
    for rank in range(2)
    for direction in PASSES
]
MESSAGES = [
    TracedMessage(src, 1 - src, f"step 0, kv{src}", start + 0.002 * src + 0.0001, start + 0.002 * (1 - src) + 0.0142,
            start + 0.002 * (1 - src) + 0.0102, direction, {"channel": "requests", "bytes": 8192})
    for src in range(2)
    for direction, start in STARTS.items()
]  # fmt: skip
MEASURED = Traced(CASE, MACHINE, "ring", [0.08, 0.072, 0.071], 1, True, STRETCHES, BARS, MESSAGES)


def simulated() -> Simulated:
    """The same a fifth faster, without the waits."""
    share = 0.8
    stretches = [replace(each, began=share * each.began, ended=share * each.ended) for each in STRETCHES]
    bars = [replace(each, began=share * each.began, ended=share * each.ended) for each in BARS if each.kind != "wait"]
    messages = [
        replace(each, sent=share * each.sent, waited=share * each.sent, received=share * each.received)
        for each in MESSAGES
    ]
    return Simulated("2 ranks <of one machine>; one core of a processor", stretches, bars, messages)


TRACED = replace(MEASURED, simulated=simulated())


def shown() -> dict[str, str]:
    return {
        "trace.txt": table(TRACED, Ink()),
        "trace.json": to_json(TRACED),
        "trace.chrome.json": to_chrome(TRACED),
        "trace.svg": to_svg(timeline_of(TRACED), simulation_of(TRACED)),
    }


@pytest.mark.parametrize("name", ["trace.txt", "trace.json", "trace.chrome.json", "trace.svg"])
def test_golden(name: str) -> None:
    assert shown()[name] == (DATA / name).read_text(encoding="utf-8")


def test_goes_from_process_to_process() -> None:
    for each in (TRACED, MEASURED):
        assert Traced.from_json(each.to_json()) == each


def test_parts_add_up_to_the_passes() -> None:
    sums: dict[tuple[int, str], float] = defaultdict(float)
    for each in spent(TRACED):
        sums[each.rank, each.direction] += each.total
        assert all(seconds >= -1e-9 for seconds in each.seconds.values())
    for stretch in STRETCHES:
        assert sums[stretch.rank, stretch.direction] == pytest.approx(stretch.ended - stretch.began)


def test_what_is_the_executors_own() -> None:
    """All but the kernel calls and the wait: 0.1 ms of post, 1 ms of merge, and 4.9 ms outside of instructions."""
    own = sum(each.own for each in spent(TRACED) if (each.rank, each.direction) == (0, "forward"))
    assert own == pytest.approx(0.0001 + 0.001 + 0.0049)


def test_chrome_trace() -> None:
    """Lanes hold no two things at once, every flight and arrow has both ends, and time is in microseconds."""
    events = json.loads(to_chrome(TRACED))["traceEvents"]
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["cat"] not in ("pass", "step"):
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        spans.sort()
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(spans))
    for begins, ends in (("b", "e"), ("s", "f")):
        first = {event["id"]: event["ts"] for event in events if event["ph"] == begins}
        last = {event["id"]: event["ts"] for event in events if event["ph"] == ends}
        assert first.keys() == last.keys() and len(first) == 2 * len(MESSAGES)  # measured, and simulated
        assert all(first[each] <= last[each] for each in first)
    tiles = [event for event in events if event["ph"] == "X" and event["cat"] == "compute"]
    assert max(event["dur"] for event in tiles) == pytest.approx(10_000)


def tips_of(svg: str) -> list[str | None]:
    return [each.text for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]


def test_picture_holds_every_bar_and_message() -> None:
    assert simulation_of(MEASURED) is None
    alone, both = (tips_of(to_svg(timeline_of(TRACED), beside)) for beside in (None, simulation_of(TRACED)))
    expected = simulated()
    assert len(alone) == 1 + len(BARS) + len(MESSAGES)
    assert len(both) == len(alone) + len(expected.bars) + len(expected.messages)
    assert "forward, rank 0: attention of a <tile>, 10.000 ms" in alone
    assert "forward, rank 0: attention of a <tile>, 8.000 ms" in both[len(alone) :]


def test_the_simulation_has_ranks_of_its_own_in_the_chrome_trace() -> None:
    events = json.loads(to_chrome(TRACED))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 0, simulated", 3: "rank 1, simulated"}
    plain = json.loads(to_chrome(MEASURED))["traceEvents"]
    assert [event for event in events if event["pid"] < 2] == plain
    tiles = [(event["pid"], event["dur"]) for event in events if event["ph"] == "X" and event["cat"] == "compute"]
    longest = [max(took for pid, took in tiles if (pid < 2) is measured) for measured in (True, False)]
    assert longest == [pytest.approx(10_000), pytest.approx(8_000)]


def test_clocks_of_several_machines() -> None:
    assert "clocks set by the barrier" in table(replace(TRACED, one_clock=False), Ink())


if __name__ == "__main__":
    for name, text in shown().items():
        (DATA / name).write_text(text, encoding="utf-8")
