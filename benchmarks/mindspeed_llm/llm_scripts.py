"""Flags of MindSpeed-LLM's launch scripts with context parallelism, as they are and with sizes shrunk."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

LAUNCHERS = ("torchrun", "msrun", "python", "python3")
LAUNCHER = '#!/bin/bash\nprintf "%s\\n" "$@" > "$FLAGS_TO"\n'
CONTEXT_PARALLEL = "--context-parallel-size"
SECONDS = 20.0  # that a script may take to come to its launcher


def scripts(llm: Path) -> Iterator[Path]:
    """Yield the scripts that say a context-parallel size above 1."""
    for path in sorted((llm / "examples").rglob("*.sh")):
        if CONTEXT_PARALLEL in path.read_text(encoding="utf-8", errors="replace"):
            flags = flags_of(path)
            if CONTEXT_PARALLEL in flags and int(flags[flags.index(CONTEXT_PARALLEL) + 1]) > 1:
                yield path


def flags_of(script: Path) -> list[str]:
    """Return the flags that a script gives to its training program: run, with launchers that only note them."""
    with tempfile.TemporaryDirectory() as folder:
        for name in LAUNCHERS:
            launcher = Path(folder, name)
            launcher.write_text(LAUNCHER, encoding="utf-8")
            launcher.chmod(0o755)
        noted = Path(folder, "flags")
        held = {"PATH": f"{folder}:{os.environ['PATH']}", "FLAGS_TO": str(noted)}
        text = re.sub(r"^\s*source .*$", "", script.read_text(encoding="utf-8", errors="replace"), flags=re.MULTILINE)
        subprocess.run(
            ["bash", "-c", text], cwd=folder, env=held, capture_output=True, timeout=SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        found = noted.read_text(encoding="utf-8").split("\n")[:-1] if noted.exists() else []
    programs = [at for at, flag in enumerate(found) if flag.endswith(".py")]
    return found[programs[0] + 1 :] if programs else []


SIZES = {
    "--num-layers": "2", "--hidden-size": "64", "--ffn-hidden-size": "64", "--num-attention-heads": "8",
    "--seq-length": "128", "--max-position-embeddings": "128", "--padded-vocab-size": "64", "--vocab-size": "64",
    "--micro-batch-size": "1", "--global-batch-size": "1", "--train-iters": "1", "--kv-channels": "8",
    "--num-query-groups": "4", "--tensor-model-parallel-size": "1", "--pipeline-model-parallel-size": "1",
    "--make-vocab-size-divisible-by": "1", "--q-lora-rank": "16", "--kv-lora-rank": "16", "--v-head-dim": "8",
    "--qk-head-dim": "8", "--qk-pos-emb-head-dim": "8", "--qk-rope-head-dim": "8", "--qk-nope-head-dim": "8",
    "--recompute-num-layers": "1", "--tokenizer-type": "NullTokenizer", "--distributed-timeout-minutes": "10",
    "--rope-scaling-original-max-position-embeddings": "128",
}  # fmt: skip
# What has nothing to do with attention and does not run on the emulated NPU, or needs files or more ranks.
DROPPED = (
    r"--use-fused-(rmsnorm|swiglu|rotary-pos-emb|moe.*)", r"--bf16", r"--fp16", r"--data-path",
    r"--tokenizer-name-or-path", r"--tokenizer-model", r"--save.*", r"--load.*", r"--.*expert.*", r"--moe-.*",
    r"--num-layers-per-virtual.*", r"--n-group", r"--topk-group", r"--routed-scaling-factor", r"--seq-aux",
    r"--first-k-dense-replace", r"--norm-topk-prob", r"--sequence-parallel", r"--use-distributed-optimizer",
    r"--overlap-.*", r"--swap-.*", r"--enable-hf2mg-convert", r"--model-type-hf", r"--log-throughput",
    r"--distributed-backend", r"--ckpt-format", r"--lora-.*", r"--reuse-.*", r"--noop-layers",
    r"--num-layer-list", r"--use-ascend-.*", r"--stage", r"--prompt-type", r"--is-instruction-dataset",
    r"--neat-pack", r"--pack", r"--padded-samples", r"--handler-name", r"--tokenizer-.*", r"--split",
    r"--num-workers", r"--workers", r"--recompute-.*", r"--manual-gc.*", r"--enable-thinking",
    r"--high-availability", r"--finetune", r"--dispatch.*", r"--gemm-.*", r"--mtp-.*", r"--no-load-.*",
    r"--ai-framework", r"--optimization-level",
)  # fmt: skip
ADDED = [
    "--use-cpu-initialization", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm",
    "--no-bias-swiglu-fusion", "--no-rope-fusion", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion",
    "--distributed-backend", "gloo", "--mock-data", "--attention-dropout", "0", "--hidden-dropout", "0", "--lr", "1e-4",
]  # fmt: skip

# What some scripts leave to files that are not there, or, of those for MindSpore, leave out.
NEEDED = {
    "--tokenizer-type": "NullTokenizer", "--vocab-size": "64", "--padded-vocab-size": "64",
    "--transformer-impl": "local",
}  # fmt: skip


def shrunk(flags: list[str], ranks: int, beside: Mapping[str, Sequence[str]]) -> list[str]:
    """Return flags with small sizes, for one step of a few ranks: those of attention and its cuts stay as they are.

    beside: flags with their values, in place of the script's own.
    """
    found: list[str] = []
    at = 0
    while at < len(flags):
        stop = at + 1
        while stop < len(flags) and not flags[stop].startswith("--"):
            stop += 1
        name, values = flags[at], flags[at + 1 : stop]
        at = stop
        if name in beside or any(re.fullmatch(each, name) for each in DROPPED):
            continue
        if name in SIZES:
            values = [SIZES[name]]
        if name == CONTEXT_PARALLEL:
            values = [str(ranks)]
        if name == "--ulysses-degree-in-cp":
            values = ["2"]
        found += [name, *values]
    added = [*ADDED, *(word for name, values in beside.items() for word in (name, *values))]
    for name, value in NEEDED.items():
        added += [name, value] if name not in found else []
    return [*found, *added]
