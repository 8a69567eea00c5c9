"""One process of several that torchrun started is not taken for one that is alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from ranks import Here, RankPools

from tokenring import ConfigurationError, ContextParallel

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
REFUSED = [
    {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": "4"},
    {"LOCAL_RANK": "0", "WORLD_SIZE": "2"},
]
TAKEN = [
    {},
    {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
    {"WORLD_SIZE": "4"},  # somebody else's, perhaps
    {"RANK": "1"},
    {"RANK": "1", "WORLD_SIZE": "many"},
    {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # also of a shell in an allocation, which is one process
]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> dict[str, str]:
    given: dict[str, str] = request.param
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return given


@pytest.mark.parametrize("environment", REFUSED, indirect=True)
def test_one_of_several(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ContextParallel()
    text = str(caught.value)
    size = environment["WORLD_SIZE"]
    assert f"one of {size} processes (WORLD_SIZE={size}, " in text
    assert "Call torch.distributed.init_process_group(...) first, or give group='self'" in text
    assert ContextParallel("self").world_size == 1


@pytest.mark.parametrize("environment", TAKEN, indirect=True, ids=str)
def test_one_alone(environment: dict[str, str]) -> None:
    assert ContextParallel().world_size == 1


def initialised(here: Here) -> int:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"RANK": str(here.rank), "LOCAL_RANK": str(here.rank), "WORLD_SIZE": "2"}.items():
            patched.setenv(name, value)
        return ContextParallel().world_size


def test_initialised(ranks: RankPools) -> None:
    assert ranks(2)(initialised) == [2, 2]


SCRIPT = """
import sys, tokenring as tr
try:
    tr.ContextParallel()
except tr.ConfigurationError as error:
    sys.stderr.write(f"refused: {error}\\n")  # in one piece: the other rank writes there too
"""


@pytest.mark.slow
def test_torchrun(tmp_path: Path, warm: str) -> None:
    """With the variables that it really sets."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [warm, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    made = subprocess.run(
        command, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert made.stderr.count("refused: group=None is the world") == 2 and made.returncode == 0, made.stderr
