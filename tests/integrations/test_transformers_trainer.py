"""transformers' Trainer over ranks: losses of one process; what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_families import make_batch, make_model, need
from patience import patient
from ranks import Here, RankPools
from sampling import FULL_GRID
from torch.nn.parallel import DistributedDataParallel

import tokenring as tr
from tokenring.errors import BackendUnavailable, ConfigurationError, UnsupportedError
from tokenring.integrations.transformers.trainer import RankGrid, TokenRingTrainerMixin
from tokenring.integrations.transformers.training import stop_tokenring
from tokenring.integrations.transformers.versions import check_trainer

need()
pytest.importorskip("accelerate", reason="accelerate is not installed: the Trainer wants it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import Trainer, TrainingArguments
pytestmark = [pytest.mark.slow, pytest.mark.waits, pytest.mark.filterwarnings("ignore")]
REPO = Path(__file__).resolve().parents[2]
EXAMPLE = REPO / "examples" / "huggingface_trainer.py"
BENCHMARK = REPO / "benchmarks" / "transformers_trainers.py"


def losses(model: str, ranks: int, cp: int) -> list[float]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*(launch if ranks > 1 else [sys.executable]), str(EXAMPLE), "--model", model, "--cp", str(cp)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(100), env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.search(r"^losses: (.*)$", done.stdout, re.MULTILINE)
    assert said is not None
    return [float(each) for each in said[1].split()]


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma2", "gpt_oss"] if FULL_GRID else ["gemma2"])
def test_twenty_steps(model: str) -> None:
    alone = losses(model, 1, 1)
    assert len(alone) == 20 and alone[-1] < alone[0] - 0.1
    for ranks, cp in ((2, 2), (4, 2)) if FULL_GRID else ((2, 2),):
        for found, wanted in zip(losses(model, ranks, cp), alone, strict=True):
            assert abs(found - wanted) <= 1e-6 * max(1.0, wanted)


def benchmark(*asked: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(BENCHMARK), *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(110), env=env)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_twenty_packed_steps_under_fsdp() -> None:
    """TRL's SFTTrainer at CP 2 x FSDP 2, with SGD: gradients wrong by a factor change losses; and its evaluation."""
    for package in ("trl", "datasets"):
        pytest.importorskip(package)
    asked = ("--models", "gemma2", "--trainers", "sft", "--join", "fsdp2", "--ranks", "4", "--optim", "sgd")
    assert "| sft | gemma2 | 4 | 2 | fsdp2 |" in benchmark(*asked)


def test_evaluation_ends_with_a_part_of_a_batch() -> None:
    """14 sequences in batches of 4: the last 2 have half the weight of others, though each rank has their loss."""
    for package in ("trl", "datasets"):
        pytest.importorskip(package)
    asked = ("--models", "llama", "--trainers", "trainer", "--join", "ddp", "--ranks", "2", "--evaluated", "14")
    assert "| trainer | llama | 2 | 2 | ddp |" in benchmark(*asked)


def test_models_that_are_split_otherwise_are_refused(tmp_path: Path) -> None:
    for name in ("tp_size", "pp_size", "ep_size"):
        model = make_model("llama")
        model.config.distributed_config = SimpleNamespace(**{name: 2})
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        with pytest.raises(UnsupportedError, match=f"a model with {name}=2 in its distributed_config is not supported"):
            Ours(model, args, tokenring=tr.ContextParallel("self"))


@pytest.mark.parametrize(("package", "newest"), [("accelerate", "1.15"), ("trl", "1.16")])
def test_versions_of_what_trainers_are_made_of(package: str, newest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too old, too new and missing: our own message, before anything is made."""
    found = SimpleNamespace(__version__=newest)
    made = type("SFTTrainer", (), {"__module__": "trl.trainer.sft_trainer"})
    monkeypatch.setitem(sys.modules, package, found)
    check_trainer(made)
    for version in ("0.9.0", "99.0"):
        found.__version__ = version
        with pytest.raises(UnsupportedError, match=f"{package} {version} is not one that tokenring was run with"):
            check_trainer(made)
        check_trainer(made, any_version=True)
    if package == "trl":
        check_trainer(type("Trainer", (), {"__module__": "transformers.trainer"}))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BackendUnavailable, match=f"{package} cannot be imported .*: pip install '{package}>=1"):
        check_trainer(made)


def test_deepspeed_is_refused() -> None:
    class Speedy:
        def create_accelerator_and_postprocess(self) -> None:
            self.accelerator, self.is_deepspeed_enabled = SimpleNamespace(parallelism_config=None), True

    class OnSpeedy(TokenRingTrainerMixin, Speedy):
        def __init__(self) -> None:
            self.tokenring = tr.ContextParallel("self")

    with pytest.raises(UnsupportedError, match="DeepSpeed is not supported by tokenring's Trainer"):
        OnSpeedy().create_accelerator_and_postprocess()


@pytest.mark.parametrize("version", (1, 2))
def test_fsdp1_is_refused_and_fsdp2_is_not(version: int) -> None:
    class Sharded:
        def create_accelerator_and_postprocess(self) -> None:
            state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version))
            self.accelerator = SimpleNamespace(parallelism_config=None, state=state)

    class OnSharded(TokenRingTrainerMixin, Sharded):
        def __init__(self) -> None:
            self.tokenring = tr.ContextParallel("self")

    refusal = pytest.raises(UnsupportedError, match=r"FSDP1 is not supported .*fsdp_config=\{'version': 2\}")
    with refusal if version == 1 else nullcontext():
        OnSharded().create_accelerator_and_postprocess()


class Ours(TokenRingTrainerMixin, Trainer):  # type: ignore[misc]
    pass


def trainer(folder: Path, arguments: dict[str, Any], **more: Any) -> Any:
    args = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1, **arguments)
    rows = [{name: x[0] for name, x in make_batch("dense", seed=seed).items()} for seed in range(4)]
    return Ours(
        make_model("llama"), args, train_dataset=rows, eval_dataset=rows, tokenring=tr.ContextParallel("self"), **more
    )


def test_evaluation_and_what_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, {"prediction_loss_only": True, "save_strategy": "no"})
    assert made.get_cp_size() == 1 and made.model.config._attn_implementation == "tokenring_training"
    assert made.evaluate()["eval_loss"] > 0
    for arguments, more, text in (
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor"),
        ({"average_tokens_across_devices": False}, {}, "average_tokens_across_devices"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            trainer(tmp_path, arguments, **more)
    with pytest.raises(UnsupportedError, match="compute_loss_func"):
        trainer(tmp_path, {"save_strategy": "no"}, compute_loss_func=lambda *_, **__: None).train()
    with pytest.raises(UnsupportedError, match="evaluation by logits"):
        made.args.prediction_loss_only = False
        made.predict(made.train_dataset)
    nothing: Any = None
    with pytest.raises(ConfigurationError, match="cp is of type NoneType"):
        Ours(make_model("llama"), tokenring=nothing)


def test_models_that_training_makes_anew_are_changed(tmp_path: Path) -> None:
    """And one that was not changed gets no part of a batch, which it would take for whole sequences."""
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1, save_strategy="no"
    )
    rows = [{name: x[0] for name, x in make_batch("dense", seed=seed).items()} for seed in range(8)]
    made = Ours(
        args=args, model_init=lambda: make_model("llama"), train_dataset=rows, tokenring=tr.ContextParallel("self")
    )
    first = made.model
    made.train()
    assert made.model is not first and made.model.config._attn_implementation == "tokenring_training"
    made.model_init = None
    stop_tokenring(made.model)
    with pytest.raises(ConfigurationError, match="the trainer's model is another than tokenring has changed"):
        made.train()


class Bare(TokenRingTrainerMixin):
    """The part of a trainer that cuts batches."""

    def __init__(self, model: Any, cp: tr.ContextParallel) -> None:
        self.model, self.tokenring, self._taken = model, cp, {"any_model": False, "any_version": False}
        self._change(model)


def cut_to_train(here: Here) -> tuple[str, ...]:
    """Return what is said of a batch that a model trains on: without gradients, with DDP, and without it."""
    made, batch, said = Bare(make_model("llama"), here.cp()), make_batch("dense"), []
    for model, trains in ((made.model, False), (DistributedDataParallel(made.model), True), (made.model, True)):
        try:
            with torch.set_grad_enabled(trains):
                made._prepare_context_parallel_inputs(model, batch)
            said.append("fine")
        except ConfigurationError as error:
            said.append(str(error))
    return tuple(said)


def test_a_model_without_ddp_is_not_trained(ranks: RankPools) -> None:
    """accelerate leaves it so after an evaluation: ranks then trained on gradients of their own tokens, in silence."""
    for *fine, said in ranks(2)(cut_to_train):
        assert fine == ["fine", "fine"] and "neither DDP nor FSDP wraps the LlamaForCausalLM that trains" in said


def test_sizes_of_a_mesh() -> None:
    grid = RankGrid({"dp_replicate": 3, "cp": 2})
    assert grid.mesh_dim_names == ("dp_replicate", "cp") and (grid["cp"].size(), grid.size()) == (2, 6)
    assert torch.tensor(grid["dp_replicate"].size()) == 3
