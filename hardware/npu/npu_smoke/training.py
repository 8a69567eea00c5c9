"""A step or two of a small GPT under MindSpeed: its loss with context parallelism beside its loss without.

Every rank starts a process of its own, with examples/mindspeed/pretrain_gpt.py: first rank 0 alone, without tokenring,
then all. What these print is read; the second step's loss has the first one's gradients in it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from npu_smoke.here import Here

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "mindspeed" / "pretrain_gpt.py"
STEPS, HEADS = 2, 8
STEP_SECONDS = 150.0  # of each of the two jobs: operators are compiled at their first call
PORT = 29641
# As Megatron's training_log prints it, on the last rank: "... | lm loss: 4.165041E+00 | ...".
LOSS = re.compile(r"lm loss:\s*([0-9.]+(?:E[+-]?[0-9]+)?)", re.IGNORECASE)
FLAGS = (
    f"--tensor-model-parallel-size 1 --num-layers 2 --hidden-size {64 * HEADS} --num-attention-heads {HEADS} "
    "--position-embedding-type rope --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --min-lr 1e-3 --seed 1 "
    f"--train-iters {STEPS} --log-interval 1 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 512 "
    "--attention-dropout 0 --hidden-dropout 0 --transformer-impl local --bf16 --use-flash-attn --use-mcore-models "
    "--context-parallel-algo megatron_cp_algo --attention-mask-type causal --no-gradient-accumulation-fusion "
    "--distributed-backend nccl"
).split()


def mindspeed(here: Here) -> dict[str, Any]:
    """The losses of both."""
    if reason := missing(os.environ):
        return {"left out": reason}
    if here.ranks < 2:
        return {"left out": "one rank splits no sequence"}
    found: dict[str, Any] = {}
    for name, ranks, ours in (("alone", 1, []), ("split", here.ranks, ["--context-parallel-attention", "tokenring"])):
        more = ["--context-parallel-size", str(ranks), *ours]
        here.say(name)
        said, code = _job(here, ranks, more) if here.rank < ranks else ("", 0)
        ended = f"pretrain_gpt.py ended with {code}: {' '.join(said.split())[-400:]}" if code else ""
        losses = [float(loss) for loss in LOSS.findall(said)]
        told = _gathered(here, (losses, ended))
        found[name] = [loss for each, _ in told for loss in each]
        if failed := next((text for _, text in told if text), ""):
            if name == "alone":
                raise RuntimeError(f"without context parallelism {failed}")
            found["failed"] = failed
    return found


def missing(environment: Any) -> str | None:
    """None, or what of MindSpeed and Megatron-LM is not here."""
    if importlib.util.find_spec("mindspeed") is None:
        return "MindSpeed is not installed here"
    folder = environment.get("MEGATRON", "")
    if not Path(folder, "pretrain_gpt.py").is_file():
        return "MEGATRON names no folder of Megatron-LM, with pretrain_gpt.py in it"
    return None


def _job(here: Here, ranks: int, more: list[str]) -> tuple[str, int]:
    """What this rank's process said, and how it ended; killed with this one, as it is of its group."""
    length = 256 * here.ranks  # the same with and without splitting
    lengths = ["--seq-length", str(length), "--max-position-embeddings", str(length)]
    paths = os.pathsep.join([os.environ["MEGATRON"], os.environ.get("PYTHONPATH", "")])
    places = {"RANK": str(here.rank), "LOCAL_RANK": str(here.rank), "WORLD_SIZE": str(ranks)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT + ranks)}
    environment = {**os.environ, **places, **meeting, "PYTHONPATH": paths}
    try:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *FLAGS, *lengths, *more], env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=STEP_SECONDS, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end within {STEP_SECONDS:g} s", -1
    return done.stdout, done.returncode


def _gathered(here: Here, mine: tuple[list[float], str]) -> list[tuple[list[float], str]]:
    """What each rank has."""
    said: list[Any] = [None] * here.ranks
    dist.all_gather_object(said, mine)
    return said
