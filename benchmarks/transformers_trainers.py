"""Twenty steps of transformers' Trainer and TRL's SFTTrainer on one process and on several: differences of the logs.

    python benchmarks/transformers_trainers.py [--models llama gpt_oss] [--trainers trainer sft] [--join ddp fsdp2]
                                               [--ranks 2 4] [--cp 2] [--optim sgd] [--evaluated 14]
                                               [--resume full]

Trainer: batches of texts of several lengths, padded at the right. SFTTrainer: packed. The ranks form ranks / cp groups,
which get batches of their own. --join: what joins gradients: DDP; FSDP2 over all ranks (fsdp2); FSDP2 over the ranks
of cp, with a copy in each group (hsdp); both again, sharded as transformers loads the weights (native, native-hsdp).
accelerate wraps by FSDP on accelerators alone: here its state is told that processes of CPUs are some.
--resume: the runs of several ranks save a checkpoint after half of their steps and end; new processes resume from it,
with models of other weights; FSDP2 saves whole weights, or each rank its shards. That of one process goes through.
Compares each step's loss and norm of gradients, and the loss of an evaluation at the end. AdamW forgives gradients
that are wrong by a factor; the norm and --optim sgd do not. Needs transformers, accelerate and trl
(docs/transformers.md). Tiny models with random weights; nothing is downloaded. Ends with 1 if a loss differs by more
than 1e-6, or a norm by more than 1e-5.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / each) for each in (".", "tests/support", "tests/fakes")]
LOSS_LIMIT, NORM_LIMIT, STEPS = 1e-6, 1e-5, 20
SEQUENCES = 4  # of a step, over all data-parallel groups
JOINS = ("ddp", "fsdp2", "hsdp", "native", "native-hsdp")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama", "qwen3", "gemma2", "gpt_oss"])
    parser.add_argument("--trainers", nargs="+", choices=("trainer", "sft"), default=["trainer", "sft"])
    parser.add_argument("--join", nargs="+", choices=JOINS, default=["ddp", "fsdp2"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--optim", default="adamw_torch")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--evaluated", type=int, default=16, help="sequences, at the end")
    parser.add_argument("--resume", choices=("full", "sharded"), help="from a checkpoint, after half of the steps")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--half", choices=("first", "second"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given)
        return 0
    print(f"relative differences over {STEPS} steps, {given.optim}, {given.accumulate} batches a step\n")
    print("| trainer | model | ranks | CP | joined by | losses | difference of losses | of norms | evaluated |")
    print("|---|---|---|---|---|---|---|---|---|")
    wrong = 0
    for trainer, model in itertools.product(given.trainers, given.models):
        alone = logged(trainer, model, 1, "ddp", given)
        for ranks, join in itertools.product(given.ranks, given.join):
            found = logged(trainer, model, ranks, join, given)
            loss, norm, evaluated = (largest(found[name], alone[name]) for name in alone)
            wrong += not (loss <= LOSS_LIMIT and norm <= NORM_LIMIT and evaluated <= LOSS_LIMIT)
            first, last = alone["loss"][0], alone["loss"][-1]
            how = f"{trainer} | {model} | {ranks} | {given.cp} | {join} | {first:.3f} to {last:.3f}"
            print(f"| {how} | {loss:.1e} | {norm:.1e} | {evaluated:.1e} |", flush=True)
    return 1 if wrong else 0


def largest(found: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def logged(trainer: str, model: str, ranks: int, join: str, given: argparse.Namespace) -> dict[str, list[float]]:
    """Return what a run logs of its steps, whole or in halves."""
    with tempfile.TemporaryDirectory() as folder:
        if not given.resume or ranks == 1:
            return logged_in(folder, trainer, model, ranks, join, given)
        logged_in(folder, trainer, model, ranks, join, given, "--half", "first")
        return logged_in(folder, trainer, model, ranks, join, given, "--half", "second")


def logged_in(
    folder: str, trainer: str, model: str, ranks: int, join: str, given: argparse.Namespace, *half: str
) -> dict[str, list[float]]:
    """Return what the processes of a run log, whose checkpoints are in a folder."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *start, __file__, "--train", "--trainers", trainer, "--models", model, "--join", join]
    command += ["--cp", str(given.cp), "--optim", given.optim, "--accumulate", str(given.accumulate)]
    command += ["--evaluated", str(given.evaluated), "--folder", folder, *half]
    command += [] if given.resume is None else ["--resume", given.resume]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    found = re.search(r"^log: (.*)$", done.stdout, re.MULTILINE)
    if found is None:
        raise SystemExit(done.stderr[-4000:])
    values: dict[str, list[float]] = json.loads(found[1])
    return values


def train(given: argparse.Namespace) -> None:
    """Train on this process's part, and print the log on the first."""
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import tokenring as tr

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # of a rank alone
        arguments = settings(given.folder or folder, given)
        cp, groups = tr.ContextParallel("self"), 1
        if dist.is_initialized():
            groups = dist.get_world_size() // given.cp
            mesh = init_device_mesh("cpu", (groups, given.cp), mesh_dim_names=("dp", "cp"))
            cp = tr.ContextParallel(mesh["cp"], "auto")
        arguments.per_device_train_batch_size = SEQUENCES // groups // given.accumulate
        # The Trainer weighs the tokens of a step alike, over all groups; trl takes the mean of batches.
        arguments.per_device_eval_batch_size = 2 if given.trainers[0] == "sft" else SEQUENCES // groups
        made = trainer_of(given.trainers[0], model_of(given, folder), arguments, cp, given.evaluated)
        if given.half == "first":
            made.add_callback(half_way())
        if given.half == "second":
            change_weights(made.model)
        made.train(resume_from_checkpoint=given.half == "second")
        made.evaluate()
        sharded = any(isinstance(each, torch.distributed.tensor.DTensor) for each in made.model.parameters())
        assert sharded == (given.join[0] != "ddp" and dist.is_initialized())  # accelerate may leave it silently
        if arguments.process_index == 0:
            print("log:", json.dumps({name: logged_by(made, name) for name in ("loss", "grad_norm", "eval_loss")}))
    if dist.is_initialized():
        dist.destroy_process_group()


def half_way() -> Any:
    """Return a callback that saves and ends after half of the steps."""
    from transformers import TrainerCallback

    class HalfWay(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_save = control.should_training_stop = state.global_step == STEPS // 2

    return HalfWay()


def change_weights(model: Any) -> None:
    """Change all weights, so that only those of a checkpoint give the losses that are wanted."""
    import torch

    with torch.no_grad():
        for each in model.parameters():
            each.mul_(0.5)


def logged_by(trainer: Any, name: str) -> list[float]:
    return [float(each[name]) for each in trainer.state.log_history if name in each]


def settings(folder: str, given: argparse.Namespace) -> Any:
    """Return arguments of the trainer; making them joins the processes."""
    from accelerate import ParallelismConfig
    from transformers import TrainingArguments
    from trl import SFTConfig

    world, join = int(os.environ.get("WORLD_SIZE", "1")), given.join[0]
    common: dict[str, Any] = {
        "max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1, "use_cpu": True, "report_to": [], "seed": 3,
        "save_strategy": "no", "disable_tqdm": True, "lr_scheduler_type": "constant", "optim": given.optim,
        "bf16": False, "prediction_loss_only": True, "gradient_accumulation_steps": given.accumulate,
    }  # fmt: skip
    if join in ("fsdp2", "hsdp") and world > 1:
        let_cpus_shard()
        kind = "SHARDED_STATE_DICT" if given.resume == "sharded" else "FULL_STATE_DICT"
        common |= {"fsdp": True, "fsdp_config": {"state_dict_type": kind}}
    if join == "hsdp" and world > 1:
        common["parallelism_config"] = ParallelismConfig(dp_replicate_size=world // given.cp, dp_shard_size=given.cp)
    if given.trainers[0] == "trainer":
        return TrainingArguments(folder, **common)
    router = 0.0 if given.models[0] == "gpt_oss" else None  # the loss that balances experts is not a sum over tokens
    return SFTConfig(
        folder, packing=True, max_length=64, gradient_checkpointing=False, router_aux_loss_coef=router, **common
    )


def let_cpus_shard() -> None:
    """Let accelerate take FSDP for processes of CPUs, which it leaves to DDP without a word."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    made = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type  # which later ones begin with

    AcceleratorState.__init__ = init


def model_of(given: argparse.Namespace, folder: str) -> Any:
    """Return the model, sharded by transformers itself if that is asked for."""
    import torch.distributed as dist
    from hf_families import make_model

    model, join = make_model(given.models[0]), given.join[0]
    if not join.startswith("native") or not dist.is_initialized():
        return model
    from transformers import DistributedConfig

    where: list[Any] = [folder]
    dist.broadcast_object_list(where)  # transformers writes on the first rank alone
    model.save_pretrained(where[0])
    dist.barrier()
    world = dist.get_world_size()
    sharded = given.cp if join == "native-hsdp" else world
    how = DistributedConfig(fsdp_size=sharded, dp_replicate_size=world // sharded)
    return type(model).from_pretrained(where[0], distributed_config=how, attn_implementation="eager")


def trainer_of(kind: str, model: Any, arguments: Any, cp: Any, evaluated: int) -> Any:
    """Return the trainer, with its texts."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast, Trainer
    from trl import SFTTrainer

    from tokenring.integrations.transformers.trainer import TokenRingTrainerMixin

    class LongTrainer(TokenRingTrainerMixin, Trainer):  # type: ignore[misc]
        pass

    class LongSFTTrainer(TokenRingTrainerMixin, SFTTrainer):  # type: ignore[misc]
        pass

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(96)}, unk_token="w3"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2")
    made = torch.Generator().manual_seed(3)
    lengths = torch.randint(5, 60, (200,), generator=made).tolist()
    texts = [torch.randint(3, 96, (n,), generator=made).sort().values.tolist() for n in lengths]
    rows = Dataset.from_list([{"input_ids": text} for text in texts])
    given = {"train_dataset": rows, "eval_dataset": rows.select(range(evaluated)), "tokenring": cp}
    if kind == "sft":
        return LongSFTTrainer(model, arguments, processing_class=tokenizer, **given)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return LongTrainer(model, arguments, data_collator=collate, **given)


if __name__ == "__main__":
    sys.exit(main())
