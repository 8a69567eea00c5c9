"""The inner attention of torchtitan's layers, over the tokens of all ranks. Importing this imports torchtitan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.module import Module

from tokenring.api.attention import attend
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.raising import raise_on_all_ranks
from tokenring.integrations.torchtitan.batches import TitanBatch

TENSORS = ("q_BLNH", "k_BLNH", "v_BLNH")  # torchtitan's names of the arguments of an inner attention, in its configs


class TitanAttention(Module):  # type: ignore[misc]
    """Attend over the tokens of all ranks; which of them see which comes with the batch.

    It is none of torchtitan's own kinds: for those it makes masks over whole rows, and gathers K and V of all ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """Hold what it is built from. window: how many tokens a token sees, its own among them; None: no limit.

        tokenring_setup: the number of its Setup in this process.
        """

        window: int | None = None
        tokenring_setup: int | None = None

        def build(self, **given: Any) -> Any:
            """Build the module; torchtitan has said by now how its arguments lie and by which backend they move."""
            kind = _Wrapped if get_spmd_backend() == "partial_dtensor" else TitanAttention
            made = kind(config=dataclasses.replace(self))
            made._sharding_config = in_place(self.sharding_config)
            return made

    def __init__(self, config: Any) -> None:
        """Make a module without state."""
        torch.nn.Module.__init__(self)  # beyond the second base of _Wrapped, whose state is of no use
        self.window = config.window

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """Return out [B, T, H, Dv] of q [B, T, H, D], k [B, T, Hkv, D] and v [B, T, Hkv, Dv] of T tokens here.

        attention_masks: the TitanBatch. out_transform: what the layer makes of out and its lse [B, T, H], as sinks do.
        Raises UnsupportedError and ConfigurationError for what tokenring does not compute.
        """
        q, k, v = (x.to_local() if isinstance(x, DTensor) else x for x in (q_BLNH, k_BLNH, v_BLNH))
        batch = _checked(attention_masks)
        if more or not is_causal:
            raise_on_all_ranks(batch.cp, _unknown([*more, *([] if is_causal else ["is_causal"])]), q)
        training = self.training or torch.is_grad_enabled()  # also in the forward pass of a checkpoint
        out, lse = attend(
            q, k, v, batch.cp, batch.mask_of(self.window), scale, training, layout=batch.layout,
            wants_lse=out_transform is not None,
        )  # fmt: skip
        return out if out_transform is None else out_transform(out, lse.transpose(1, 2))


class _Wrapped(TitanAttention, ScaledDotProductAttention):  # type: ignore[misc]
    """The same for torchtitan's oldest backend, which knows its own kinds alone: this one's tensors become DTensors."""


def _checked(batch: Any) -> TitanBatch:
    """Return the batch that a model was given. Raises ConfigurationError for another, or a call that is captured."""
    if not isinstance(batch, TitanBatch):
        raise ConfigurationError(
            f"the attention of tokenring got attention_masks of type {type(batch).__name__}, not a batch that was cut: "
            f"train with parallelism.context_parallel_degree above 1, or without tokenring; in a loop of your own give "
            f"the model what cut_batch returns"
        )
    if not torch.compiler.is_compiling() and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a CUDA graph of a training step cannot hold attention over several ranks, which agree on each call over "
            "the host: say training.disable_cuda_graphs"
        )
    return batch


def _unknown(asked: Iterable[str]) -> UnsupportedError:
    """Return the error for keywords that may change the result."""
    return UnsupportedError(
        f"a layer calls its attention with {', '.join(sorted(asked))}, which tokenring does not know: a model whose "
        f"layers do so is not supported"
    )


def in_place(sharding: Any) -> Any:
    """Return torchtitan's ShardingConfig of an inner attention with K and V left where they are, as Q is.

    torchtitan's own gathers K and V of all ranks, and adds up their gradients.
    """
    if sharding is None or sharding.in_src_shardings is None:
        return sharding
    lying = sharding.in_src_shardings
    local_map = dataclasses.replace(sharding.local_map, in_grad_placements=tuple(lying[name] for name in TENSORS))
    return dataclasses.replace(sharding, in_dst_shardings=dict(lying), local_map=local_map)
