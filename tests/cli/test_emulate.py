"""Emulated links, really made: runs, failures, and that nothing is left behind. Needs root and network namespaces."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from patience import patient

from tokenring.cli.bench.results import MEASURED, RaceReport
from tokenring.cli.bench.sleeping import Sleeping
from tokenring.emulate import Emulated, build, guardian
from tokenring.emulate.net import NUMBERS
from tokenring.errors import BackendUnavailable, ConfigurationError, PeerLost
from tokenring.sequence.region import Patch

SUPPORT = Path(__file__).resolve().parents[1] / "support"
HERE = {"PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
GONE_SECONDS = 20.0
needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")),
    reason="emulated links need root and iproute2",
)
# Holds an emulation until it is killed, with ranks that would run for a minute.
# Whoever starts the tests under nohup has SIGHUP ignored in all that they start.
HOLDER = """
import signal
from tokenring.emulate import Emulated
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with Emulated("switch", 2, 0.1) as net, net.start("net_rank", ["sleep"]) as ranks:
    print("up", flush=True)
    while ranks.exit_code() is None:
        ranks.read(0.1)
"""


@pytest.fixture
def nothing_left() -> Iterator[None]:
    yield
    assert guardian.names(f"tokenring-{os.getpid()}-") == []
    assert children() == []


def children() -> list[str]:
    """Guardians and ranks of ours that still live."""
    me = os.getpid()
    return [text for text in Path(f"/proc/{me}/task/{me}/children").read_text().split() if "guardian" in command(text)]


def command(process: str) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture
def warm_ranks(warm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started has torch already; guardians start as real Pythons do."""
    monkeypatch.setattr(sys, "executable", warm)


def eventually(holds: Callable[[], bool], seconds: float = GONE_SECONDS) -> bool:
    deadline = time.monotonic() + patient(seconds)
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@needs_root
@pytest.mark.testbed
@pytest.mark.usefixtures("nothing_left")
class TestRuns:
    @pytest.mark.usefixtures("warm_ranks")
    @pytest.mark.parametrize(("kind", "options"), [("full-mesh", {}), ("two-node", {"nic_per_rank": True})])
    def test_ranks_meet(self, kind: str, options: dict[str, bool]) -> None:
        shown: list[str] = []
        with Emulated(kind, 4, 0.25, **options) as net:
            assert net.run("net_rank", ["meet"], 60, environment=HERE, show=shown.append) == ["sum 6", "a second line"]
            assert guardian.processes_in(net.namespaces) == []
            net.run("platform", timeout_seconds=patient(30), show=shown.append)
        assert len(shown) == 3 and net.namespaces == []

    @pytest.mark.parametrize(
        ("what", "seconds", "rank", "says"),
        [
            ("fail", 30, 2, "rank 2 ended with exit code 3; the others were ended too; the end of its log:"),
            ("die", 30, 1, "rank 1 was ended by SIGKILL"),
            ("stop", 2, 1, "rank 1 stopped after 2 s"),
            ("sleep", 2, 0, "ranks 0, 1, 2, 3 still running after 2 s"),
        ],
    )
    def test_who_failed_is_named(self, what: str, seconds: float, rank: int, says: str) -> None:
        with Emulated("switch", 4, 0.25) as net:
            with pytest.raises(PeerLost) as lost:
                net.run("net_rank", [what], seconds, environment=HERE)
            assert guardian.processes_in(net.namespaces) == []
        assert says in str(lost.value) and lost.value.rank == rank and lost.value.certain == (what != "sleep")

    @pytest.mark.usefixtures("warm_ranks")
    def test_two_at_a_time(self) -> None:
        with Emulated("full-mesh", 2, 0.25) as one, Emulated("full-mesh", 2, 0.25) as other:
            assert not set(one.namespaces) & set(other.namespaces)
            assert [net.run("net_rank", ["meet"], 60, environment=HERE)[0] for net in (one, other)] == ["sum 1"] * 2

    def test_a_failure_on_the_way_up_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tokenring.emulate.plan.bucket", lambda gbit, packet: "root tbf rate nonsense")
        with pytest.raises(BackendUnavailable, match="'modprobe sch_tbf'"), Emulated("switch", 2, 0.1):
            pass

    def test_a_dead_guardian_is_made_up_for(self) -> None:
        with Emulated("switch", 2, 0.1) as net:
            assert net._guardian is not None
            net._guardian.kill()

    def test_not_up(self) -> None:
        net = Emulated("switch", 2, 0.1)
        with pytest.raises(ConfigurationError, match="inside its 'with'"):
            net.run("platform")
        with net, pytest.raises(ConfigurationError, match="is up already"), net:
            pass


def hold() -> tuple[subprocess.Popen[str], list[str]]:
    """A process with an emulation that is up, and its namespaces."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=os.environ | HERE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    found = guardian.names(f"tokenring-{process.pid}-")
    assert len(found) == 3 and eventually(lambda: len(guardian.processes_in(found)) >= 2)
    return process, found


def guardian_of(process: int) -> int:
    entries = [entry for entry in os.listdir("/proc") if entry.isdigit() and f"tokenring-{process}-" in command(entry)]
    return next(int(entry) for entry in entries if "guardian" in command(entry))


@needs_root
@pytest.mark.testbed
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_death_leaves_nothing(number: signal.Signals) -> None:
    process, found = hold()
    ranks, watcher = guardian.processes_in(found), guardian_of(process.pid)
    with process:
        os.kill(process.pid, number)
    assert eventually(lambda: guardian.names(f"tokenring-{process.pid}-") == [])
    assert eventually(lambda: not any(guardian.start_time(each) for each in [*ranks, watcher]))


@needs_root
@pytest.mark.testbed
def test_what_nobody_could_remove_the_next_start_does(nothing_left: None) -> None:
    process, found = hold()
    ranks = guardian.processes_in(found)
    with process:
        os.kill(guardian_of(process.pid), signal.SIGKILL)
        process.kill()
    other, live = hold()
    with other:
        assert guardian.names(f"tokenring-{process.pid}-") == [], "the second start has removed them"
        assert eventually(lambda: not any(guardian.start_time(each) for each in ranks))
        with Emulated("switch", 2, 0.1):
            assert guardian.names(f"tokenring-{other.pid}-") == live, "a live run's stay"
        other.kill()
    assert eventually(lambda: guardian.names(f"tokenring-{other.pid}-") == [])


def test_names_say_whose_they_are() -> None:
    prefix = guardian.prefix_of(os.getpid(), next(NUMBERS))
    assert guardian.NAME.fullmatch(prefix + "r0") and guardian.NAME.fullmatch(prefix + "network")
    assert not guardian.NAME.fullmatch("tokenring-of-a-user")


def test_whoever_finds_ip_removes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in sbin, which is not on everybody's PATH: what builds namespaces and what removes them look there."""
    asked = tmp_path / "asked"
    (tmp_path / "ip").write_text(f"#!/bin/sh\n/bin/cat > {asked}\n", encoding="utf-8")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(guardian, "TOOL_FOLDERS", (str(tmp_path),))
    assert build.tool("ip") == str(tmp_path / "ip")
    guardian.remove(["tokenring-1-1-0-r0"])
    assert asked.read_text(encoding="utf-8") == "netns del tokenring-1-1-0-r0\n"


class TestWhatAMachineLacks:
    def test_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(BackendUnavailable, match="need root, and this is user 1000: run it with sudo"):
            build.check_machine()

    def test_iproute2(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(shutil, "which", lambda name, path: None)
        with pytest.raises(BackendUnavailable, match="the command 'ip': install iproute2"):
            build.check_machine()

    def test_linux(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        with pytest.raises(BackendUnavailable, match="this is darwin"):
            build.check_machine()


# ---------- the benchmark


def test_sleeping_takes_its_time() -> None:
    """4 flop a pair, head and dimension at 0.01 TFLOP/s; 20 calls of 0.84 ms, none of which computes."""
    kernel, q = Sleeping(0.01), torch.randn(1, 4, 64, 128)
    kernel.forward(q, q, q, patch=Patch(0, 64, 0, 64), scale=1.0)
    began = time.perf_counter()
    for _ in range(20):
        out, lse = kernel.forward(q, q, q, patch=Patch(0, 64, 0, 64), scale=1.0)
    took = time.perf_counter() - began
    assert took >= 20 * 4 * 64 * 64 * 4 * 128 / 1e10 - 0.003
    assert out.shape == q.shape and out.dtype == lse.dtype == torch.float32 and lse.shape == q.shape[:3]
    half = Patch(0, 64, 0, 64, high=0)
    found = kernel.backward(q, q, q[:, :2], q[:, :2], lse, None, out=out, patch=half, scale=1.0)
    assert [each.shape[1] for each in found] == [4, 2, 2] and not any(bool(each.any()) for each in found)


def test_each_call_takes_a_launch_beside() -> None:
    kernel, q = Sleeping(1e6, call_seconds=0.003), torch.randn(1, 4, 8, 16)
    began = time.perf_counter()
    for _ in range(5):
        kernel.forward(q, q, q, patch=Patch(0, 8, 0, 8), scale=1.0)
    assert time.perf_counter() - began >= 5 * 0.003 - 0.003


SMALL = ["--ranks", "4", "--seq-len", "128", "--heads", "4", "--head-dim", "16", "--rounds", "2", "--peers", "none"]


@needs_root
@pytest.mark.testbed
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("compute", [[], ["--compute", "0.01"]], ids=["computing", "sleeping"])
def test_bench(tmp_path: Path, compute: list[str]) -> None:
    links = ["--emulate", "two-node", "--link-gbit", "0.25", "--uplink-gbit", "0.05"]
    arguments = [*SMALL, *links, *compute, "--json", "b.json", "--picture", "b.svg", "--schedules", "ring,direct-kv"]
    command = [sys.executable, "-m", "tokenring", "bench", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(100))
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    text = "emulated links: two-node, full-mesh inside, links of 0.25 Gbit/s, one uplink of 0.05 Gbit/s"
    assert text in done.stdout and ("Results are not checked" in done.stdout) == bool(compute)
    report = RaceReport.from_json((tmp_path / "b.json").read_text())
    assert str(report.case.emulate) in text and report.case.compute_tflops == (0.01 if compute else None)
    ours = report.entries[:2]
    assert [entry.status for entry in report.entries] == [MEASURED] * (2 if compute else 3)
    for entry in ours:
        assert entry.wire == "node0>node1" or entry.wire == "node1>node0"
        assert entry.wire_s is not None and entry.median_s > 0.9 * entry.wire_s
        assert bool(entry.errors) != bool(compute)
    assert guardian.names("tokenring-") == [] or not guardian.leftovers()
