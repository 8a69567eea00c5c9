"""The benchmark: what it measures, what it refuses, and that nothing of a peer's takes it down."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import allowed, attention64
from patience import patient
from ranks import Here, RankPools

import tokenring as tr
from tokenring.cli.bench.candidates import NotInstalled, RacedSchedule, RaceSetting, Runner, one_process, our_candidates
from tokenring.cli.bench.command import main
from tokenring.cli.bench.contenders import contenders
from tokenring.cli.bench.peers import PEERS, peer_candidates
from tokenring.cli.bench.race import make_inputs, order, race
from tokenring.cli.bench.reference import errors, reference, reference_dtype
from tokenring.cli.bench.results import (
    FAILED,
    MEASURED,
    MISSING,
    OURS,
    PEER,
    SKIPPED,
    WRONG,
    Entry,
    RaceCase,
    RaceReport,
)
from tokenring.errors import ConfigurationError
from tokenring.schedule.names import SCHEMES
from tokenring.sequence.mask import parse_mask

CASE = RaceCase(
    seq_len=128, heads=4, kv_heads=4, head_dim=16, dtype="float32", mask="causal", batch=1, backward=True,
    layout="zigzag", transport="auto", pieces=None, schedules=[*SCHEMES], peers=[], rounds=2,
)  # fmt: skip
END_SECONDS = 40.0
# A shell starts what runs in the background with Ctrl-C ignored, and so its tests.
CODE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tokenring.cli.main import main
sys.exit(main())
"""


# ---------- turns


@pytest.mark.parametrize("count", [1, 2, 5, 6, 13])
def test_everyone_follows_everyone_else_equally_often(count: int) -> None:
    rounds = count * (2 if count % 2 else 1)
    rows = [order(count, turn) for turn in range(rounds)]
    assert all(sorted(row) == list(range(count)) for row in rows)
    follows = Counter(pair for row in rows for pair in pairwise(row))
    assert len(follows) == count * (count - 1) and len(set(follows.values())) <= 1
    assert all(Counter(column) == Counter(list(range(count)) * (rounds // count)) for column in zip(*rows, strict=True))


# ---------- the reference


@pytest.mark.parametrize("mask", ["full", "causal", "window(20,3)", "causal&documents(0,50,50,100)"])
def test_reference_is_right(mask: str) -> None:
    case = replace(CASE, kv_heads=2, batch=2, seq_len=300, mask=mask)
    q, k, v, dout = make_inputs(case)
    found = reference([q, k, v, dout], parse_mask(mask), True, 0, 1, torch.float64)
    want = attention64(q, k, v, dout, allowed(parse_mask(mask), 300, 300))
    for name, result in found.items():
        torch.testing.assert_close(result, getattr(want, name), rtol=1e-10, atol=1e-12)


def test_reference_of_long_sequences_is_float32() -> None:
    assert reference_dtype(replace(CASE, seq_len=4096, heads=8, head_dim=64)) == torch.float64
    assert reference_dtype(replace(CASE, seq_len=65536)) == torch.float32


def test_errors() -> None:
    wanted = {"out": torch.ones(1, 4, 1, 1), "dq": torch.zeros(1, 4, 1, 1)}
    found = {"out": torch.full((1, 2, 1, 1), 1.5), "dq": torch.zeros(1, 2, 1, 1)}
    assert errors(found, wanted, torch.tensor([0, 2]), 1) == {"out": 0.5, "dq": 0.0}


# ---------- the race, on ranks


def raced(here: Here, case: RaceCase, kinds: tuple[str, ...] = ()) -> tuple[list[Entry], str | None, list[str]]:
    setting = RaceSetting(case, here.rank, here.world_size)
    made = [RacedSchedule(kind, PEER, partial(fake, kind)) for kind in kinds]
    candidates = [*our_candidates(case), one_process(), *made, *peer_candidates(case.peers)]
    return race(setting, candidates, lambda done, steps, what: None)


def fake(kind: str, setting: RaceSetting, group: Any) -> Runner:
    """A peer that computes with our ring, or goes wrong in some way."""
    if kind == "missing":
        raise NotInstalled("pip install it")
    if kind == "refuses on rank 1" and setting.rank == 1:
        raise ImportError("no such module")
    if kind == "warns":
        warnings.warn("made from an old name", FutureWarning, stacklevel=2)
    cp = tr.ContextParallel(group, schedule="ring", timeout_seconds=patient(3.0))
    calls: list[int] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        if kind == "breaks on rank 0" and setting.rank == 0 and len(calls) == 3:
            raise ValueError("too often")
        if kind == "ignores the mask":
            return tr.attention(q, k, v, cp)
        if kind.startswith("warns"):
            warnings.warn("an old name", FutureWarning, stacklevel=2)
        out = tr.attention(q, k, v, cp, mask=tr.Causal())
        return out * torch.nan if kind == "is not a number" else out

    return Runner("peer, zigzag", setting.positions("zigzag"), attend)


def test_race_of_schedules_forward_and_backward(ranks: RankPools) -> None:
    at_0, at_1 = (entries for entries, _, _ in ranks(2)(raced, CASE))
    assert [entry.name for entry in at_0] == [*SCHEMES, "one process"]
    for entry in at_0:
        assert entry.status == MEASURED, entry
        assert entry.worst_error < 2e-6 and list(entry.errors) == ["out", "dq", "dk", "dv"]
        assert len(entry.call_s) == len(entry.forward_s) == CASE.rounds
        assert all(0 < forward < call for forward, call in zip(entry.forward_s, entry.call_s, strict=True))
        assert (entry.link_bytes is not None) == (entry.kind == OURS)
    assert at_0 == at_1, "times are the slowest rank's, on every rank"


@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, backward=False, mask="full", kv_heads=2),
        replace(CASE, dtype="bfloat16", mask="window(30,0)", layout="striped", batch=2),
        replace(CASE, schedules=["auto"], layout="contiguous"),
    ],
    ids=["forward", "bfloat16", "auto"],
)
def test_other_cases(ranks: RankPools, case: RaceCase) -> None:
    entries, compared_with, _ = ranks(2)(raced, case)[0]
    assert compared_with == "float64"
    assert {entry.status for entry in entries if entry.kind == OURS} == {MEASURED}, entries
    assert all(list(entry.errors) == ["out"] for entry in entries if not case.backward)
    one = entries[len(case.schedules)]
    assert one.status == (SKIPPED if "window" in case.mask else MEASURED)


@pytest.mark.parametrize("backward", [True, False], ids=["training", "forward"])
def test_a_rank_without_tokens_takes_part(backward: bool, ranks: RankPools) -> None:
    case = replace(CASE, schedules=["ring", "direct-kv", "tokenring"], seq_len=2, backward=backward, rounds=1)
    for entries, _, _ in ranks(3)(raced, case):
        assert {entry.status for entry in entries} == {MEASURED}, entries
        assert all(entry.worst_error < 2e-6 for entry in entries)


def test_bytes_are_those_of_the_passes_that_ran(ranks: RankPools) -> None:
    case = replace(CASE, schedules=["ring"], rounds=1)
    schedule = tr.schedule("ring", 2, "zigzag", tr.Causal(), length=128)
    workload = tr.Workload(1, 128, 128, 4, 4, 16, torch.float32)
    forward, backward = (schedule.link_bytes(workload, direction) for direction in ("forward", "backward"))
    for wanted, each in ((forward, replace(case, backward=False)), (Counter(forward) + Counter(backward), case)):
        assert ranks(2)(raced, each)[0][0][0].link_bytes == max(wanted.values())


def test_peers_that_go_wrong_are_listed_and_the_race_goes_on(ranks: RankPools) -> None:
    kinds = ("is right", "missing", "refuses on rank 1", "ignores the mask", "is not a number", "breaks on rank 0")
    case = replace(CASE, schedules=["ring"])
    with ranks.expendable(2) as pair:
        entries = {entry.name: entry for entry in pair(raced, case, kinds)[0][0]}
    found = {name: (entry.status, entry.reason) for name, entry in entries.items()}
    assert found["ring"] == found["is right"] == found["one process"] == (MEASURED, None)
    assert found["missing"] == (MISSING, "pip install it")
    assert found["refuses on rank 1"] == (FAILED, "ImportError: no such module")
    for name, says in (("ignores the mask", r"error of out is [1-9]"), ("is not a number", "error of out is nan")):
        status, reason = found[name]
        assert status == WRONG and reason is not None and re.search(says, reason), reason
        assert len(entries[name].call_s) == CASE.rounds, "shown as wrong, with its times"
    assert found["breaks on rank 0"] == (FAILED, "ValueError: too often")
    assert not entries["breaks on rank 0"].was_timed


def warned(here: Here, kind: str, what: str) -> list[str | None]:
    """What becomes of a candidate that warns, where warnings are errors; and the filters, which stay as they were."""
    before = list(warnings.filters)
    setting = RaceSetting(replace(CASE, schedules=[]), here.rank, here.world_size)
    (entry,), _, _ = race(setting, [RacedSchedule("it", kind, partial(fake, what))], lambda done, steps, what: None)
    assert warnings.filters == before and before[0][0] == "error"
    return [entry.status, entry.reason]


@pytest.mark.parametrize(
    ("kind", "what", "found"),
    [
        (PEER, "warns", [MEASURED, None]),
        (OURS, "warns", [FAILED, "FutureWarning: made from an old name"]),
        (OURS, "warns in calls", [FAILED, "FutureWarning: an old name"]),
        (OURS, "right", [MEASURED, None]),
    ],
)
def test_peers_may_warn(kind: str, what: str, found: list[str | None], ranks: RankPools) -> None:
    """Of torch's old names, say, when they are made and in each call: ring-flash-attn 0.1.8 does. We may not."""
    with ranks.expendable(2) as pair:
        assert pair(warned, kind, what) == [found] * 2


# ---------- peers


def test_peers_without_an_installation() -> None:
    for candidate in peer_candidates([name for name in PEERS if find_spec(name.replace("-", "_")) is None]):
        with pytest.raises(NotInstalled, match=f"pip install --no-deps {candidate.name}=="):
            candidate.prepare(RaceSetting(CASE, 0, 2), None)


@pytest.mark.parametrize("name", PEERS)
def test_peers_that_are_installed_are_right(ranks: RankPools, name: str) -> None:
    if find_spec(name.replace("-", "_")) is None:
        pytest.skip(f"{name} is not installed")
    case = replace(CASE, peers=[name], schedules=["ring"])
    with ranks.expendable(2) as pair:  # peers change modules
        raced_by_mask = [pair(raced, replace(case, mask=mask))[0] for mask in ("causal", "full")]
    for entries, _, notes in raced_by_mask:
        peers = [entry for entry in entries if entry.kind == PEER]
        assert {entry.status for entry in peers} <= {MEASURED, SKIPPED} and peers[0].status == MEASURED, peers
        assert all(entry.version for entry in peers) and notes


# ---------- the command


def bench(folder: Path, python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "tokenring", "bench", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=patient(100))


SMALL = ["--ranks", "2", "--seq-len", "128", "--heads", "2", "--head-dim", "16", "--rounds", "2"]


def test_whole_run(tmp_path: Path, warm: str) -> None:
    result = bench(tmp_path, warm, *SMALL, "--peers", "none", "--json", "b.json", "--picture", "b.svg")
    assert result.returncode == 0 and result.stderr == "", result.stdout + result.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["b.json", "b.svg"]
    report = RaceReport.from_json((tmp_path / "b.json").read_text())
    assert json.loads((tmp_path / "b.json").read_text())["format"] == "tokenring-bench"
    assert report.case.schedules == contenders(replace(report.case, schedules=[]), 2)
    assert [entry.name for entry in report.entries] == [*report.case.schedules, "one process"]
    assert {entry.status for entry in report.entries} == {MEASURED}
    assert report.machine.ranks == 2 and report.machine.hosts == 1 and report.machine.torch == torch.__version__
    names = [line.split("  ")[0] for line in result.stdout.splitlines()[4 : 4 + len(report.entries)]]
    assert names == [entry.name for entry in report.ranked]


@pytest.mark.slow
def test_on_the_processes_of_torchrun(tmp_path: Path, warm: str) -> None:
    torchrun = [warm, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [*torchrun, "--nproc-per-node", "2", "-m", "tokenring", "bench", *SMALL[2:], "--json", "b.json"]
    options = ["--schedules", "ring", "--peers", "none"]
    result = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=patient(100))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("tokenring bench: ") == 1, "rank 0 speaks for all"
    report = RaceReport.from_json((tmp_path / "b.json").read_text())
    assert [entry.name for entry in report.entries] == ["ring", "one process"]


def test_nothing_of_ours_can_run(tmp_path: Path, warm: str) -> None:
    result = bench(tmp_path, warm, *SMALL, "--schedules", "ring", "--pieces", "3", "--peers", "none")
    assert result.returncode == 1
    assert "no schedule could run; ring: schedule 'ring': 3 pieces do not divide" in result.stderr


@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_interrupt_leaves_nothing(tmp_path: Path, seconds: float) -> None:
    """While it starts, and while ranks compute."""
    folder, temporary = tmp_path / "folder", tmp_path / "temporary"
    folder.mkdir()
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, "bench", *SMALL, "--rounds", "1000000", "--json", "b.json"],
        cwd=folder, env=os.environ | {"TMPDIR": str(temporary)}, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_for_ranks(process.pid)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=patient(END_SECONDS))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert err.endswith("interrupted: nothing was left behind\n") and "Traceback" not in err
    assert list(folder.iterdir()) == [] and list(temporary.iterdir()) == []
    assert workers_in(temporary) == []


def workers_in(temporary: Path) -> list[int]:
    """The processes that a command with this TMPDIR has started."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if str(temporary).encode() in Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
    return found


def wait_for_ranks(process: int) -> None:
    deadline = time.monotonic() + 60.0
    while not Path(f"/proc/{process}/task/{process}/children").read_text().split():
        assert time.monotonic() < deadline
        time.sleep(0.02)


MESH = ["--ranks", "4", "--emulate", "full-mesh", "--link-gbit", "0.1"]


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "say how many processes to start"),
        (["--ranks", "0"], "--ranks 0: use 1 or more"),
        (["--ranks", "2", "--rounds", "0"], "--rounds 0: use 1 or more"),
        (["--ranks", "2", "--kv-heads", "3"], "8 query heads are not a multiple of 3 kv heads"),
        (["--ranks", "2", "--mask", "zigzag"], "unknown mask"),
        (["--ranks", "2", "--layout", "zagzig"], "unknown layout 'zagzig'"),
        (["--ranks", "2", "--dtype", "float64"], "invalid choice: 'float64'"),
        (["--ranks", "2", "--schedules", "ring,rings"], "--schedules ring,rings: 'rings' is not one of all, ring"),
        (["--ranks", "2", "--peers", "megatron"], "--peers megatron: 'megatron' is not one of auto, none, "),
        (["--ranks", "2", "--transport", "mpi"], "--transport mpi: unknown"),
        (["--ranks", "2", "--pieces", "0"], "--pieces 0: use 1 or more"),
        (["--ranks", "2", "--pieces", "2", "--schedules", "auto"], "--pieces goes with schedules by name"),
        (["--ranks", "2", "--json", "/no/such/folder/x"], "--json /no/such/folder/x: not a file in a folder"),
        (["--ranks", "2", "--json", "x", "--svg", "./x"], "--json and --svg are both x: give each"),
        (["--ranks", "2", "--svg", "/"], "--svg /: not a file in a folder"),
        (["--ranks", "4", "--link-gbit", "0.1"], "--link-gbit goes with --emulate SHAPE"),
        (["--ranks", "4", "--compute", "0.1"], "--compute goes with --emulate SHAPE"),
        (["--ranks", "4", "--emulate", "ring"], "say how fast its links are, as in --link-gbit 0.1"),
        ([*MESH, "--transport", "shm"], "--transport shm would bypass emulated links: use gloo"),
        ([*MESH, "--compute", "0"], "--compute 0: give TFLOP/s"),
        ([*MESH, "--nic-per-rank"], "full-mesh has no nodes"),
        (["--rank"], "see tokenring bench --help"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        main(arguments, {})


def test_ranks_under_torchrun_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="torchrun has started 4: leave one out"):
        main(["--ranks", "2"], {"RANK": "0", "WORLD_SIZE": "4"})
    with pytest.raises(ConfigurationError, match="--emulate starts ranks of its own"):
        main(MESH[2:], {"RANK": "0", "WORLD_SIZE": "4"})


def test_importing_tokenring_leaves_the_benchmark_alone() -> None:
    code = "import sys, tokenring.cli.main; sys.exit(any('tokenring.cli.bench' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=patient(60)).returncode == 0
