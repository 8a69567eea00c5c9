"""Twenty steps of TRL's SFTTrainer with packing, on one process and on several: the largest difference of a loss.

    python benchmarks/transformers_sft.py [--models llama gpt_oss] [--ranks 2 4] [--cp 2]

Needs transformers, accelerate and trl (docs/transformers.md). Tiny models with random weights; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / each) for each in (".", "tests/support", "tests/fakes")]
LIMIT, STEPS, SEQUENCES = 1e-6, 20, 4  # of a step, over all data-parallel groups


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama", "qwen3", "gemma2", "gpt_oss"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.cp)
        return 0
    wrong = 0
    for model in options.models:
        alone = losses(model, 1, 1)
        for ranks in options.ranks:
            error = max(abs(a - b) / b for a, b in zip(losses(model, ranks, options.cp), alone, strict=True))
            wrong += not error <= LIMIT
            how = f"{ranks} ranks, CP {options.cp}, loss {alone[0]:.4f} to {alone[-1]:.4f} in {len(alone)} steps"
            print(f"{model}: {how}: relative difference {error:.1e}", flush=True)
    return 1 if wrong else 0


def losses(model: str, ranks: int, cp: int) -> list[float]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *start, __file__, "--train", model, "--cp", str(cp)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    found = re.search(r"^losses: (.*)$", done.stdout, re.MULTILINE)
    if found is None:
        raise SystemExit(done.stderr[-4000:])
    values: list[float] = json.loads(found[1])
    return values


def train(model: str, size: int) -> None:
    """Train on this process's part, and print losses on the first."""
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from datasets import Dataset
    from hf_families import make_model
    from tokenizers import Tokenizer, models
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    import tokenring as tr
    from tokenring.integrations.transformers.trainer import TokenRingTrainerMixin

    class LongSFTTrainer(TokenRingTrainerMixin, SFTTrainer):  # type: ignore[misc]
        pass

    torch.set_num_threads(1)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(96)}, unk_token="w3"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2")
    made = torch.Generator().manual_seed(3)
    lengths = torch.randint(5, 60, (200,), generator=made).tolist()
    texts = [torch.randint(3, 96, (n,), generator=made).sort().values.tolist() for n in lengths]
    router = 0.0 if model == "gpt_oss" else None  # the loss that balances experts is not a sum over tokens
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, max_steps=STEPS, learning_rate=1e-2, logging_steps=1, use_cpu=True, report_to=[], seed=3,
            save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", packing=True, max_length=64,
            bf16=False, gradient_checkpointing=False, router_aux_loss_coef=router,
        )  # fmt: skip
        cp, groups = tr.ContextParallel("self"), 1
        if dist.is_initialized():
            groups = dist.get_world_size() // size
            cp = tr.ContextParallel(init_device_mesh("cpu", (groups, size), mesh_dim_names=("dp", "cp"))["cp"], "auto")
        arguments.per_device_train_batch_size = SEQUENCES // groups
        trainer = LongSFTTrainer(
            make_model(model), arguments, train_dataset=Dataset.from_list([{"input_ids": text} for text in texts]),
            processing_class=tokenizer, tokenring=cp,
        )  # fmt: skip
        trainer.train()
        if arguments.process_index == 0:
            print("losses:", json.dumps([each["loss"] for each in trainer.state.log_history if "loss" in each]))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
