"""Transports that were measured: what a table holds, where it is kept, and the command that measures."""

from __future__ import annotations

import os
import subprocess
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import symm_ranks
import torch
import torch.distributed as dist
from patience import patient
from ranks import Here, RankPools
from said import said
from test_choice import BOTH, MB, rows

from tokenring.backends import table_keys
from tokenring.backends.table_keys import transfers_key
from tokenring.backends.transports.auto import choice_of
from tokenring.cli.doctor.examine import SECONDS, examine
from tokenring.cli.doctor.report import report
from tokenring.cli.main import main
from tokenring.cli.rates import transports_worker as transfers_worker
from tokenring.cli.rates.transports_worker import TransportCase, TransportMeasured, measure
from tokenring.tables.transport_choice import TransportChoice, choose
from tokenring.tables.transport_times import Transfers, TransportKey, from_json, keep, kept, table, taken, to_json

KEY = TransportKey("cpu", "a processor", "reached", 4, "2.13")
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
    monkeypatch.setattr(table_keys, "transfers_key", lambda kind, domain, ranks: KEY)
    spoil, why = SPOILT[what]
    path = keep(KEY, GLOO)
    assert path is not None and choice_of("cpu", "reached", BOTH, 4).transport == "gloo"
    path.write_text(spoil(path.read_text()))
    found, note = kept(KEY)
    assert found is None and note.startswith(f"{path} is not used: ") and why in note, note
    assert note.endswith("; `tokenring rates --transports` makes another")
    with said() as heard:
        chosen = choice_of("cpu", "reached", BOTH, 4)
    assert chosen == TransportChoice("shm", f"{choose('cpu', 'reached', BOTH).reason}; {note}")
    assert heard == [f"measured transports: {note}"]


def test_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "tokenring"
    (folder / KEY.file_name).mkdir(parents=True)
    assert "it cannot be read: Is a directory" in kept(KEY, {"XDG_CACHE_HOME": str(tmp_path)})[1]
    (tmp_path / "file").touch()
    assert "it cannot be read: Not a dir" in kept(replace(KEY, ranks=2), {"XDG_CACHE_HOME": f"{tmp_path}/file"})[1]


# ---------- measuring


def measured(here: Here, seconds: float) -> TransportMeasured | None:
    assert dist.group.WORLD is not None
    return measure(dist.group.WORLD, TransportCase("cpu", seconds))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_measure_both(world_size: int, ranks: RankPools) -> None:
    first, *others = ranks(world_size)(measured, 1e-6)
    assert first is not None and others == [None] * (world_size - 1)
    assert first.key == transfers_key("cpu", "reached", world_size) and not first.left_out
    assert list(first.transfers.samples) == ["shm", "gloo"]
    assert {len(each) for each in first.transfers.samples.values()} == {1}, "no larger ones in so little time"
    assert TransportMeasured.from_json(first.to_json()) == first


def to_the_end(here: Here) -> TransportMeasured | None:
    transfers_worker.SIZES = (64, 4096, 100_000)
    return measured(here, 1000.0)


def steps(here: Here) -> list[float]:
    """What ranks make of rounds at which rank 1 is late."""
    transport: Any = here.transport("gloo")
    step = transfers_worker._Step(transport, torch.device("cpu"))
    step.prepare(64)
    clock = step._clock
    step._clock = lambda: clock() + next(late)
    late = iter([0.0, 100.0 * here.rank] * 3)
    return [step.seconds() for _ in range(3)]


def test_sizes_and_the_slowest_rank(ranks: RankPools) -> None:
    with ranks.expendable(2) as some:
        first, _ = some(to_the_end)
        assert first is not None and first.transfers.sizes == [64, 4096, 100_000]
        one, other = some(steps)
    assert one == other and min(one) > 1.0, "100 s for at most 50 steps"


def over_places(here: Here, seconds: float) -> TransportMeasured | None:
    """A one-sided transport that must be told where messages go: as symmetric memory, without a GPU."""
    symm_ranks.register()
    transfers_worker.PAIRS = {"cpu": ("on cpu", "gloo")}  # type: ignore[attr-defined]
    return measured(here, seconds)


def test_ranks_measure_puts_into_places(ranks: RankPools) -> None:
    with ranks.expendable(2) as some:
        first, _ = some(over_places, 1e-6)
    assert first is not None and list(first.transfers.samples) == ["on cpu", "gloo"]


def without_memory(here: Here) -> TransportMeasured | None:
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
def test_the_command_on_processes(whose: str, tmp_path: Path, warm: str) -> None:
    """It keeps a table, which doctor shows and which is right for ranks such as these."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [warm, *COMMANDS[whose], "--device", "cpu", "--seconds", "0.0001"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(90))
    assert done.returncode == 0, done.stderr
    key = transfers_key("cpu", "reached", 2)
    path = tmp_path / "tokenring" / key.file_name
    assert done.stdout.startswith(f"{key}\n\nmessage  ") and done.stdout.endswith(f"\nkept in {path}\n")
    found, note = kept(key, {"XDG_CACHE_HOME": str(tmp_path)})
    assert found is not None and not note and "\n".join(table(key, found)) in done.stdout
    shown = report(examine(environment, patient(SECONDS)))
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
    from tokenring.cli.rates.transports import _show
    from tokenring.display.console import Console

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = StringIO()
    one = TransportMeasured(KEY, Transfers({"gloo": rows((MB, 9.0))}), {"shm": "no room"})
    assert _show(one, Namespace(json=False), Console(out, StringIO(), {})) == 1
    assert out.getvalue().startswith("shm is left out: no room") and "nothing to choose among" in out.getvalue()
    assert not (tmp_path / "tokenring").exists()
