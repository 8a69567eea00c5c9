"""Every example runs, on two ranks; that of Megatron-core on four, where there is one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mcore.versions import PINNED, folder, need
from patience import patient

FOLDER = Path(__file__).resolve().parents[2] / "examples"
MEGATRON = FOLDER / "megatron_gpt.py"
# No program; wants transformers; has its own test.
ELSEWHERE = {FOLDER / f"{name}.py" for name in ("reference_executor", "huggingface_trainer", "tensor_parallel_mlp")}
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {MEGATRON, *ELSEWHERE})


def output_of(warm: str, example: Path, ranks: int, *arguments: str, **more: str) -> str:
    """What it prints, in processes that have torch already; test_launched and the demo start real ones."""
    launch = [warm, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    command = [*launch, str(example), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(100), env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path, warm: str) -> None:
    error = re.search(r"relative error against one process: (\S+)", output_of(warm, example, 2, TMPDIR=str(tmp_path)))
    assert error is not None
    assert float(error[1]) < 2e-6


def test_megatron_example_runs(tmp_path: Path, warm: str) -> None:
    need(PINNED[-1])
    picture = tmp_path / "loss.svg"
    sizes = ["--tp", "2", "--cp", "2", "--steps", "12", "--seq", "64", "--batch", "4", "--picture", str(picture)]
    more = {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(folder(PINNED[-1])), *filter(None, sys.path)])}
    said = output_of(warm, MEGATRON, 4, *sizes, **more)
    loss = re.search(r"TP 2 × CP 2 × DP 1: loss (\S+) → (\S+) in 12 steps", said)
    apart = re.search(r"largest relative difference of a loss from CP = 1: (\S+)", said)
    assert loss is not None and apart is not None
    assert float(loss[2]) < float(loss[1]) - 0.5
    assert float(apart[1]) < 1e-4
    assert picture.read_text().count("<path") > 4
