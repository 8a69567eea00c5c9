"""A plan as text: the reason, the best first, ties in one line, the ring beside them, and what the names say."""

from __future__ import annotations

import pytest
import torch
from test_planner_command import FEW, SMALL, plan, printed

import tokenring as tr
from tokenring.cli.plan import report
from tokenring.display.units import time_text
from tokenring.planner.choosing.candidates import Candidate, table
from tokenring.planner.choosing.plan import Forecast, Plan
from tokenring.schedule.families.meanings import NUMBERS, OPTIONS_SAY, meanings
from tokenring.schedule.families.registry import FAMILIES, OPTIONS

X = torch.ones(1, 16, 2, 16)
RING = tr.schedule("ring", 2)
SIZE = tr.Workload(1, 128, 128, 2, 2, 16)


def candidate(name: str, ms: float | None, reason: str) -> Candidate:
    if ms is None:
        return Candidate(name, None, None, None, None, None, None, reason)
    return Candidate(name, ms / 1e3, ms / 2e3, 0.0, 2_000_000, 3_000, 1e-3, reason)


BEST = candidate("ulysses", 2.0, "the fastest, bound by kernels (50% of the time)")
TIES = [candidate(name, 2.0 + 0.01 * at, "as fast") for at, name in enumerate(("usp/4", "packed/2/late", "relay/2"))]
LOST = [candidate(f"tiles/{n}x2", 2.0 + n, f"+{50 * n}%: its kernels take 9 ms") for n in range(1, 14)]
RINGS = candidate("ring", 30.0, "+1400%: its busiest wire needs 29 ms")
NO = candidate("direct-q", None, "its busiest wire alone needs 40 ms")


def test_ties_are_one_line_and_the_ring_is_there() -> None:
    lines, says = table([BEST, *TIES, *LOST, RINGS, NO])
    assert [line.split()[0] for line in lines[1:-2]] == ["ulysses", *(f"tiles/{n}x2" for n in range(1, 12)), "ring"]
    assert lines[1].split()[1:6] == ["2", "ms", "1", "ms", "0"] and "  2 MB    3 kB     2.00  the fastest" in lines[1]
    assert lines[-3].endswith("+1400%: its busiest wire needs 29 ms; the baseline")
    assert lines[-2:] == [
        "within 2% of the fastest: usp/4, packed/2/late, relay/2; the choice among these hardly matters",
        "2 more were simulated and are slower",
    ]
    assert says == [
        "  tiles/AxB: a rank computes with Q of A ranks and with K and V of B",
        "  usp/U: U neighbours share the heads; K and V go round between their groups",
        "  packed/G: G head groups, cut into equal shares for all ranks",
        "  relay/L: L ranks a node",
        "  /late: half of each rank's own tile is computed last, so that the last results travel meanwhile",
    ]


def test_two_ties_are_rows() -> None:
    lines, _ = table([BEST, *TIES[:2], RINGS])
    assert [line.split()[0] for line in lines[1:]] == ["ulysses", "usp/4", "packed/2/late", "ring"]


def test_everything_is_a_row_each() -> None:
    lines, _ = table([BEST, *TIES, *LOST, RINGS, NO], everything=True)
    assert len(lines) == 1 + 1 + len(TIES) + len(LOST) + 1


def test_says_where_the_choice_does_not_matter() -> None:
    near = candidate("ring", 2.08, "+4%: 80 µs are not hidden")
    assert table([BEST, near])[0][-1] == (
        "the choice hardly matters here: ring would take 4% longer, no more than what predictions are off by"
    )
    assert "would take as long" in table([BEST, candidate("ring", 2.0, "as fast")])[0][-1]
    assert not any("hardly" in line for line in table([BEST, RINGS])[0])
    for ring in (
        candidate("ring", 1.2, "-40%: 80 µs"),
        candidate("ring", 2.02, "needs 2 GB a rank, more than the limit of 1 GB"),
    ):
        assert not any("hardly" in line for line in table([BEST, ring])[0])
    assert not any("hardly" in line for line in table([candidate("ring", 2.0, "the fastest"), *LOST])[0])


def test_what_was_passed_over_for_its_risk_is_no_tie() -> None:
    risky = [candidate(name, 1.9, "-5%, at more risk: its busiest wire needs 2 ms") for name in "abc"]
    assert [line.split()[0] for line in table([BEST, *risky])[0][1:]] == ["ulysses", "a", "b", "c"]


def test_printed_from_python() -> None:
    made = Plan(RING, SIZE, "ring: 2 ms predicted for forward on x", (BEST, RINGS))
    rows, says = table((BEST, RINGS))
    assert str(made) == "\n".join(["ring: 2 ms predicted for forward on x", "", *rows, *says])
    assert repr(made) == "Plan(ring of 2 candidates, for 2 ranks)"
    assert str(Forecast("ring", SIZE, "what it is", (BEST,))).startswith("ring: what it is\n\nschedule")
    alone = tr.plan(X, X, X, tr.ContextParallel())
    assert (str(alone), repr(alone)) == ("ring: nothing has to move", "Plan(ring of 1 candidates, for 1 ranks)")
    named = tr.plan(X, X, X, tr.ContextParallel(schedule="direct-kv"))
    assert str(named) == "direct-kv: requested by name: direct-kv"


def test_every_name_can_be_explained() -> None:
    assert set(NUMBERS) == {name for name, family in FAMILIES.items() if family.parameters}
    assert set(OPTIONS_SAY) == {*OPTIONS, "pieces"}
    assert list(meanings(["ulysses/2/keep", "ulysses", "ring/pieces4", "my own", "ring/pieces2"])) == [
        "ulysses/K", "/keep", "/piecesN",
    ]  # fmt: skip


# ---------- the command


def test_says_what_it_is_of() -> None:
    assert printed(*SMALL).startswith("one attention call (of one layer), forward: batch 1, 4,096 tokens, ")
    assert printed(*SMALL, "--pass", "training").startswith("one attention call (of one layer), forward + backward: ")


def test_the_ring_is_shown_in_any_case() -> None:
    """Where it was not asked for, cannot win, does not keep to the limit, or is more than can be made."""
    for options in (("--schedules", "direct-kv"), ("--topology", "preset:mi300x-8", "--heads", "64")):
        text = printed(*SMALL, *options)
        assert text.count("; the baseline\n") == 1
        assert sum(line.startswith("ring ") for line in text.splitlines()) == 1
    many = ("--topology", "preset:hgx-h100*40", "--seq", "320k", "--heads", "64", "--pass", "forward")
    assert "; the baseline\n" in printed(*many, "--schedules", "usp/8")
    few = ("--topology", "preset:a10-pix-4", "--seq", "64k", *FEW[2:], "--schedules", "direct-kv")
    assert "the baseline" in printed(*few, "--memory-limit", "1G")


def test_the_ring_is_folded_like_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no ring of all ranks where one host stands for all: that takes longer than all else."""

    def predict(*given: object) -> None:
        raise AssertionError("a schedule of all ranks is simulated")

    monkeypatch.setattr(report, "predict", predict)
    text = printed("--topology", "preset:hgx-h100*8", "--seq", "64k", *FEW[2:], "--schedules", "usp/8")
    (line,) = [line for line in text.splitlines() if line.startswith("ring ")]
    assert line.endswith("%; the baseline")


def test_json_has_what_it_had() -> None:
    code, text, _ = plan(*SMALL, "--schedules", "direct-kv", "--json")
    names = {each.name.partition("/")[0] for each in Plan.from_json(text).candidates}
    assert code == 0 and names == {"direct-kv"}


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.5e-6, "4.5 µs")])
def test_times(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
