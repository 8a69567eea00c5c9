"""What tests of several modules share."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fork_server
import pytest
import torch
from ascend.ranks import NpuPools
from patience import measured_stretch, patient, ran_and_waited, set_stretch
from ranks import PRELOADED, RankPools
from sampling import leave_samples
from warm import warm_python

from tokenring.launch.processes import ENDING_SIGNALS

torch.set_num_threads(1)  # on a busy machine, threads that wait for each other take many times longer

# `make test` has several workers. These modules shape links, fill /dev/shm or count what is left: one worker has them
# alone, one after another; all others go to the rest, which have less right to the processor.
ALONE = frozenset({
    "bench", "demo", "diffusers_shaped", "emulate", "faults", "leaks", "listener", "packaging", "ranks",
    "shared_memory", "soak", "sockets", "topology_job", "topology_measure", "topology_testbed", "trace",
})  # fmt: skip
LONG = ("megatron", "doctor", "hccl_families", "exactness", "hccl_collectives", "transports", "nccl", "families")
# Tests of these modules, of ALONE, and those that take a fixture of POOLS start processes or wait: marked `waits`.
STARTING = frozenset({
    "ascend_device", "ascend_real", "ascend_traps", "capture", "cann_stubs", "cli", "cluster", "compile", "devices",
    "doctor", "docs", "errors", "examples", "gpu_nccl", "gpu_script", "groups", "hccl", "hccl_emulation", "hccl_life",
    "hccl_mutants", "megatron", "megatron_contexts", "megatron_install", "megatron_packed", "megatron_parts",
    "merge", "merge_warps", "mindspeed", "mindspeed_real", "mindspeed_splits", "nccl", "npu_smoke", "npu_smoke_kernel",
    "planner_job", "planner_rates", "readme", "rooms", "symm", "topology_probe", "topology_report", "transfers",
    "transfers_taken", "transports", "watch",
})  # fmt: skip
POOLS = frozenset({"ranks", "npus"})
_before = ran_and_waited()  # at the last test
NICENESS = 5  # about a quarter of the processor beside a worker that wants all of it


def module_of(path: Path) -> str:
    return path.stem.removeprefix("test_")


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C is not ignored, also where whoever runs the tests in the background has it so: tests send and await it."""
    if given := getattr(config, "workerinput", {}).get("fork_server"):
        fork_server.adopt(given)
    else:  # what it starts, the workers and the fork server among them, has these, too
        folder = tempfile.TemporaryDirectory(prefix="tokenring-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ.update(_own_cache_in(folder.name))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Every worker of pytest-xdist is told of one fork server, and of one warm Python of each kind."""
    node.workerinput["fork_server"] = _fork_server()
    node.workerinput["warm"] = _warm_pythons(node.config)


@cache
def _fork_server() -> fork_server.Given | None:
    return fork_server.start(PRELOADED)


@cache
def _warm_pythons(config: pytest.Config) -> tuple[str, str]:
    """Start one, and one in which torch is still to be imported: they end with this session."""
    started = ExitStack()
    config.add_cleanup(started.close)
    return started.enter_context(warm_python()), started.enter_context(warm_python(bare=True))


@pytest.hookimpl(tryfirst=True)  # before what is deselected by markers is
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What one worker has alone comes first, then what takes longest: no worker is left with it at the end."""
    for item in items:
        if module_of(item.path) in ALONE | STARTING or not POOLS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("waits")
    leave_samples(config, items, POOLS)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: _turn(module_of(item.path)))  # stable


def _turn(module: str) -> int:
    """The place of a module in the order of modules; those that are nowhere listed share the last."""
    order = ("alone", *LONG)
    name = "alone" if module in ALONE else module
    return order.index(name) if name in order else len(order)


def pytest_collection_finish() -> None:
    """Thousands of tests stay until the end: no collection is to look through them, and there are few."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker gets the modules of ALONE, each other module goes to one worker.

    Not by xdist_group: of pytest-xdist 3.8 under pytest 9.2 it does nothing, without a word.
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByModule(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            module = module_of(Path(nodeid.partition("::")[0]))
            return "alone" if module in ALONE else module

    return ByModule(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around that of pytest-timeout, which reads the limit
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Limits of this test, pytest's own among them, are stretched by how busy the machine is now."""
    global _before
    set_stretch(measured_stretch(since=_before))
    _before = ran_and_waited()
    given = item.get_closest_marker("timeout")
    seconds = given.args[0] if given else item.config.getini("timeout")
    if seconds:
        item.add_marker(pytest.mark.timeout(patient(float(seconds))), append=False)
    return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A worker steps back once it has a module that is not of ALONE."""
    if "PYTEST_XDIST_WORKER" in os.environ and module_of(item.path) not in ALONE:
        os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(P)(function, *args)`: a function run by P processes of one Gloo group, kept for the session."""
    pools = RankPools()
    try:
        yield pools
    finally:
        pools.close()


@pytest.fixture(scope="module")
def npus() -> Iterator[NpuPools]:
    """The same with emulated NPUs, kept for a module: the device cannot be taken out of a process again."""
    pools = NpuPools()
    try:
        yield pools
    finally:
        pools.close()


@pytest.fixture(scope="session")
def warm(pytestconfig: pytest.Config) -> Iterator[str]:
    """A Python that has torch already."""
    yield from _warm(pytestconfig, bare=False)


@pytest.fixture(scope="session")
def warm_torch(pytestconfig: pytest.Config) -> Iterator[str]:
    """One in which `import torch` takes no time, and loads what is installed for it as it always does."""
    yield from _warm(pytestconfig, bare=True)


def _warm(config: pytest.Config, bare: bool) -> Iterator[str]:
    """Yield what all workers share; where there are none, one of this session."""
    if shared := getattr(config, "workerinput", {}).get("warm"):
        yield shared[bare]
    else:
        with warm_python(bare) as python:
            yield python


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Puts back the handlers that the command replaces in its own process."""
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def plans_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module's commands plan for each call once, and keep the plans as a user's do."""
    with patch.dict(os.environ, TOKENRING_PLAN_CACHE=str(tmp_path_factory.mktemp("plans"))):
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was probed or measured on this machine for its user is not for tests, nor theirs for the user."""
    with patch.dict(os.environ, _own_cache_in(str(tmp_path_factory.mktemp("cache")))):
        yield


def _own_cache_in(folder: str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": folder, "TOKENRING_PLAN_CACHE": "off"}
