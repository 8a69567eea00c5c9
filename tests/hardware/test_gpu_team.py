"""gpu_transports.py: one set of processes for a number of ranks, and checks that fail in every way. Over Gloo."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import symm_ranks
import torch
import torch.distributed as dist
from ranks import PRELOADED, Here, RankPools

from tokenring.backends.registry import make_transport
from tokenring.cli.bench import torch_layers
from tokenring.errors import PeerLost
from tokenring.integrations import torch_async_tp

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "hardware" / "gpu"))

import gpu_linears  # noqa: E402
import gpu_nccl  # noqa: E402
import gpu_programs  # noqa: E402
import gpu_smoke  # noqa: E402
import gpu_team  # noqa: E402
import gpu_transports  # noqa: E402
from gpu_team import Kind, Leaves, NotHere, Teams  # noqa: E402
from gpu_transports import Asked  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # processes that import torch, on a machine that is busy
Lines = list[tuple[str, str, bool | None]]
LONG = 300.0  # for a check that is to end: a busy machine takes its time


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    """Of this module alone: they know transports that nobody else is to hear of."""
    pools = RankPools()
    yield pools
    pools.close()


def on_a_cpu(rank: int) -> None:
    """In place of the GPU."""
    torch.set_num_threads(1)


TWO, THREE = Kind(2, (("SET_FOR", "ranks"),), on_a_cpu), Kind(3, (), on_a_cpu)


# ---------- what they are asked


def meets(rank: int) -> str:
    """Its process, once all ranks have met."""
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    return f"{os.getpid()} {int(total)} {os.environ.get('SET_FOR')}"


def raises(rank: int) -> str:
    raise ValueError("wrong bytes")


def crashes(rank: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return "fine"


def hangs(rank: int) -> str:
    if rank == 1:
        time.sleep(600)
    return "fine"


def prints(rank: int) -> str:
    os.write(1, b"\xff\xfe{no text")
    return "fine"


def is_not_here(rank: int) -> str:
    raise NotHere("no such library")


def is_gone(rank: int) -> str:
    if rank == 1:
        raise Leaves("gone")
    return "rank 1 is named"


def starts_not(rank: int) -> None:
    raise RuntimeError("CUDA error: no device")


class Forks:
    """Processes of a context as `spawn` is, environment and all, that have torch from the start."""

    def __init__(self) -> None:
        self._server = mp.get_context("forkserver")
        self._server.set_forkserver_preload(PRELOADED)
        self.Pipe = self._server.Pipe

    def Process(self, target: Any, args: Any, daemon: bool) -> Any:
        return self._server.Process(target=in_environment, args=(dict(os.environ), target, args), daemon=daemon)


def in_environment(environment: dict[str, str], target: Any, args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> Teams:
    """As on GPUs."""
    monkeypatch.setattr(gpu_team, "START_SECONDS", LONG)
    return Teams()


@pytest.fixture
def teams(spawned: Teams, monkeypatch: pytest.MonkeyPatch) -> Teams:
    """Of processes that need not import torch: what starts them is no matter."""
    made = Forks()
    monkeypatch.setattr(gpu_team, "mp", SimpleNamespace(get_context=lambda method: made))
    return spawned


def lines_of(teams: Teams, *asked: tuple[Any, Kind], seconds: float = 100 * LONG) -> Lines:
    said: Lines = []
    checks = [Asked(check.__name__, check, kind, LONG) for check, kind in asked]
    gpu_transports.run_checks(lambda name, value, _, met: said.append((name, value, met)), checks, seconds, teams)
    return said


# ---------- one set of processes a world size


@pytest.mark.slow
def test_processes_that_are_started_as_on_gpus(spawned: Teams) -> None:
    said = lines_of(spawned, (meets, TWO), (meets, TWO))
    assert spawned.started == 2 and said[0] == said[1] and said[0][1].endswith(" 3 ranks")


def test_one_set_of_processes_for_each_number_of_ranks(teams: Teams) -> None:
    """All checks of so many ranks in the same ones, with their settings; the part leaves none behind."""
    said = lines_of(teams, *[(meets, TWO), (meets, THREE), (prints, TWO)] * 2, (is_not_here, TWO), (meets, TWO))
    assert teams.started == 5
    assert said[0] == said[3] == said[7] and said[0][1].endswith(" 3 ranks"), "the same process, with the settings"
    assert said[1] == said[4] and said[1][1].endswith(" 6 None")
    assert said[2] == said[5] == ("prints", "fine", True)
    assert said[6] == ("is_not_here", "not here: no such library", None)
    process = int(said[0][1].split()[0])
    assert not Path(f"/proc/{process}").exists()


@pytest.mark.slow
def test_its_own_checks_need_seven_processes(monkeypatch: pytest.MonkeyPatch, teams: Teams) -> None:
    """All that ci/gpu asks of one GPU: two sets of ranks, and one of a rank alone."""
    everything = [*gpu_transports.asked((gpu_transports.SMOKE, *gpu_transports.NCCL_PARTS, *gpu_transports.PARTS))]
    assert len(everything) == 18 and everything[0].check is gpu_transports.smoke
    said = lines_of(teams, *[(prints, Kind(each.kind.ranks, (), on_a_cpu)) for each in everything])
    assert all(met for _, _, met in said) and teams.started == 7


# ---------- checks that fail


@pytest.mark.parametrize(
    ("check", "told"),
    [
        (raises, "rank 0: ValueError: wrong bytes"),
        (crashes, "rank 1: its process ended (SIGSEGV)"),
        (hangs, "no answer of ranks [1] within 3 s"),
    ],
)
def test_a_check_that_fails_loses_no_other(check: Any, told: str, teams: Teams) -> None:
    """The next one runs in processes of which none has seen it."""
    said = hung(teams) if check is hangs else lines_of(teams, (meets, TWO), (check, TWO), (meets, TWO))
    (_, first, well), failed, (_, second, again) = said
    assert (well, again) == (True, True) and failed == (check.__name__, told, False)
    assert first.split()[1:] == second.split()[1:] == ["3", "ranks"] and first != second
    assert teams.started == 4


def hung(teams: Teams) -> Lines:
    """With little time for the one that hangs."""
    said: Lines = []
    for check, seconds in ((meets, LONG), (hangs, 3.0), (meets, LONG)):
        heard = teams.run(TWO, check, seconds, 4 * LONG)
        well, text = gpu_transports.summed_up(heard, 2, seconds)
        said.append((check.__name__, text, well))
    teams.close()
    return said


def test_a_rank_that_goes_is_no_failure(teams: Teams) -> None:
    """It has said what it found; its process is gone, and so the next check gets other ones."""
    said = lines_of(teams, (is_gone, TWO), (meets, TWO))
    assert said[0] == ("is_gone", "rank 1 is named", True) and said[1][2] is True
    assert teams.started == 4


def speaks_last(rank: int) -> str:
    if rank == 1:
        time.sleep(0.3)  # the other has gone by then
    raise Leaves("last words")


def test_the_last_words_of_ranks_count(teams: Teams) -> None:
    """What they say as they go is heard, whether or not their processes are gone by then."""
    assert teams.run(TWO, speaks_last, LONG, 4 * LONG) == {0: (True, "last words"), 1: (True, "last words")}
    teams.close()


def test_processes_that_do_not_start(teams: Teams) -> None:
    """Tried twice, and then no check waits for them; those of other sets run."""
    broken = Kind(2, (), starts_not)
    said = lines_of(teams, (meets, broken), (meets, broken), (meets, broken), (meets, TWO))
    assert [text for _, text, _ in said[:3]] == [
        "rank 0: RuntimeError: CUDA error: no device", "rank 0: RuntimeError: CUDA error: no device",
        "rank 0: its processes did not start 2 times",
    ]  # fmt: skip
    assert [well for *_, well in said] == [False, False, False, True] and teams.started == 6


def test_time_that_is_up(teams: Teams) -> None:
    said = lines_of(teams, (meets, TWO), (prints, TWO), seconds=0.5)
    assert said == [("meets", "no time was left", False), ("prints", "no time was left", False)]
    assert teams.started == 0


def test_a_set_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, teams: Teams) -> None:
    def refuses(kind: Kind) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(gpu_team, "Team", refuses)
    assert lines_of(teams, (meets, TWO), (meets, TWO)) == [("meets", "OSError: no more processes", False)] * 2


# ---------- the smoke


def smoked(here: Here, spoilt: str) -> str:
    """On two processes of the CPU, in place of the GPU; what is spoilt fails."""
    symm_ranks.register()

    def make() -> Any:
        if spoilt == "rendezvous":
            raise RuntimeError("no peer access")
        made = make_transport("on cpu", dist.group.WORLD, 60.0)  # type: ignore[arg-type]
        if spoilt == "message":
            patched.setattr(symm_ranks.SegmentMemory, "put", no_put)
        return made

    def captures(made: Any, schedules: Any, turns: int) -> str:
        assert made.world_size == 2 and tuple(schedules) == ("ring",)
        if spoilt == "capture":
            raise RuntimeError("operation not permitted when stream is capturing")
        return "fine"

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu_programs, "TOKENS", 16)
        patched.setattr(gpu_programs, "DIM", 8)
        if spoilt == "program":
            patched.setattr(gpu_programs, "attention", lambda q, k, v, *_: q + k + v)
        try:
            return gpu_smoke.smoked(make, "cpu", captures)
        except AssertionError as error:
            return str(error)


def no_put(self: Any, data: torch.Tensor, peer: int, place: int, word: int) -> None:
    """Mutant: only the signal comes."""
    self.signal(peer, word)


STEPS = ("rendezvous", "a message each way", "a program", "a captured call")


def test_the_smoke(ranks: RankPools) -> None:
    """Rendezvous, a message each way, a program, a captured call: with what each took."""
    for said in ranks(2)(smoked, ""):
        assert [name.rsplit(" ", 2)[0] for name in said.split(", ")] == [
            "rendezvous", "a message each way", "another rendezvous", "a program", "a captured call",
        ]  # fmt: skip


@pytest.mark.parametrize("spoilt", ["rendezvous", "message", "program", "capture"])
def test_the_smoke_says_how_far_it_came(spoilt: str, ranks: RankPools) -> None:
    with ranks.expendable(2) as some:
        answers = some(smoked, spoilt)
    failing = next(name for name in STEPS if spoilt in name)
    for said in answers:
        assert said.startswith(f"{failing}: ")
        done = said.partition("before it went well: ")[2]
        assert [name in done for name in STEPS] == [STEPS.index(name) < STEPS.index(failing) for name in STEPS]


# ---------- linear layers


def linears(here: Here, operator: str, spoilt: str) -> str:
    """On processes of the CPU; torch's operators are its own fallbacks, or are not there, or something is wrong."""
    symm_ranks.register()
    made = make_transport("on cpu", dist.group.WORLD, 60.0)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu_linears, "CHECKED", (4, 8, 16))
        if spoilt != "absent":
            torch_async_tp._register()
        if spoilt == "halved":
            scattered = torch_layers.by_symmetric_memory

            def halved(group: Any) -> Any:
                whole = scattered(group)
                return whole._replace(scattered=lambda c, right: whole.scattered(c, right) / 2)

            patched.setattr(gpu_linears, "by_symmetric_memory", halved)
        try:
            return gpu_linears.layer(operator, made, "cpu", (8, 8, 16))
        except AssertionError as error:
            return str(error)
        finally:
            made.close()


@pytest.mark.parametrize("operator", ["column", "row"])
def test_linear_layers_beside_torchs(operator: str, ranks: RankPools) -> None:
    """All are exact, and timed in turns; without torch's operator, of which it says so, ours are."""
    with ranks.expendable(2) as some:  # what is registered stays
        for spoilt, fused in (("absent", False), ("", True)):
            for said in some(linears, operator, spoilt):
                assert said.startswith("forward + backward: direct-q ") and ", tokenring " in said, said
                assert (", torch's fused operator " in said) is fused
                assert ("; torch's fused operator fails: " in said) is not fused
        for said in some(linears, operator, "halved"):
            assert said.startswith("{'direct-q': 0.00") and '"torch\'s fused operator": 0.5' in said, said


# ---------- what NCCL says


@pytest.mark.parametrize(
    "said",
    [
        "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",  # init.cc of 2.28, 2.29
        "Last error:\nMultiple Ranks are using the same GPU/Partition: rank 1 and rank 0",  # and of 2.30
    ],
)
def test_nccl_that_lets_no_ranks_share_a_gpu_is_not_here(said: str) -> None:
    lost = PeerLost("rank 1 is lost", 1)
    lost.__cause__ = RuntimeError(f"NCCL error in: NCCLUtils.cpp:94, invalid usage\n{said}")
    assert gpu_nccl.refusal(lost) == said.splitlines()[1]
