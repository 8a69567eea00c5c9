"""examples/mindspeed_llm: the commands that it makes of launch scripts, and the order of its imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "mindspeed_llm"
NOTED = '#!/bin/bash\nprintf "%s\\n" "$(basename "$0")" "$@" >> "$NOTED"\n'
FLAGS = ["--context-parallel-attention", "tokenring", "--tokenring-schedule", "ring"]


def launched(folder: Path, script: str, *flags: str) -> list[str]:
    """What the launchers behind ours in PATH are called with."""
    held = folder / "bin"
    held.mkdir()
    for name in ("torchrun", "python"):
        (held / name).write_text(NOTED)
        (held / name).chmod(0o755)
    (folder / "script.sh").write_text(script)
    noted = folder / "noted"
    environment = {"PATH": f"{held}:{os.environ['PATH']}", "NOTED": str(noted)}
    command = ["bash", str(FOLDER / "run.sh"), "script.sh", *flags]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=60)
    return noted.read_text().splitlines()


@pytest.mark.parametrize("launcher", ["torchrun", "python -m torch.distributed.launch"])
def test_a_script_as_it_is(tmp_path: Path, launcher: str) -> None:
    found = launched(tmp_path, f"{launcher} --nnodes 1 posttrain_gpt.py --seed 42 | tee log", *FLAGS[2:])
    program = [str(FOLDER / "train.py"), "posttrain_gpt.py"]
    assert found == [*launcher.split(), "--nnodes", "1", *program, "--seed", "42", *FLAGS]


def test_python_that_launches_nothing_stays(tmp_path: Path) -> None:
    assert launched(tmp_path, "python prepare.py --seed 42") == ["python", "prepare.py", "--seed", "42"]


def test_both_launchers_are_one() -> None:
    assert (FOLDER / "bin/torchrun").read_text() == (FOLDER / "bin/python").read_text()


def test_the_program_runs_behind_our_import(tmp_path: Path) -> None:
    """With a package that is as MindSpeed, as far as our import asks."""
    (tmp_path / "mindspeed").mkdir()
    (tmp_path / "mindspeed/__init__.py").write_text("")
    (tmp_path / "mindspeed/features_manager.py").write_text(
        "class MindSpeedFeature:\n    def __init__(self, name, optimization_level=2): self.feature_name = name\n"
        "class MindSpeedFeaturesManager: FEATURES_LIST = [MindSpeedFeature('context_parallel_size')]\n"
    )
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "program.py").write_text(
        "import sys, beside\nassert 'tokenring.integrations.mindspeed' in sys.modules\nprint(__name__, sys.argv[1:])\n"
    )
    paths = os.pathsep.join([str(FOLDER.parents[1]), str(tmp_path)])
    command = [sys.executable, str(FOLDER / "train.py"), str(tmp_path / "program.py"), "--seed", "42"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "__main__ ['--seed', '42']\n"
