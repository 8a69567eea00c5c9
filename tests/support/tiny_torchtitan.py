"""Debug models of torchtitan with random weights on the CPU, their batches, and one process to compare with.

Needs torchtitan; `need` skips a test without it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from gradient_errors import largest_error
from ranks import Here

from tokenring.errors import TokenRingError

MODELS = ("llama3", "qwen3", "gpt_oss", "deepseek_v3")
IGNORED = -100
Results = dict[str, torch.Tensor]


def need() -> None:
    """Skip where torchtitan is not there, which no other test wants."""
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed: pip install 'torchtitan>=0.3,<0.4'", allow_module_level=True)


@contextlib.contextmanager
def on_cpu(spmd_backend: str = "spmd_types") -> Iterator[None]:
    """torchtitan takes a machine without an accelerator for one with CUDA; and compiles what makes masks."""
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.nn.attention.flex_attention import create_block_mask
        from torchtitan.distributed import parallel_dims, utils
        from torchtitan.models.common import attention, moe, token_dispatcher
        from torchtitan.models.gpt_oss import moe as gpt_oss_moe
        from torchtitan.tools import utils as tools

        logging.getLogger().setLevel(logging.ERROR)
        for module in (tools, parallel_dims, utils, token_dispatcher):
            patched.setattr(module, "device_type", "cpu")
        patched.setattr(attention, "_compiled_create_block_mask", create_block_mask)
        for kind in (moe.GroupedExperts, gpt_oss_moe.GptOssGroupedExperts):
            patched.setattr(kind, "forward", in_float(kind.forward))
        patched.setattr(moe.GroupedExperts, "_grouped_mm", grouped_product)
        was = utils.get_spmd_backend()
        utils.set_spmd_backend(spmd_backend)
        try:
            yield
        finally:
            utils.set_spmd_backend(was)


# ---------- models and batches


def make_config(
    name: str, seq_len: int, attention: str = "flex", layers: int | None = None, spmd_backend: str = "spmd_types",
    cp: int = 1, dp: int = 1, compiled: bool = False,
) -> Any:  # fmt: skip
    """A Trainer.Config of a debug model in float32, before the Trainer has updated it."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.trainer import Trainer

    registry = importlib.import_module(f"torchtitan.models.{name}").model_registry
    spec = registry("debugmodel", attn_backend=attention)
    spec.model.layers = spec.model.layers[:layers]
    return Trainer.Config(
        model_spec=spec,
        training=TrainingConfig(seq_len=seq_len, mixed_precision_param="float32", disable_cuda_graphs=True),
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=dp, context_parallel_degree=cp, spmd_backend=spmd_backend
        ),
        compile=CompileConfig(enable=compiled, backend="aot_eager"),
        activation_checkpoint=None,
    )


def make_model(config: Any) -> Any:
    """The same weights each time."""
    config.model_spec.model.update_from_config(config=config)
    torch.manual_seed(11)
    model = config.model_spec.model.build()
    model.init_weights(buffer_device=torch.device("cpu"))
    with torch.no_grad():
        for each, x in model.named_parameters():
            if each.endswith("sinks"):
                x.uniform_(-1.0, 2.0)
    return model.train()


def make_batch(rows: int, seq_len: int, documents: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Rows of these documents, by length, one after the other, as torchtitan's loader gives them."""
    made = torch.Generator().manual_seed(3)
    tokens = torch.randint(2048, (rows, seq_len + 1), generator=made)
    places = [torch.cat([torch.arange(n) for n in documents[row % len(documents)]]) for row in range(rows)]
    labels = tokens[:, 1:].clone()
    labels[:, ::13] = IGNORED
    return {"input": tokens[:, :-1], "positions": torch.stack(places), "labels": labels}


def make_trainer(config: Any, model: Any, dims: Any) -> Any:
    """torchtitan's Trainer without its set-up, which wants an accelerator: the code of a step is its own."""
    from torchtitan.distributed.utils import get_spmd_context
    from torchtitan.trainer import Trainer

    trainer = object.__new__(Trainer)
    trainer.config, trainer.model_config, trainer.model_parts = config, config.model_spec.model, [model]
    trainer.parallel_dims, trainer.device, trainer.ntokens_seen = dims, torch.device("cpu"), 0
    trainer.loss_fn, trainer.train_context = loss_of, get_spmd_context(parallel_dims=dims)
    trainer.fwd_bwd_fn = trainer._forward_backward_body
    return trainer


def loss_of(pred: Any, labels: Any, valid: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    """A loss as torchtitan's are: a sum over this rank's tokens, by the number of those of all ranks."""
    flat = pred.flatten(0, 1).float()
    total = torch.nn.functional.cross_entropy(flat, labels.flatten(), reduction="sum", ignore_index=IGNORED)
    return total / valid, None


def step(trainer: Any, batch: dict[str, torch.Tensor], valid: torch.Tensor) -> torch.Tensor:
    """One forward and backward pass by torchtitan's own code."""
    given = {"input": batch["input"], "positions": batch["positions"]}
    loss = trainer.forward_backward_step(input_dict=given, labels=batch["labels"], global_valid_tokens=valid)
    return loss.detach()  # type: ignore[no-any-return]


def gradients(model: Any) -> Results:
    found = {}
    for name, x in model.named_parameters():
        if x.grad is not None:
            whole = x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
            found[name.replace("_orig_mod.", "")] = whole.clone()
    return found


def in_one_process(name: str, batch: dict[str, torch.Tensor], layers: int | None = None) -> Results:
    """Loss and gradients by torchtitan's own masks, in plain arithmetic: its FlexAttention has no backward on CPUs."""
    from torchtitan.distributed import ParallelDims

    with on_cpu("partial_dtensor"):
        config = make_config(name, batch["input"].shape[1], "flex", layers, "partial_dtensor")
        model = make_model(config)
        for layer in model.layers.values():
            layer.attention.inner_attention.forward = plain_attention
        dims = ParallelDims(1, 1, 1, 1, 1, 1, 1, "partial_dtensor")
        loss = step(make_trainer(config, model, dims), batch, (batch["labels"] != IGNORED).sum())
        return {"loss": loss, **gradients(model)}


def plain_attention(q: Any, k: Any, v: Any, *, attention_masks: Any, scale: Any = None, out_transform: Any = None,
                    **_: Any) -> Any:  # fmt: skip
    """Compute what torchtitan's FlexAttention does, from the function that its BlockMask was made of."""
    from torch.nn.attention.flex_attention import create_mask

    rows, length = q.shape[:2]
    seen = create_mask(attention_masks.mask_mod, rows, 1, length, k.shape[1], device="cpu")  # k of all ranks, perhaps
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    out = ((scores - lse[..., None]).exp() @ v).transpose(1, 2)
    return out if out_transform is None else out_transform(out, lse.transpose(1, 2))


def in_float(forward: Any) -> Any:
    """The function of torchtitan's experts, which compute in bfloat16 whatever the dtype is, in float32."""
    if forward.__code__.co_filename == "<in float32>":
        return forward
    made: dict[str, Any] = {}
    source = textwrap.dedent(inspect.getsource(forward)).replace(".bfloat16()", ".float()")
    exec(compile(source, "<in float32>", "exec"), forward.__globals__, made)
    return made["forward"]


def grouped_product(experts: Any, *, A: Any, B_t: Any, offs: Any) -> Any:
    """torch's grouped product, which a compiler takes in bfloat16 alone."""
    if not torch.compiler.is_compiling():
        return torch._grouped_mm(A, B_t, offs=offs)
    of = torch.searchsorted(offs, torch.arange(A.shape[0], dtype=offs.dtype), right=True)
    return sum(torch.where((of == each)[:, None], A @ B_t[each], 0.0) for each in range(len(B_t)))


# ---------- on ranks


def split(
    here: Here, /, name: str, seq_len: int, batches: Sequence[Sequence[Sequence[int]]], cp: int, rows: int = 1,
    attention: str = "flex", layers: int | None = None, spmd_backend: str = "partial_dtensor", compiled: bool = False,
    **options: Any,
) -> tuple[float, str]:  # fmt: skip
    """The largest relative error against one process, and of what; or a refusal. FSDP over the ranks, CP of some.

    batches: for each step, of some rows the lengths of documents. Rank 0 alone compares: the others find no error.
    """
    from tokenring.integrations.torchtitan import use_tokenring

    dp, errors = here.world_size // cp, []
    with on_cpu(spmd_backend):
        config = make_config(name, seq_len, attention, layers, spmd_backend, cp, dp, compiled)
        trainer = on_ranks(use_tokenring(config, **options), here.world_size)
        for documents in batches:
            batch = make_batch(rows * dp, seq_len, documents)
            try:
                found = step_on_ranks(trainer, batch, here.rank // cp * rows, rows)
            except TokenRingError as error:
                return float("inf"), f"refused: {error}"
            if here.rank == 0:
                errors.append(largest_error(found, in_one_process(name, batch, layers), zeros_may_lack=True))
    return max(errors, default=(0.0, ""))


def on_ranks(config: Any, world_size: int) -> Any:
    """A Trainer whose model torchtitan has parallelized."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed import ParallelDims

    model, dims = make_model(config), ParallelDims.from_config(config.parallelism, world_size)
    dims.build_mesh()
    model = config.model_spec.parallelize_fn(
        model, parallel_dims=dims, training=config.training, parallelism=config.parallelism,
        compile_config=config.compile, ac_config=config.activation_checkpoint, dump_folder="",
    )  # fmt: skip
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_force_sum_reduction_for_comms(True)  # Gloo has no sums with a factor
    return make_trainer(config, model, dims)


def step_on_ranks(trainer: Any, batch: dict[str, torch.Tensor], first: int, rows: int) -> Results:
    """The loss of all ranks and whole gradients of a step, in which this rank has these rows."""
    trainer.model_parts[0].zero_grad()
    own = {name: x[first : first + rows] for name, x in batch.items()}
    loss = step(trainer, own, (batch["labels"] != IGNORED).sum())
    if hasattr(loss, "full_tensor"):
        loss = loss.full_tensor()
    else:
        torch.distributed.all_reduce(loss)
    return {"loss": loss, **gradients(trainer.model_parts[0])}
