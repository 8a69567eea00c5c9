"""`tokenring bench --operator`: right results beside torch.distributed's, and what is refused before ranks start."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
from ranks import Here, RankPools

from tokenring.cli.bench import operators_worker
from tokenring.cli.bench.command import main
from tokenring.cli.bench.operators import OperatorCase, OperatorReport, operator_table
from tokenring.cli.bench.results import FAILED, MEASURED, OURS, PEER, WRONG, Entry, RaceMachine
from tokenring.display.console import Ink
from tokenring.errors import TokenRingError
from tokenring.launch.command import quiet

CASE = OperatorCase(
    "column", 64, 32, 16, 4096, "float32", True, "auto", ["auto", "direct-q", "direct-q/pieces2", "tokenring"], 2
)
REFUSED = {
    ("colum",): "--operator colum: choose one of column, row, all-reduce, reduce-scatter, all-gather; did you mean",
    ("row", "--bytes", "4"): "--bytes does not go with --operator row, whose sizes are --seq, --features, --width",
    ("all-reduce", "--seq", "4"): "--seq does not go with --operator all-reduce, whose sizes are --bytes",
    ("row", "--seq", "1001"): "--seq 1001: 2 ranks do not divide it",
    ("row", "--dtype", "fp16"): "--dtype fp16: --operator row takes fp32 and bf16",
    ("row", "--schedules", "ring"): "--schedules ring: 'ring' moves weights, and torch's layers keep theirs: take",
    ("row", "--schedules", "x"): "--schedules x: 'x' is not the name of a schedule (docs/layer.md)",
    ("row", "--svg", "x.svg"): "--svg draws a race of attention, not of --operator NAME: leave it out",
    ("row", "--compute", "1"): "--compute lets attention kernels sleep; products of --operator NAME are computed",
    ("row", "--rounds", "0"): "--rounds 0: use 1 or more",
    ("row", "--transport", "pigeon"): "--transport pigeon: unknown; choose one of auto, gloo",
}


def races(here: Here, cases: list[OperatorCase]) -> list[list[Entry]]:
    return [operators_worker.raced(case, here.rank, here.world_size, quiet) for case in cases]


def test_results_are_right_and_everyone_is_timed(ranks: RankPools) -> None:
    """Torch's collectives too, in both passes and dtypes: they are checked by the same float64 product."""
    collectives = [replace(CASE, operator=each, backward=False, schedules=["auto", "tokenring"])
                   for each in ("all-reduce", "reduce-scatter", "all-gather")]  # fmt: skip
    cases = [CASE, replace(CASE, operator="row"), replace(CASE, dtype="bfloat16", backward=False), *collectives]
    first, second = ranks(2)(races, cases)
    for case, entries, others in zip(cases, first, second, strict=True):
        assert [each.name for each in entries] == ["torch.distributed", *case.schedules]
        for entry, other in zip(entries, others, strict=True):
            assert entry.status == MEASURED, (case, entry)
            assert len(entry.call_s) == len(entry.forward_s) == case.rounds
            assert entry.call_s == other.call_s  # the slowest rank's, on all of them
            assert set(entry.errors) == ({"out", "dx", "dw"} if case.backward else {"out"})
            assert entry.worst_error <= (1e-6 if case.dtype == "float32" else 6e-3)
    sent = {entry.name: entry.link_bytes for entry in first[0][1:]}
    assert set(sent.values()) == {3 * 32 * 16 * 4}  # a rank's x twice, and its part of dx, fp32


def wrong(here: Here) -> list[Entry]:
    """A race in which rank 1 has other weights than the right results are of."""
    right = operators_worker.given_of

    def other(case: OperatorCase, rank: int, ranks: int) -> operators_worker.Given:
        found = right(case, rank, ranks)
        assert found.weight is not None
        return replace(found, weight=found.weight * 2 if rank else found.weight)

    with mock.patch.object(operators_worker, "given_of", other):
        return operators_worker.raced(CASE, here.rank, here.world_size, quiet)


def test_wrong_results_are_told(ranks: RankPools) -> None:
    for entries in ranks(2)(wrong):
        assert [each.status for each in entries] == [WRONG] * len(entries)
        assert OperatorReport(CASE, RaceMachine("", 2, 1, 2, ""), entries).complaint() is not None


def test_report_reads_itself_and_says_what_failed() -> None:
    fast = Entry("direct-q", OURS, "schedule", "1", MEASURED, None, [0.1], [0.2], errors={"out": 1e-7})
    slow = Entry("torch.distributed", PEER, "", None, MEASURED, None, [0.1], [0.3], errors={"out": 1e-7})
    failed = Entry("tokenring", OURS, "schedule", "1", FAILED, "no reason")
    report = OperatorReport(CASE, RaceMachine("cpu", 2, 1, 2, torch.__version__), [slow, fast, failed])
    read = OperatorReport.from_json(report.to_json())
    assert read.case == CASE and [each.name for each in read.ranked] == ["direct-q", "torch.distributed", "tokenring"]
    assert json.loads(report.to_json())["format"] == "tokenring-bench-operator"
    text = operator_table(report, Ink(False))
    assert "1.50" in text and "failed: tokenring: no reason" in text
    assert report.complaint() == "tokenring: failed: no reason"


@pytest.mark.parametrize("options", REFUSED, ids=" ".join)
def test_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(TokenRingError) as caught:
        main(["--operator", *options, "--ranks", "2"], {})
    assert str(caught.value).startswith(REFUSED[options])


def test_shortened_option_is_refused() -> None:
    with pytest.raises(TokenRingError, match="write --operator in full"):
        main(["--operato", "row", "--ranks", "2"], {})
