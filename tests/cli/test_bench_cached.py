"""`tokenring bench --cached`: right results beside those by hand, bytes to the byte, and what is refused before."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from oracle import cached64
from ranks import Here, RankPools

from tokenring.cli.bench import cached_ways, cached_worker
from tokenring.cli.bench.command import main
from tokenring.cli.bench.results import (
    MEASURED,
    OURS,
    PEER,
    SKIPPED,
    WRONG,
    CachedCase,
    CachedReport,
    Entry,
    RaceMachine,
)
from tokenring.cli.bench.table import shown, table
from tokenring.display.console import Ink
from tokenring.errors import TokenRingError
from tokenring.launch.command import quiet

WAYS = [*cached_ways.WAYS]
CASE = CachedCase(6, 96, 6, 2, 16, 16, False, "float32", 2, "shm", WAYS, 1)
MACHINE = RaceMachine("cpu", 2, 1, 3, torch.__version__)
SMALL = ("--cached", "1k", "--ranks", "2")
REFUSED = {
    ("--cached", "4x", "--ranks", "2"): "--cached 4x: write a number from 1 to ",
    ("--cached", "1001", "--ranks", "2"): "--cached 1001: 2 ranks have equal parts of it; give 1000",
    ("--cached", "1", "--ranks", "2"): "--cached 1: 2 ranks have equal parts of it; give 2",
    (*SMALL, "--tokens", "0"): "--tokens 0: write a number from 1 to ",
    (*SMALL, "--heads", "0"): "--heads 0: use 1 or more",
    (*SMALL, "--rounds", "0"): "--rounds 0: use 1 or more",
    (*SMALL, "--transport", "pigeon"): "--transport pigeon: unknown; choose one of auto, gloo",
    (*SMALL, "--schedules", "two-stp"): "--schedules two-stp: 'two-stp' is not one of all, auto, one-shot, two-step,",
    (*SMALL, "--seq", "4k"): "--seq 4k does not go with --cached: its lengths are those of --cached N and --tokens N",
    (*SMALL, "--mask", "causal"): "--mask causal does not go with --cached: new tokens see all that is cached and",
    (*SMALL, "--pass", "training"): "--pass training does not go with --cached: it is forward alone",
    (*SMALL, "--layout", "zigzag"): "--layout zigzag does not go with --cached: what is cached lies in equal parts",
    (*SMALL, "--pieces", "2"): "--pieces 2 does not go with --cached: its messages are not cut",
    (*SMALL, "--peers", "none"): "--peers none does not go with --cached: it races the ways beside a few lines by hand",
    (*SMALL, "--operator", "row"): "--operator row does not go with --cached: each is a call of its own",
    (*SMALL, "--latents", "--kv-heads", "2"): "--kv-heads 2 with --latents: they are of all heads; leave it out",
    (*SMALL, "--latents"): "--latents of --dim 64 elements, --value-dim None: the first elements",
    (*SMALL, "--link-gbit", "1"): "--link-gbit goes with --emulate SHAPE",
    (*SMALL, "--kv-heads", "3"): "8 query heads are not a multiple of 3 kv heads",
    ("--tokens", "2", "--ranks", "2"): "--tokens goes with --cached N, how many tokens are cached",
    ("--latents", "--ranks", "2"): "--latents goes with --cached N, how many tokens are cached",
    ("--cached", "--help"): "argument --cached: expected one argument; see tokenring bench --cached N --help",
    ("--operator", "--help"): "argument --operator: expected one argument; see tokenring bench --operator NAME --help",
    ("--cach", "1k", "--ranks", "2"): "write --cached in full: it has options of its own",
}


def raced(here: Here, cases: list[CachedCase]) -> list[list[Entry]]:
    return [cached_worker.raced(case, here.rank, here.world_size, quiet) for case in cases]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_way_is_right(ranks: RankPools, world: int) -> None:
    """Compare values of another width, latents and half precision too, all in the first round."""
    wide = replace(CASE, value_dim=8, transport="gloo", batch=1)
    latents = replace(wide, kv_heads=1, latents=True)
    cases = [CASE, wide, latents, replace(CASE, dtype="bfloat16")]
    found = ranks(world)(raced, cases)
    for case, *at_ranks in zip(cases, *found, strict=True):
        for entry, *others in zip(*at_ranks, strict=True):
            assert entry.status == MEASURED, (case, entry)
            assert len(entry.call_s) == case.rounds and all(each.call_s == entry.call_s for each in others)
            assert set(entry.errors) == {"out"}
            assert entry.worst_error <= (1e-6 if case.dtype == "float32" else 6e-3), (case, entry)
        assert [each.name for each in at_ranks[0]] == [*WAYS, "by hand"]


def test_bytes_of_the_busiest_link(ranks: RankPools) -> None:
    """Count as docs/inference.md says: a result is 2 × 6 × 6 rows of 16 elements and lse, in fp32."""
    case = replace(CASE, schedules=["one-shot", "two-step", "direct-q/heads"])
    found = {entry.name: entry.link_bytes for entry in ranks(3)(raced, [case])[0][0]}
    q, result = 2 * 6 * 6 * 16 * 4, 2 * 6 * 6 * (16 + 1) * 4
    assert found == {
        "one-shot": result, "two-step": 2 * result // 3, "direct-q/heads": (q + result) // 3, "by hand": None
    }  # fmt: skip


def test_one_token_leaves_out_what_is_cut(ranks: RankPools) -> None:
    case = replace(CASE, tokens=1, heads=4, batch=1)
    (entries,) = ranks(3)(raced, [case])[0]
    told = {entry.name: entry.reason for entry in entries if entry.status == SKIPPED}
    assert set(told) == {"two-step", "direct-q/heads", "direct-q/tokens", "auto/tokens", "direct-kv", "ring"}
    assert told["two-step"] == "it cuts query heads over the ranks, and 4 do not divide over 3"
    assert told["ring"] == (
        "each rank has its part of the new tokens, and 1 new token cannot be cut over 3 ranks"
    )
    assert all(entry.worst_error <= 1e-6 for entry in entries if entry.status == MEASURED)


def reference(here: Here, case: CachedCase) -> tuple[torch.Tensor, cached_ways.StepTensors]:
    tensors = cached_ways.StepTensors.of(case, here.rank, here.world_size)
    return cached_ways.wanted_out(case, tensors), tensors


def test_reference_is_attention_over_the_whole_sequence(ranks: RankPools) -> None:
    found = ranks(2)(reference, CASE)
    first, second = (tensors for _, tensors in found)
    k, v = (
        torch.cat([getattr(first, f"cached_{name}"), getattr(second, f"cached_{name}"), getattr(first, name)], 1)
        for name in ("k", "v")
    )
    wanted, _ = cached64(first.q, k, v, torch.arange(CASE.cached, CASE.cached + CASE.tokens))
    for out, tensors in found:
        assert torch.equal(tensors.q, first.q)
        torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)


def wrong(here: Here) -> list[Entry]:
    """A race whose "one-shot" has a result of rank 1 that is off."""
    right = cached_ways.CachedStep.call

    def other(step: cached_ways.CachedStep, name: str) -> torch.Tensor:
        found = right(step, name)
        return found * 1.01 if name == "one-shot" and here.rank else found

    with mock.patch.object(cached_ways.CachedStep, "call", other):
        case = replace(CASE, schedules=["one-shot", "two-step"])
        return cached_worker.raced(case, here.rank, here.world_size, quiet)


class Told:
    """A console that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ink = Ink(False)
        self.say = self.data = self.complain = self.said.append


def test_a_wrong_way_is_shown_and_fails_the_command(ranks: RankPools) -> None:
    entries = ranks(3)(wrong)[0]
    assert [each.status for each in entries] == [WRONG, MEASURED, MEASURED]
    report = CachedReport(CASE, MACHINE, entries, "float64", [])
    console: Any = Told()
    options = mock.Mock(printed=False, json=None, save=None, svg=None)
    assert shown(report, table(report, console.ink), options, console) == 1
    text, complaint = console.said
    assert "WRONG" in next(line for line in text.splitlines() if line.startswith("one-shot"))
    assert complaint.startswith("tokenring bench: one-shot: wrong: errors are {'out': ")


def test_report_reads_itself() -> None:
    ours = Entry("two-step", OURS, 'q_home="all"', "1", MEASURED, None, [0.2], [0.2], 100, {"out": 1e-7})
    hand = Entry("by hand", PEER, "kernel", None, MEASURED, None, [0.4], [0.4], errors={"out": float("nan")})
    report = CachedReport(CASE, MACHINE, [hand, ours], "float64", [])
    read = CachedReport.from_json(report.to_json())
    assert isinstance(read, CachedReport) and read.case == CASE
    assert [each.name for each in read.ranked] == ["two-step", "by hand"]
    assert json.loads(report.to_json())["format"] == "tokenring-bench-cached"
    text = table(report, Ink(False))
    assert "forward, 6 new tokens over 96 cached, 6 query heads on 2 kv heads of 16, float32, batch 2" in text
    assert " 0.50 " in next(line for line in text.splitlines() if line.startswith("two-step"))


@pytest.mark.parametrize("options", REFUSED, ids=" ".join)
def test_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(TokenRingError) as caught:
        main([*options], {})
    assert str(caught.value).startswith(REFUSED[options])


def sleeping(here: Here, case: CachedCase) -> list[Entry]:
    return cached_worker.raced(case, here.rank, here.world_size, quiet)


def test_sleeping_kernels_are_not_compared(ranks: RankPools) -> None:
    """Leave the kernels as they were afterwards."""
    entries = ranks(2)(sleeping, replace(CASE, compute_tflops=1.0))[0]
    assert all(each.status == MEASURED and not each.errors and each.call_s for each in entries)
    assert ranks(2)(raced, [replace(CASE, schedules=["auto"])])[0][0][0].worst_error <= 1e-6
