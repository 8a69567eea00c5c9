"""Transports that were measured: what a table holds, where it is kept, who takes it, and that all ranks do alike."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import symm_ranks
import torch
import torch.distributed as dist
from cases import Case as Calls
from cases import Local, check_exact, compute
from ranks import Here, RankPools
from said import said
from test_choice import BOTH, MB, rows

import tokenring as tr
from tokenring import ContextParallel
from tokenring.backends import cuda
from tokenring.backends.auto import Preferring, choice_of
from tokenring.backends.choice import Choice, choose
from tokenring.backends.registry import make_transport
from tokenring.cli import main
from tokenring.doctor.examine import examine
from tokenring.doctor.report import report
from tokenring.planner import transfers_worker
from tokenring.planner.transfers import Key, Transfers, from_json, keep, kept, table, taken, to_json
from tokenring.planner.transfers_worker import Case, Measured, measure
from tokenring.workload import Workload

KEY = Key("cpu", "a processor", "reached", 4, "2.13")
GLOO = Transfers({"shm": rows((4096, 77.0), (64 * MB, 80000.0)), "gloo": rows((4096, 41.0), (64 * MB, 40000.0))})
SHM = Transfers({"shm": GLOO.samples["gloo"], "gloo": GLOO.samples["shm"]})
CROSSING = Transfers({"shm": rows((4096, 90.0), (MB, 100.0)), "gloo": rows((4096, 30.0), (MB, 300.0))})


# ---------- the table


def test_a_table_as_text() -> None:
    assert table(KEY, CROSSING) == [
        "message                   shm, µs                  gloo, µs",
        "   4 KB             90 (81 to 99)             30 (27 to 33)",
        "   1 MB           100 (90 to 110)          300 (270 to 330)",
        "",
        "taken: gloo, shm from 1 MB",
    ]
    assert (taken(KEY, GLOO), taken(KEY, SHM)) == ("taken: gloo", "taken: shm")


def test_a_table_is_kept(tmp_path: Path) -> None:
    place = {"XDG_CACHE_HOME": str(tmp_path)}
    path = keep(KEY, GLOO, place)
    assert path is not None and kept(KEY, place) == (GLOO, "")
    assert from_json(to_json(KEY, GLOO)) == (KEY, GLOO)
    for other in ({"ranks": 2}, {"torch": "2.14"}, {"device": "another"}, {"domain": "across"}, {"kind": "cuda"}):
        assert kept(replace(KEY, **other), place) == (None, "")
    assert keep(KEY, GLOO, {}) is None and kept(KEY, {}) == (None, ""), "there is no home"


SPOILT: dict[str, tuple[Callable[[str], str], str]] = {
    "cut": (lambda text: text[:-20], "Expecting"),
    "empty": (lambda text: "", "Expecting value"),
    "no text": (lambda text: "\x00\ufffd" * 9, "Expecting value"),
    "of another version": (lambda text: text.replace('"version": 1', '"version": 2'), "version 2, not 1"),
    "a negative time": (lambda text: text.replace("7.7e-05", "-7.7e-05"), "is not (bytes, seconds of"),
    "no number": (lambda text: text.replace("7.7e-05", "NaN"), "is not (bytes, seconds of"),
    "bytes without end": (lambda text: text.replace("4096", "Infinity"), "cannot convert float infinity"),
    "three numbers": (lambda text: text.replace("4096,", ""), "Sample.__new__"),
    "another thing": (lambda text: "[]", "list indices"),
    "another thing inside": (lambda text: text.replace('"shm": [', '"shm": 5, "x": ['), "not iterable"),
    "too deep": (lambda text: "[" * 100000, "recursion"),
    "of nothing known": (lambda text: text.replace('"reached"', '"somewhere"'), "it is of 'cpu' and 'somewhere'"),
    "a key that lacks something": (lambda text: text.replace('"ranks": 4,', ""), "ranks"),
    "of other ranks": (lambda text: text.replace('"ranks": 4', '"ranks": 8'), "it is of 8 ranks on a processor"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_broken_table_is_a_note(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules hold, and the reason says which file is not used and why."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Key, "here", staticmethod(lambda kind, domain, ranks: KEY))
    spoil, why = SPOILT[what]
    path = keep(KEY, GLOO)
    assert path is not None and choice_of("cpu", "reached", BOTH, 4).transport == "gloo"
    path.write_text(spoil(path.read_text()))
    found, note = kept(KEY)
    assert found is None and note.startswith(f"{path} is not used: ") and why in note, note
    assert note.endswith("; `tokenring rates --transports` makes another")
    with said() as heard:
        chosen = choice_of("cpu", "reached", BOTH, 4)
    assert chosen == Choice("shm", f"{choose('cpu', 'reached', BOTH).reason}; {note}")
    assert heard == [f"measured transports: {note}"]


def test_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "tokenring"
    (folder / KEY.file_name).mkdir(parents=True)
    assert "it cannot be read: Is a directory" in kept(KEY, {"XDG_CACHE_HOME": str(tmp_path)})[1]
    (tmp_path / "file").touch()
    assert "it cannot be read: Not a dir" in kept(replace(KEY, ranks=2), {"XDG_CACHE_HOME": f"{tmp_path}/file"})[1]


# ---------- measuring


def measured(here: Here, seconds: float) -> Measured | None:
    assert dist.group.WORLD is not None
    return measure(dist.group.WORLD, Case("cpu", seconds))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_measure_both(world_size: int, ranks: RankPools) -> None:
    first, *others = ranks(world_size)(measured, 1e-6)
    assert first is not None and others == [None] * (world_size - 1)
    assert first.key == Key.here("cpu", "reached", world_size) and not first.left_out
    assert list(first.transfers.samples) == ["shm", "gloo"]
    assert {len(each) for each in first.transfers.samples.values()} == {1}, "no larger ones in so little time"
    assert Measured.from_json(first.to_json()) == first


def to_the_end(here: Here) -> Measured | None:
    transfers_worker.SIZES = (64, 4096, 100_000)
    return measured(here, 1000.0)


def steps(here: Here) -> list[float]:
    """What ranks make of rounds at which rank 1 is late."""
    transport: Any = here.transport("gloo")
    step = transfers_worker._Step(transport, torch.device("cpu"))
    step.prepare(64)
    clock = step._clock
    step._clock = lambda: clock() + next(late)  # type: ignore[method-assign]
    late = iter([0.0, 100.0 * here.rank] * 3)
    return [step.seconds() for _ in range(3)]


def test_sizes_and_the_slowest_rank(ranks: RankPools) -> None:
    with ranks.expendable(2) as some:
        first, _ = some(to_the_end)
        assert first is not None and first.transfers.sizes == [64, 4096, 100_000]
        one, other = some(steps)
    assert one == other and min(one) > 1.0, "100 s for at most 50 steps"


def over_places(here: Here, seconds: float) -> Measured | None:
    """A one-sided transport that must be told where messages go: as symmetric memory, without a GPU."""
    symm_ranks.register()
    transfers_worker.PAIRS = {"cpu": ("on cpu", "gloo")}  # type: ignore[attr-defined]
    return measured(here, seconds)


def test_ranks_measure_puts_into_places(ranks: RankPools) -> None:
    with ranks.expendable(2) as some:
        first, _ = some(over_places, 1e-6)
    assert first is not None and list(first.transfers.samples) == ["on cpu", "gloo"]


def without_memory(here: Here) -> Measured | None:
    symm_ranks.register()
    symm_ranks.fails("meet", "peer access is not supported")
    transfers_worker.PAIRS = {"cpu": ("on cpu", "gloo")}  # type: ignore[attr-defined]
    return measured(here, 1e-6)


def test_a_transport_that_does_not_work_is_left_out(ranks: RankPools) -> None:
    with ranks.expendable(2) as some:
        first, _ = some(without_memory)
    assert first is not None and list(first.transfers.samples) == ["gloo"] and first.key.domain == "across"
    assert "peer access is not supported" in first.left_out["on cpu"]


COMMANDS = {
    "its own": ["-m", "tokenring", "rates", "--transports", "--ranks", "2"],
    "torchrun's": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tokenring", "rates", "--transports"],
}


@pytest.mark.parametrize("whose", COMMANDS)
def test_the_command_on_processes(whose: str, tmp_path: Path) -> None:
    """It keeps a table, which doctor shows and which is right for ranks such as these."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *COMMANDS[whose], "--device", "cpu", "--seconds", "0.0001"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    key = Key.here("cpu", "reached", 2)
    path = tmp_path / "tokenring" / key.file_name
    assert done.stdout.startswith(f"{key}\n\nmessage  ") and done.stdout.endswith(f"\nkept in {path}\n")
    found, note = kept(key, {"XDG_CACHE_HOME": str(tmp_path)})
    assert found is not None and not note and "\n".join(table(key, found)) in done.stdout
    shown = report(examine(environment))
    assert f"measured   2 ranks, every two ranks reach each other's memory: {taken(key, found)}; shm/gloo in" in shown


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--ranks", "1"], "1 rank moves nothing: use 2 or more"),
        (["--ranks", "2", "--seconds", "0"], "--seconds 0: use more than 0"),
        (["--ranks", "2", "--seconds", "nan"], "--seconds nan: use more than 0, and a number"),
        (["--ranks", "2", "--device", "npu"], "--device npu: `auto` chooses among transports for cuda and cpu alone"),
        ([], "say how many processes to start"),
        (["--dim", "64"], "unrecognized arguments: --dim"),
    ],
)
def test_the_command_refuses(argv: list[str], says: str, own_signals: None) -> None:
    err = StringIO()
    assert main(["rates", "--transports", *argv], StringIO(), err, StringIO()) == 2
    assert says in err.getvalue()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_command_without_a_device(own_signals: None) -> None:
    err = StringIO()
    assert main(["rates", "--transports", "--ranks", "2", "--device", "cuda"], StringIO(), err, StringIO()) == 2
    assert "--device cuda: torch finds none here; `tokenring doctor` says what is missing" in err.getvalue()


def test_a_part_of_the_word_is_refused() -> None:
    err = StringIO()
    assert main(["rates", "--transport"], StringIO(), err, StringIO()) == 2
    assert "unrecognized arguments: --transport" in err.getvalue()


def test_nothing_to_choose_among_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenring.console import Console
    from tokenring.planner.transfers_command import _show

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = StringIO()
    one = Measured(KEY, Transfers({"gloo": rows((MB, 9.0))}), {"shm": "no room"})
    assert _show(one, None, Console(out, StringIO(), {})) == 1  # type: ignore[arg-type]
    assert out.getvalue().startswith("shm is left out: no room") and "nothing to choose among" in out.getvalue()
    assert not (tmp_path / "tokenring").exists()


# ---------- "auto" on the CPU


def workload(tokens: int) -> Workload:
    return Workload(1, tokens, tokens, 2, 2, 32)


def calls(tokens: int) -> Calls:
    return Calls(2, "tokenring", "zigzag", "causal", 2, 2, 1, 32, torch.float32, None, given_length=tokens)


def keeps(here: Here, tables: dict[int, str], home: str) -> None:
    """A cache of its own for each rank, with these tables in it."""
    os.environ["XDG_CACHE_HOME"] = f"{home}/{here.rank}"
    if here.rank in tables:
        path = keep(Key.here("cpu", "reached", here.world_size), SHM)
        assert path is not None
        path.write_text(tables[here.rank])


def text(transfers: Transfers, ranks: int = 2) -> str:
    return to_json(Key.here("cpu", "reached", ranks), transfers)


def goes_by(here: Here, tables: dict[int, str], home: str, tokens: int) -> tuple[str, str, list[str], Local]:
    """What is taken for a call, its reason, what is logged, and the call's results."""
    keeps(here, tables, home)
    with said() as heard, ContextParallel(schedule="tokenring", timeout_seconds=10.0) as cp:
        found = compute(cp, calls(tokens))
        transport: Any = cp.transport
        return type(transport.now).__name__, transport.why, heard, found


TAKEN = {
    "nobody has any": ({}, "ShmTransport", ""),
    "all say shm": ({0: SHM, 1: SHM}, "ShmTransport", "measured: shm "),
    "all say gloo": ({0: GLOO, 1: GLOO}, "GlooTransport", "measured: gloo "),
    "rank 0 says gloo": ({0: GLOO, 1: SHM}, "GlooTransport", "measured: gloo "),
    "rank 0 says shm": ({0: SHM, 1: GLOO}, "ShmTransport", "measured: shm "),
    "rank 0 alone": ({0: GLOO}, "GlooTransport", "measured: gloo "),
    "rank 1 alone": ({1: GLOO}, "ShmTransport", ""),
}


@pytest.mark.parametrize("who", TAKEN)
def test_all_ranks_go_by_rank_0(who: str, ranks: RankPools, tmp_path: Path) -> None:
    tables, name, why = TAKEN[who]
    with ranks.expendable(2) as some:
        found = some(goes_by, {rank: text(each) for rank, each in tables.items()}, str(tmp_path), 32)
    assert [each[0] for each in found] == [name] * 2, found
    assert found[0][1] == found[1][1] and found[0][1].startswith(why) and bool(found[0][1]) == bool(why)
    for _, reason, heard, _ in found:
        assert heard == ([f"transport 'auto' takes {name[:-9].lower()}: {reason}"] if why else [])
    check_exact(calls(32).whole([each[-1] for each in found]), calls(32).reference())


def own(self: Preferring, domain: Any, unavailable: Any, rank: int, ranks: int, gather: Any) -> Choice:
    """A mutant: each rank goes by its own table."""
    return choice_of(self.kind, domain, unavailable, ranks, self._message_bytes)


def differ(here: Here, tables: dict[int, str], home: str) -> str:
    keeps(here, tables, home)
    Preferring._chosen = own  # type: ignore[method-assign]
    try:
        made: Any = make_transport("auto", dist.group.WORLD, 3.0)  # type: ignore[arg-type]
    except tr.PeerLost as error:
        return str(error)
    return type(made.now).__name__


def test_ranks_that_go_by_their_own_tables_part(ranks: RankPools, tmp_path: Path) -> None:
    with ranks.expendable(2) as some:
        first, second = some(differ, {0: text(GLOO), 1: text(SHM)}, str(tmp_path))
    assert second == "ShmTransport" and "did not come within" in first


def test_the_first_call_decides(ranks: RankPools, tmp_path: Path) -> None:
    """By what a ring of it sends in a step."""
    small, large = workload(32), workload(4096)
    assert (small.ring_bytes(2), large.ring_bytes(2)) == (2 * 32 * 2 * 32 * 4 // 2, MB)
    with ranks.expendable(2) as some:
        for tokens, name in ((32, "GlooTransport"), (4096, "ShmTransport")):
            found = some(goes_by, {0: text(CROSSING)}, str(tmp_path / str(tokens)), tokens)
            assert [each[0] for each in found] == [name] * 2
            assert found[0][1].endswith(" at 8 KB" if tokens == 32 else " at 1 MB"), found[0][1]


def early(here: Here, tables: dict[int, str], home: str) -> tuple[str, str]:
    keeps(here, tables, home)
    with ContextParallel(timeout_seconds=10.0) as cp:
        transport: Any = cp.transport
        return type(transport.now).__name__, transport.why


def test_before_any_call_what_is_faster_at_every_size(ranks: RankPools, tmp_path: Path) -> None:
    with ranks.expendable(2) as some:
        found = some(early, {0: text(GLOO)}, str(tmp_path / "gloo"))
        assert found == [("GlooTransport", "measured: gloo 40000 µs against shm 80000 µs at 64 MB and less")] * 2
        name, why = some(early, {0: text(CROSSING)}, str(tmp_path / "crossing"))[1]
    assert name == "ShmTransport" and why.endswith("which is faster is a matter of size, here unknown")


@pytest.mark.parametrize("spoilt", ["", "{", text(GLOO, ranks=3), text(GLOO).replace('"version": 1', '"version": 0')])
def test_a_broken_cache_stops_nobody(spoilt: str, ranks: RankPools, tmp_path: Path) -> None:
    """Rank 0's is broken, rank 1's says something else: shared memory on both, with one note."""
    with ranks.expendable(2) as some:
        found = some(goes_by, {0: spoilt, 1: text(GLOO)}, str(tmp_path), 32)
    assert [each[0] for each in found] == ["ShmTransport"] * 2
    assert found[0][1] == found[1][1] and f"{tmp_path}/0/tokenring/transports-" in found[0][1]
    assert "is not used: it is " in found[0][1] and found[0][1].endswith("makes another")
    assert [len(each[2]) for each in found] == [2, 1], "rank 0 has read it, both say what they take"


def planned(here: Here, tables: dict[int, str], home: str) -> str:
    keeps(here, tables, home)
    x = torch.zeros(1, 32, 2, 32)
    with ContextParallel(schedule="auto:ring,direct-q", timeout_seconds=20.0) as cp:
        tr.attention(x, x, x, cp, tr.Causal())
        return tr.plan(x, x, x, cp, tr.Causal()).reason


def test_plans_say_that_it_was_measured(ranks: RankPools, tmp_path: Path) -> None:
    with ranks.expendable(2) as some:
        for each in some(planned, {0: text(GLOO)}, str(tmp_path / "a")):
            assert "; measured: gloo " in each and " against shm " in each and each.endswith(" at 16 KB"), each
        assert all("measured: " not in each and "rule: " not in each for each in some(planned, {}, str(tmp_path / "b")))


# ---------- "auto" on CUDA, with stand-ins for both transports


class AutoByTable(symm_ranks.AutoOnCpu):
    """As on GPUs that reach each other."""

    _choose = cuda.CudaTransport._choose


def on_cuda(here: Here, tables: dict[int, str], home: str, message_bytes: int) -> tuple[str, str]:
    symm_ranks.register()
    os.environ["XDG_CACHE_HOME"] = f"{home}/{here.rank}"
    key = replace(KEY, kind="cuda", ranks=here.world_size)
    Key.here = staticmethod(lambda kind, domain, ranks: replace(key, domain=domain))  # type: ignore[method-assign]
    cuda._facts = lambda: {"boot_id": "", "device": None, "symm": None, "nccl": None}
    if here.rank in tables:
        path = keep(key, SHM)
        assert path is not None
        path.write_text(tables[here.rank])
    assert dist.group.WORLD is not None
    made = AutoByTable(dist.group.WORLD, 5.0, message_bytes)
    made.close()
    return type(made.now).__name__, made.why


def test_cuda_goes_by_rank_0_too(ranks: RankPools, tmp_path: Path) -> None:
    key = replace(KEY, kind="cuda", ranks=2)
    crossing = Transfers({"symm": CROSSING.samples["shm"], "nccl": CROSSING.samples["gloo"]})
    with ranks.expendable(2) as some:
        tables = {0: to_json(key, crossing), 1: "broken"}
        for message_bytes, found in ((4096, ("GlooTransport", "measured: nccl 30 µs against symm 90 µs at 4 KB")),
                                     (MB, ("OnCpu", "measured: symm 100 µs against nccl 300 µs at 1 MB"))):  # fmt: skip
            assert some(on_cuda, tables, str(tmp_path / str(message_bytes)), message_bytes) == [found] * 2
        name, why = some(on_cuda, {1: tables[0]}, str(tmp_path / "b"), 4096)[0]
        assert name == "OnCpu" and why.startswith("rule: every two ranks reach each other's memory: ")
        name, why = some(on_cuda, {0: "broken"}, str(tmp_path / "c"), 4096)[1]
        assert name == "OnCpu" and why.startswith("rule: ") and "is not used: it is no table of transports" in why
