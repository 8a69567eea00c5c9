"""The pools of ranks themselves: they answer, report what fails, never hang, and leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from patience import patient
from ranks import Here, RankError, RankPools

TESTS = Path(__file__).resolve().parents[1]


def who(here: Here, add: int = 0) -> tuple[int, int, int]:
    assert torch.get_num_threads() == 1
    total = torch.tensor(here.rank + add)
    dist.all_reduce(total)
    return here.rank, here.world_size, int(total)


def process(here: Here) -> int:
    return os.getpid()


def environment(here: Here) -> tuple[str, str]:
    return os.environ["XDG_CACHE_HOME"], os.environ["TOKENRING_PLAN_CACHE"]


def fail(here: Here, at: int) -> None:
    if here.rank == at:
        raise ValueError(f"rank {at} fails on purpose")
    dist.barrier()


def warn(here: Here) -> None:
    warnings.warn("on purpose", stacklevel=1)


def sleep(here: Here, at: int) -> None:
    time.sleep(3600 if here.rank == at else 0)


def die(here: Here, at: int) -> None:
    if here.rank == at:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def unpicklable(here: Here) -> object:
    return lambda: None


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("world_size", range(1, 9))
def test_answers(world_size: int, ranks: RankPools) -> None:
    total = sum(range(world_size)) + world_size
    assert ranks(world_size)(who, add=1) == [(rank, world_size, total) for rank in range(world_size)]


def test_processes_are_kept(ranks: RankPools) -> None:
    assert ranks(2)(process) == ranks(2)(process)


def test_the_users_own_cache_is_neither_read_nor_written(ranks: RankPools) -> None:
    """Whatever process the ranks are forks of: what is kept there would answer for what a test is to find out."""
    folder, plans = ranks(2)(environment)[0]
    assert plans == os.environ["TOKENRING_PLAN_CACHE"] == "off"
    assert Path(folder).is_relative_to(tempfile.gettempdir())


def test_failure_comes_back_with_its_traceback(ranks: RankPools) -> None:
    """The other ranks, which wait for the one that failed, are not waited for; the pool is made anew."""
    before = ranks(3)(process)
    with pytest.raises(RankError, match=r"(?s)rank 1: Traceback.*in fail.*ValueError: rank 1 fails on purpose"):
        ranks(3)(fail, 1)
    assert not any(alive(pid) for pid in before)
    assert not set(before) & set(ranks(3)(process))
    assert len(ranks(3)(who)) == 3


def test_warnings_are_errors(ranks: RankPools) -> None:
    with pytest.raises(RankError, match="UserWarning: on purpose"):
        ranks(2)(warn)


def test_what_does_not_pickle(ranks: RankPools) -> None:
    with pytest.raises(RankError, match="pickle"):
        ranks(1)(unpicklable)


def test_silent_rank_is_named_and_killed(ranks: RankPools) -> None:
    with ranks.expendable(3) as some:
        pids = some(process)
        with pytest.raises(RankError, match=r"^rank 2 of 3 gave no answer within"):
            some.within(0.5, sleep, 2)
        assert not any(alive(pid) for pid in pids)
        with pytest.raises(RankError, match="were killed"):
            some(who)


def test_dead_rank_is_named(ranks: RankPools) -> None:
    with ranks.expendable(2) as some, pytest.raises(RankError, match="rank 1: died with exit code -9"):
        some(die, 1)


def test_expendable_pools_leave_nothing(ranks: RankPools) -> None:
    with ranks.expendable(2) as some:
        pids = some(process)
    assert not any(alive(pid) for pid in pids)


SESSION = """
import os, time
from pathlib import Path
import ranks
from ranks import Here, RankPools

ranks.PRELOADED[:] = ["torch.distributed"]  # it computes nothing

def process(here: Here) -> list[int]:
    return [os.getpid(), os.getppid()]  # the latter is the fork server

def hang(here: Here) -> None:
    time.sleep(3600)

def test_session(ranks: RankPools) -> None:
    pids = {os.getpid(), *ranks(1)(process)[0], *ranks(2)(process)[0], *ranks(2)(process)[1]}
    Path("pids").write_text(" ".join(map(str, pids)) + " .")
    if HANGS:
        ranks(2)(hang)
"""


def session(folder: Path, hangs: bool) -> tuple[subprocess.Popen[str], list[int]]:
    """A pytest session of its own, and the processes in it, once they have started."""
    folder.joinpath("conftest.py").write_text((TESTS / "conftest.py").read_text())
    folder.joinpath("test_session.py").write_text(SESSION.replace("HANGS", str(hangs)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_session.py"]
    command.append(f"--basetemp={folder.with_name(folder.name + '_own')}")  # pytest's own files are not ours
    paths = os.pathsep.join(map(str, (TESTS / "support", TESTS / "fakes", TESTS.parent)))
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(folder)}
    made = subprocess.Popen(command, cwd=folder, env=environment, text=True, start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    deadline, pids = time.monotonic() + patient(60), folder / "pids"
    while not pids.exists() or not pids.read_text().endswith("."):
        assert time.monotonic() < deadline and (made.poll() is None or not hangs), made.communicate()[0]
        time.sleep(0.05)
    return made, [int(pid) for pid in pids.read_text().split()[:-1]]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("ending", ["end", "SIGINT", "SIGKILL"])
def test_a_session_leaves_nothing(ending: str, tmp_path: Path) -> None:
    """However it ends, also in the middle of a call: no process; and no file, unless Python could not tidy up."""
    started, pids = session(tmp_path, hangs=ending != "end")
    assert len(pids) == 5
    if ending == "SIGINT":
        os.killpg(started.pid, signal.SIGINT)  # as Ctrl-C does: to every process
    elif ending != "end":
        started.send_signal(signal.Signals[ending])
    said = started.communicate(timeout=patient(60))[0]
    assert ending != "end" or started.returncode == 0, said
    deadline = time.monotonic() + patient(20)
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    if ending in ("end", "SIGINT"):
        files = {path.name for path in tmp_path.iterdir()}
        assert files <= {"conftest.py", "test_session.py", "pids", "__pycache__"}
