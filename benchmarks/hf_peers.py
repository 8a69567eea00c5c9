"""Context parallelism of others for tiny transformers models, on CPU ranks: gradients against one process.

accelerate: what transformers' Trainer does with `ParallelismConfig(cp_size=...)`: accelerate's hooks on the model, the
Trainer's preparation of a batch, and torch's `context_parallel` around the call. torch has its ring for kernels of
accelerators alone: here its own ring runs on torch's flash kernels for CPUs, with heads of K and V repeated and V
padded to the width of K, as those want it. accelerate-as-it-is: without that.
ringmaster: axolotl-ringmaster's hooks that cut a batch, with its Ulysses over sdpa, or its ring over its own blocks
that run on a CPU.

Each computes logits of this rank's tokens; the loss is computed from them here, over the labels of the whole batch, and
gradients are added up, so that no peer is charged for how its trainer counts labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from gradient_errors import largest_error
from hf_families import alone, gradients, make_batch, make_model
from ranks import Here
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, pad

REFUSED = -1.0  # in the place of an error


def peer_error(here: Here, peer: str, family: str, kind: str, length: int) -> tuple[float, str]:
    """Return the largest relative error of gradients and what it is of, or REFUSED and the text of the exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = make_batch(kind, length)
        whole, wanted = alone(make_model(family), batch)
        model = make_model(family).train()
        items = sum(int(each[1:].ne(-100).sum()) for each in batch["labels"])
        refusal = ""
        try:
            with PEERS[peer](here, model, batch) as (call, labels):
                logits = call()
                share = cross_entropy(logits.float().flatten(0, 1), labels().flatten(), reduction="sum") / items
                torch.autograd.backward(share)
        except Exception as error:  # of any kind: it is the peer's word
            refusal = f"{type(error).__name__}: {error}".split("\n")[0]
        said: list[str] = [""] * here.world_size
        dist.all_gather_object(said, refusal)
        if any(said):
            return REFUSED, next(each for each in said if each)
        for each in model.parameters():
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
            dist.all_reduce(each.grad)
        loss = share.detach().clone()
        dist.all_reduce(loss)
        found = {name: grad for name, grad in gradients(model).items() if name in wanted}
        return max((abs(loss.item() - whole) / whole, "loss"), largest_error(found, wanted))


Call = tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]  # the model's logits, and labels beside them


@contextmanager
def ringmaster(how: str, here: Here, model: Any, batch: dict[str, torch.Tensor]) -> Iterator[Call]:
    import ringmaster as theirs
    from ringmaster.sp_context import ContextParallelContextManager
    from ringmaster.strategies.ring import make_ring_attention
    from transformers import AttentionInterface

    mesh = init_device_mesh("cpu", (here.world_size,), mesh_dim_names=("cp",))
    config = theirs.RingmasterConfig(size=here.world_size, backend=theirs.Backend(how))
    heads = getattr(model.config, "num_key_value_heads", None)
    runtime = theirs.setup(config, num_kv_heads=heads, device_mesh=mesh, device_type="cpu", inner_attn="sdpa")
    if how == "ring":  # its other blocks are of accelerators
        blocks = make_ring_attention("math", "math", config.rotate_method)
        AttentionInterface.register(runtime.attn_implementation, blocks)
    model.set_attn_implementation(runtime.attn_implementation)
    kept: dict[str, torch.Tensor] = {}

    def keep(_: Any, args: Any, given: dict[str, Any]) -> None:
        labels = given.get("shift_labels")
        kept["labels"] = labels if labels is not None else given["labels"]

    hooks = ContextParallelContextManager([model], mesh.get_group())
    try:
        with hooks:
            model.register_forward_pre_hook(keep, with_kwargs=True)
            yield lambda: model(**batch, use_cache=False).logits, lambda: kept["labels"]
    finally:
        theirs.teardown()


@contextmanager
def accelerate(how: str, here: Here, model: Any, batch: dict[str, torch.Tensor]) -> Iterator[Call]:
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from transformers import Trainer

    mesh = init_device_mesh("cpu", (here.world_size,), mesh_dim_names=("cp",))
    model.set_attn_implementation("sdpa")
    set_rotate_method("allgather")
    _attach_context_parallel_hooks(model)
    settings = SimpleNamespace(cp_enabled=True, cp_backend="torch")
    accelerator = SimpleNamespace(parallelism_config=settings, maybe_context_parallel=partial(context_parallel, mesh))
    trainer: Any = SimpleNamespace(accelerator=accelerator)
    given: dict[str, Any] = {name: x.clone() for name, x in batch.items()}
    region, given = Trainer._prepare_context_parallel_inputs(trainer, model, given)
    with rings_on_cpus() if how == "stand-in" else nullcontext(), region():
        labels = given["shift_labels"]
        del given["labels"], given["shift_labels"]
        yield lambda: model(**given, use_cache=False).logits, lambda: labels


PEERS = {
    "accelerate": partial(accelerate, "stand-in"),
    "accelerate-as-it-is": partial(accelerate, "as it is"),
    "ringmaster-ulysses": partial(ringmaster, "ulysses"),
    "ringmaster-ring": partial(ringmaster, "ring"),
}


# ---------- torch's ring on the flash kernels for CPUs


class RingOnCpus(torch.autograd.Function):
    """Torch's own ring, both passes, of q, k and v [B, H, S, D]."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, group: Any, is_causal: bool, scale: float | None) -> torch.Tensor:
        out: torch.Tensor
        out, lse, *_ = ring()._templated_ring_attention(
            group, 2, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
            query=q, key=k, value=v, is_causal=is_causal, dropout_p=0.0, scale=scale,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.given = group, is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        group, is_causal, scale = ctx.given
        found = ring()._templated_ring_attention_backward(
            group, 2, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, grad_out_name="grad_out",
            grad_out=grads[0].contiguous(), query=q, key=k, value=v, out=out, logsumexp=lse, is_causal=is_causal,
            dropout_p=0.0, scale=scale,
        )  # fmt: skip
        return *found[:3], None, None, None


def ring() -> Any:
    """Return torch's module of its ring."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


@contextmanager
def rings_on_cpus() -> Iterator[None]:
    """Let torch's context_parallel call its ring on CPUs."""
    functional, module = torch.nn.functional, ring()
    kept = module._enable_context_parallel_dispatcher_impl, module._disable_context_parallel_dispatcher_impl
    own = functional.scaled_dot_product_attention

    def enable(seq_dim: int, mesh: Any) -> None:
        def attend(
            q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
            scale: float | None = None, enable_gqa: bool = False,
        ) -> torch.Tensor:  # fmt: skip
            if attn_mask is not None:  # its ring of the kernel with a mask refuses one
                masked: torch.Tensor = module._scaled_dot_product_ring_efficient_attention(mesh, q, k, v, attn_mask)[0]
                return masked
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            width = v.shape[-1]
            q, k, v = (x.contiguous() for x in (q, k, pad(v, (0, q.shape[-1] - width))))
            found: torch.Tensor = RingOnCpus.apply(  # type: ignore[no-untyped-call]
                q, k, v, mesh.get_group(), is_causal, scale
            )
            return found[..., :width]

        functional.scaled_dot_product_attention = attend  # type: ignore[assignment]

    def disable() -> None:
        functional.scaled_dot_product_attention = own

    module._enable_context_parallel_dispatcher_impl, module._disable_context_parallel_dispatcher_impl = enable, disable
    try:
        yield
    finally:
        disable()
        module._enable_context_parallel_dispatcher_impl, module._disable_context_parallel_dispatcher_impl = kept
