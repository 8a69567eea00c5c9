"""What a benchmark shows of made-up samples: the table, the JSON and the picture, to the letter.

After a change that is meant, `python tests/cli/test_bench_report.py` writes tests/data/bench.* anew; look at them.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tokenring.cli.bench.picture import to_svg
from tokenring.cli.bench.results import (
    FAILED,
    MISSING,
    ONE,
    OURS,
    PEER,
    SKIPPED,
    WRONG,
    Entry,
    RaceCase,
    RaceMachine,
    RaceReport,
)
from tokenring.cli.bench.table import bytes_text, case_text, ms, table
from tokenring.display.console import Ink

DATA = Path(__file__).resolve().parents[1] / "data"
CASE = RaceCase(
    seq_len=4096, heads=8, kv_heads=4, head_dim=64, dtype="float32", mask="causal", batch=2, backward=True,
    layout="zigzag", transport="auto", pieces=None, schedules=["tokenring", "ring"], peers=["torch", "yunchang"],
    rounds=5,
)  # fmt: skip
MACHINE = RaceMachine("A <Processor> & more", 2, 1, 2, "2.13.0+cpu")
ERRORS = {"out": 2.1e-7, "dq": 3.2e-7, "dk": 4.3e-7, "dv": 1.1e-7}


def entry(name: str, kind: str, what: str, *call_ms: float, **more: object) -> Entry:
    seconds = [each / 1e3 for each in call_ms]
    values = {"version": "1.2+cpu", "status": "measured", "errors": ERRORS} | more
    return Entry(name, kind, what, forward_s=[each / 4 for each in seconds], call_s=seconds, **values)  # type: ignore[arg-type]


REASON = "the relative error of dq is 1.7e-03; the limit is 1e-04"
ENTRIES = [
    entry("tokenring", OURS, "schedule, zigzag", 255.0, 250.0, 260.5, 251.0, 300.0, link_bytes=16_908_288),
    entry("ring", OURS, "schedule, zigzag", 1260.0, 1255.0, 1270.0, 1250.0, 1290.0, link_bytes=20_971_520),
    entry("one process", ONE, "torch's kernel, 2 threads", 240.0, 245.0, 243.0, 241.0, 250.0),
    entry("torch ring alltoall", PEER, "peer, zigzag", 270.0, 266.0, 280.0, 268.0, 290.0),
    entry("torch ring allgather", PEER, "peer, zigzag", 9.0, 9.5, 9.25, 9.75, 9.1, status=WRONG, reason=REASON,
          errors=ERRORS | {"dq": 1.7e-3}),
    Entry("yunchang", PEER, "", None, MISSING, "pip install --no-deps yunchang==0.6.4"),
    Entry("a", PEER, "", "1", SKIPPED, "for the causal mask only"),
    Entry("b", PEER, "", "1", SKIPPED, "for the causal mask only"),
    Entry("c", PEER, "", "1", FAILED, "RuntimeError: a peer's own <reason>"),
]  # fmt: skip
REPORT = RaceReport(CASE, MACHINE, ENTRIES, "float64", ["patched: something (a.module)"])


def shown() -> dict[str, str]:
    return {"bench.txt": table(REPORT, Ink()), "bench.json": REPORT.to_json(), "bench.svg": to_svg(REPORT)}


@pytest.mark.parametrize("name", ["bench.txt", "bench.json", "bench.svg"])
def test_golden(name: str) -> None:
    assert shown()[name] == (DATA / name).read_text(encoding="utf-8")


def test_json_comes_back() -> None:
    assert RaceReport.from_json(REPORT.to_json()) == REPORT


def test_json_has_no_nan() -> None:
    wrong = replace(ENTRIES[0], errors={"out": math.nan})
    text = replace(REPORT, entries=[wrong]).to_json()
    assert json.loads(text)["entries"][0]["errors"] == {"out": None}
    assert math.isnan(RaceReport.from_json(text).entries[0].worst_error)


class TestBase:
    def test_is_the_fastest_peer_that_is_right(self) -> None:
        assert REPORT.base is not None and REPORT.base.name == "torch ring alltoall"
        assert REPORT.ratio(ENTRIES[0]) == pytest.approx(255 / 270)
        assert REPORT.ratio(ENTRIES[4]) is None, "what is wrong has no ratio"

    def test_without_peers_is_the_fastest_of_ours(self) -> None:
        alone = replace(REPORT, entries=[each for each in ENTRIES if each.kind != PEER])
        assert alone.base is not None and alone.base.name == "tokenring"
        assert "/ fastest" in table(alone, Ink())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"status": WRONG, "reason": REASON}, f"tokenring: wrong: {REASON}"),
        ({"status": FAILED, "reason": "gone"}, "tokenring: failed: gone"),
    ],
)
def test_complaint(change: dict[str, str], says: str | None) -> None:
    first = replace(ENTRIES[0], **change)  # type: ignore[arg-type]
    assert replace(REPORT, entries=[first, *ENTRIES[1:]]).complaint() == says


def test_complaint_when_nothing_of_ours_ran() -> None:
    skipped = Entry("ring", OURS, "", "1", SKIPPED, "3 pieces do not divide")
    complaint = replace(REPORT, entries=[skipped, *ENTRIES[2:]]).complaint()
    assert complaint == "no schedule could run; ring: 3 pieces do not divide"


def test_nothing_was_timed() -> None:
    empty = replace(REPORT, entries=ENTRIES[5:])
    assert empty.base is None
    assert "median" not in table(empty, Ink())
    ElementTree.fromstring(to_svg(empty))


def test_picture_holds_every_round() -> None:
    picture = ElementTree.fromstring(to_svg(REPORT))
    assert len(picture.findall(".//{*}circle")) == 5 * 5
    width = float(picture.attrib["width"])
    assert all(0 <= float(dot.attrib["cx"]) <= width for dot in picture.findall(".//{*}circle"))


def test_texts() -> None:
    assert case_text(replace(CASE, backward=False, batch=1, kv_heads=8)) == (
        "forward, 4,096 tokens, 8 heads of 64, float32, causal"
    )
    sizes = [0, 999, 1000, 9_994, 99_940, 999_499, 999_500, 16_908_288, 10**15]
    texts = ["0 B", "999 B", "1.00 kB", "9.99 kB", "99.9 kB", "999 kB", "1.00 MB", "16.9 MB", "1000 TB"]
    assert [bytes_text(size) for size in sizes] == texts
    assert [ms(each) for each in (1.2346e-3, 0.0123, 0.9994, 1.2346)] == ["1.23", "12.3", "999.4", "1,235"]


if __name__ == "__main__":
    for name, text in shown().items():
        (DATA / name).write_text(text, encoding="utf-8")
