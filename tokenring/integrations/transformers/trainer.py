"""transformers' Trainer, with the sequences of each batch split over the ranks of a ContextParallel.

    class LongTrainer(TokenRingTrainerMixin, Trainer):      # or trl's SFTTrainer, packed too
        pass

    arguments = TrainingArguments(...)                      # joins the processes
    trainer = LongTrainer(model, arguments, ..., tokenring=tr.ContextParallel(mesh["cp"], layout="auto"))
    trainer.train()

Nothing of accelerate's own context parallelism is used. Importing this imports no transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from tokenring.api.context import ContextParallel
from tokenring.api.inputs import check_context
from tokenring.api.sharding import add_up
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.gradient_joins import check_wrapped
from tokenring.integrations.transformers.batches import BATCH, cut_batch
from tokenring.integrations.transformers.refusals import check_keywords
from tokenring.integrations.transformers.training import HELD, change_model
from tokenring.integrations.transformers.versions import check_trainer
from tokenring.runtime.agreement import refusing


class RankGrid:
    """Sizes of a mesh's dimensions, which is all of a DeviceMesh that accelerate's data loader asks for."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes = sizes

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Names of dimensions, as accelerate has them."""
        return tuple(self._sizes)

    def __getitem__(self, name: str) -> RankGrid:
        return RankGrid({name: self._sizes[name]})

    def size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self._sizes.values())


class TokenRingTrainerMixin:
    """A Trainer whose ranks of one ContextParallel get the same batches, and compute a part of each.

    tokenring: the ContextParallel, of neighbouring ranks of the world; all others are data-parallel groups like it.
    any_model, any_version: as of `use_tokenring`, which is called with the trainer's model. All else is the Trainer's.
    DDP or FSDP must join the gradients of all ranks, as the Trainer does by itself.

    A subclass with a compute_loss of its own gets the logits of this rank's tokens, which nothing sees: a loss that it
    computes from them must be this rank's share, such that the mean of all processes' is the loss.

    Raises UnsupportedError for versions of transformers, accelerate and trl that were not run, label smoothing,
    compute_loss_func, accelerate's own context parallelism, DeepSpeed, tensor and pipeline parallelism, and evaluation
    that wants logits; ConfigurationError for ranks that are no neighbours, and in steps for FSDP2 over other ranks than
    all, and a model that neither DDP nor FSDP wraps; BackendUnavailable without accelerate.
    """

    accelerator: Any
    args: Any
    state: Any
    gather_function: Any
    model: Any

    def __init__(
        self, *given: Any, tokenring: ContextParallel, any_model: bool = False, any_version: bool = False, **more: Any
    ) -> None:
        check_context(tokenring)
        check_trainer(type(self), any_version)
        self.tokenring = tokenring
        self._taken = {"any_model": any_model, "any_version": any_version}
        super().__init__(*given, **more)
        _check_arguments(self)
        self._change(self.model)

    def _change(self, model: Any) -> None:
        """Let a model's calls take cut batches, whose gradients the mean over all ranks joins."""
        every = range(dist.get_world_size()) if dist.is_initialized() else None
        # Factor 1, with a mean: the Trainer multiplies the loss by the number of processes itself.
        change_model(_transformers_model(model), self.tokenring, "mean", 1, every, **self._taken)

    def call_model_init(self, *given: Any, **more: Any) -> Any:
        """Make a model as `model_init` does, anew for each training, and change it."""
        model = super().call_model_init(*given, **more)  # type: ignore[misc]
        self._change(model)
        return model

    def create_accelerator_and_postprocess(self) -> None:
        """Let the data loaders give the same batches to the ranks that share a sequence."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        used = getattr(self.accelerator, "parallelism_config", None)
        if used is not None and used.non_data_parallel_size > 1:
            raise UnsupportedError(
                "accelerate's parallelism_config with tp, cp or sp beside tokenring is not supported: leave it out; "
                "tokenring's ContextParallel says which ranks share a sequence"
            )
        if getattr(self, "is_deepspeed_enabled", False):
            raise UnsupportedError(
                "DeepSpeed is not supported by tokenring's Trainer: its data loaders would give each rank of cp "
                "other batches; take fsdp=True, or DDP"
            )
        plugin = getattr(getattr(self.accelerator, "state", None), "fsdp_plugin", None)
        if getattr(plugin, "fsdp_version", 2) == 1:
            raise UnsupportedError(
                "FSDP1 is not supported by tokenring's Trainer: it does not show over which ranks it joins gradients, "
                "and transformers is about to drop it; take FSDP2, by fsdp_config={'version': 2} or without a version"
            )
        mesh = _mesh_of(self.tokenring)
        if mesh is not None:
            self.accelerator._prepare_device_mesh = lambda: mesh

    def _get_dataloader(self, dataset: Any, *given: Any, **more: Any) -> Any:
        """Make a data loader, as of a dataset that `evaluate` is given. Raises UnsupportedError for an iterable one."""
        with refusing(self.tokenring, "forward"):
            _check_read(self, dataset)
        return super()._get_dataloader(dataset, *given, **more)  # type: ignore[misc]

    def get_cp_size(self) -> int:
        """Return how many ranks share a sequence."""
        return self.tokenring.world_size

    def _prepare_context_parallel_inputs(self, model: Any, inputs: dict[str, Any]) -> tuple[Callable[..., Any], Any]:
        changed = _transformers_model(self.model)
        with refusing(self.tokenring, "forward", *inputs.values()):
            if not hasattr(changed, HELD):
                raise ConfigurationError(
                    "the trainer's model is another than tokenring has changed, or was given its attention back: make "
                    "a trainer for each model, or give it model_init"
                )
            if self.tokenring.world_size > 1 and torch.is_grad_enabled():
                check_wrapped(model)
            check_keywords(changed.config, inputs)
        return nullcontext, cut_batch(inputs, self.tokenring, changed.config)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **more: Any
    ) -> Any:
        """Return this rank's share of the loss, such that its mean over all ranks is the loss.

        Without num_items_in_batch, as trl evaluates, over the ranks that share the batch, which may come whole.
        """
        if getattr(self, "compute_loss_func", None) is not None:
            raise UnsupportedError("compute_loss_func is not supported by tokenring: it gets a part of the logits only")
        if num_items_in_batch is not None:  # the loss is multiplied by the number of processes, by the Trainer
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **more)  # type: ignore[misc]
        if inputs.get(BATCH) is None:
            inputs = self._prepare_context_parallel_inputs(model, inputs)[1]
        items = inputs.get("num_items_in_batch")  # of the whole batch: trainers would take the mean of this rank's part
        with _not_multiplied(self.args):
            found = super().compute_loss(model, inputs, return_outputs, items, **more)  # type: ignore[misc]
        loss, *rest = found if isinstance(found, tuple) else (found,)
        loss = loss * self.tokenring.world_size
        return (loss, *rest) if isinstance(found, tuple) else loss

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count the tokens of a batch (include_num_input_tokens_seen) once for all ranks that share it."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        counted = self.state.num_input_tokens_seen - before  # of all ranks, each with its whole batch
        self.state.num_input_tokens_seen = before + counted // self.tokenring.world_size

    def evaluation_loop(self, *given: Any, **more: Any) -> Any:
        """Evaluate, with the loss of each group's batch taken once: transformers gathers those of all ranks."""
        if self.tokenring.world_size > 1:
            self.gather_function = self._gathered_of_groups  # until transformers puts its own back, in the end
        return super().evaluation_loop(*given, **more)  # type: ignore[misc]

    def _gathered_of_groups(self, losses: Any) -> Any:
        """Return the losses [B] of one rank of each group, without those of sequences that fill the last batch up."""
        state, size = self.accelerator.gradient_state, self.tokenring.world_size
        found = self.accelerator.gather(losses).view(-1, size, len(losses))[:, 0].flatten()
        left = state.remainder if state.end_of_dataloader else 0
        return found[:left] if left > 0 else found

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, *given: Any, **more: Any
    ) -> Any:
        """Return the loss of a batch, the same on all ranks that share it. Raises UnsupportedError for logits."""
        if not prediction_loss_only or inputs.get("labels") is None:
            raise UnsupportedError(
                "evaluation by logits, or without labels, is not supported by tokenring: each rank has the logits of "
                "its own tokens; set prediction_loss_only=True and no compute_metrics"
            )
        loss, *rest = super().prediction_step(model, inputs, prediction_loss_only, *given, **more)  # type: ignore[misc]
        if self.tokenring.world_size > 1:
            add_up(loss, self.tokenring, "adding up the loss of an evaluation")
            loss = loss / self.tokenring.world_size
        return (loss, *rest)


@contextmanager
def _not_multiplied(args: Any) -> Iterator[None]:
    """Keep trainers from multiplying a loss by the number of processes: they differ in when they do."""
    said, args.average_tokens_across_devices = args.average_tokens_across_devices, False
    try:
        yield
    finally:
        args.average_tokens_across_devices = said


def _check_arguments(trainer: Any) -> None:
    args = trainer.args
    _check_sharding(_transformers_model(trainer.model))
    if getattr(args, "label_smoothing_factor", 0.0):
        raise UnsupportedError("label_smoothing_factor is not supported by tokenring: set it to 0.0")
    for name in ("train_dataset", "eval_dataset"):
        _check_read(trainer, getattr(trainer, name, None))
    if not getattr(args, "average_tokens_across_devices", True):
        raise UnsupportedError(
            "average_tokens_across_devices=False is not supported by tokenring: ranks hold different numbers of labels "
            "of one batch; leave it True"
        )


def _check_sharding(model: Any) -> None:
    """Raise UnsupportedError for a model that transformers has split by more than FSDP, as it loaded the weights."""
    how = getattr(getattr(model, "config", None), "distributed_config", None)
    for name in ("tp_size", "pp_size", "ep_size"):
        if (getattr(how, name, None) or 1) > 1:
            raise UnsupportedError(
                f"a model with {name}={getattr(how, name)} in its distributed_config is not supported by tokenring's "
                f"Trainer: only fsdp_size and dp_replicate_size are, over all ranks"
            )


def _check_read(trainer: Any, dataset: Any) -> None:
    """Raise UnsupportedError where accelerate lets rank 0 read a dataset for all: by default, where it is iterable.

    dataset: or several by name, as for an evaluation.
    """
    said = trainer.args.accelerator_config.dispatch_batches
    sets = dataset.values() if isinstance(dataset, Mapping) else (dataset,)
    dispatched = any(isinstance(each, IterableDataset) for each in sets) if said is None else said
    if trainer.tokenring.world_size > 1 and dispatched:
        raise UnsupportedError(
            "batches that rank 0 dispatches are not supported by tokenring: say accelerator_config="
            "{'dispatch_batches': False}, so that each rank reads the dataset itself"
        )


def _mesh_of(cp: ContextParallel) -> RankGrid | None:
    """Return the mesh of all ranks whose last dimension is that of cp; None for one rank. Raises ConfigurationError."""
    if cp.world_size == 1:
        return None
    world, size = dist.get_world_size(), cp.world_size
    held = dist.get_process_group_ranks(cp.group)
    first = dist.get_rank() // size * size
    if world % size or held != list(range(first, first + size)):
        raise ConfigurationError(
            f"tokenring's ranks are {held} of {world}: the Trainer wants neighbours, as the last dimension of "
            f"init_device_mesh(device, ({max(1, world // size)}, {size}))"
        )
    return RankGrid({"dp_replicate": world // size, "cp": size})


def _transformers_model(model: Any) -> Any:
    """Return the model of transformers in one that may be wrapped, as by PEFT; the given one where there is none."""
    for each in model.modules():
        if hasattr(each, HELD) or (hasattr(each, "set_attn_implementation") and hasattr(each, "config")):
            return each
    return model
