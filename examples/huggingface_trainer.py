"""transformers' Trainer with packed documents, each batch split over all ranks.

    torchrun --standalone --nproc-per-node 2 examples/huggingface_trainer.py [--model gemma2] [--cp 2] [--steps 20]

Losses are the same for any number of ranks. Wants transformers and accelerate; the model is small, with random weights.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import tokenring as tr
from tokenring.integrations.transformers.trainer import TokenRingTrainerMixin

LENGTHS = (40, 7, 63, 18)  # of the documents of a batch
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip


class LongTrainer(TokenRingTrainerMixin, Trainer):  # type: ignore[misc]
    """All that a user adds, besides the argument `tokenring`."""


def documents() -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 128, (length,), generator=made) for length in LENGTHS * 32]
    return [{"input_ids": row.sort().values} for row in rows]


def packed(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One sequence of all documents, as transformers' DataCollatorWithFlattening makes it."""
    texts = [row["input_ids"] for row in rows]
    labels = [torch.cat([torch.tensor([-100]), text[1:]]) for text in texts]
    places = [torch.arange(len(text)) for text in texts]
    parts = {"input_ids": texts, "labels": labels, "position_ids": places}
    return {name: torch.cat(each)[None] for name, each in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama", help="a model_type, as gemma2 or gpt_oss")
    parser.add_argument("--cp", type=int, help="how many ranks share a sequence; default: all")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        train(given, folder)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(given: Any, folder: str) -> None:
    on_cpu = not torch.cuda.is_available()
    arguments = TrainingArguments(
        folder, use_cpu=on_cpu, max_steps=given.steps, logging_steps=1, learning_rate=1e-2, report_to=[], seed=3,
        save_strategy="no", disable_tqdm=True, per_device_train_batch_size=4, lr_scheduler_type="constant",
    )  # fmt: skip
    cp = tr.ContextParallel("self")
    if dist.is_initialized():
        size = given.cp or dist.get_world_size()
        grid = (dist.get_world_size() // size, size)
        mesh = init_device_mesh("cpu" if on_cpu else "cuda", grid, mesh_dim_names=("dp", "cp"))
        cp = tr.ContextParallel(mesh["cp"], layout="auto")
        arguments.per_device_train_batch_size = 4 // grid[0]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(given.model, **SIZES))
    trainer = LongTrainer(model, arguments, train_dataset=documents(), data_collator=packed, tokenring=cp)
    trainer.train()
    if arguments.process_index == 0:
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        print(f"{type(model).__name__}, {cp}")
        print("losses:", *(f"{loss:.8f}" for loss in losses))


if __name__ == "__main__":
    main()
