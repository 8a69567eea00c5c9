"""Megatron-core's `core_attention`, over the context-parallel group by a schedule of ours.

Megatron's words: s tokens (here, of s · cp), b batch, t tokens of packed documents, np query heads and ng kv heads of
this tensor-parallel rank, hn head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tokenring.integrations.megatron.arguments import check_call, check_layer, check_options, check_shapes
from tokenring.integrations.megatron.contexts import Contexts, contexts_of
from tokenring.integrations.megatron.groups import group_of_call, group_of_layer, kept
from tokenring.integrations.megatron.masks import mask_of_call, window_of_layer
from tokenring.integrations.megatron.options import framework_seconds
from tokenring.integrations.megatron.packed import Packing, attend_packed
from tokenring.integrations.megatron.schedules import schedule_of_layer
from tokenring.integrations.megatron.softmax import offset_of_layer, scale_of_layer, sharded_offset, softcap_of_layer
from tokenring.integrations.megatron.version import check_version, warn_if_not_run
from tokenring.sequence.layout import contiguous

if TYPE_CHECKING:
    from tokenring.sequence.layout import Layout
    from tokenring.sequence.mask import Mask


class TokenRingAttention(torch.nn.Module):
    """Attention of one layer; for `core_attention` in a layer spec, as a class or in a ModuleSpec with `params`.

    It has no buffers, and one parameter where config.softmax_type is "learnable": softmax_offset, as Megatron's own has
    it. Megatron gives all arguments up to model_comm_pgs; `params` may hold schedule,
    any_version and ContextParallel's options, as for use_tokenring; timeout_seconds is by default the framework's own
    (`options.framework_seconds`). Raises UnsupportedError for what no schedule
    computes (dropout, cross attention, an unknown version), ConfigurationError for names and groups that are
    wrong or missing.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: Any = None,
        pg_collection: Any = None,
        model_comm_pgs: Any = None,
        *,
        schedule: str = "auto",
        any_version: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if not any_version:
            warn_if_not_run(check_version())
        check_options(options)
        check_layer(config, attention_type, attention_dropout)
        self.config, self.layer_number, self.attn_mask_type = config, layer_number, attn_mask_type
        self.schedule = schedule_of_layer(cp_comm_type, schedule, config)
        self.softmax_scale = scale_of_layer(config, softmax_scale, k_channels)
        self.softcap = softcap_of_layer(config)
        self.window = window_of_layer(config, layer_number)
        self.softmax_offset = offset_of_layer(config)
        group = group_of_layer(config, pg_collection, model_comm_pgs)
        self.group = kept(group)
        self._tp_group = getattr(pg_collection or model_comm_pgs, "tp", None)
        self.options = {**options, "tensor_parallel": getattr(config, "tensor_model_parallel_size", 1)}
        if "timeout_seconds" not in options and (seconds := framework_seconds(config, group)) is not None:
            self.options["timeout_seconds"] = seconds
        self._contexts = contexts_of(self.group, self.options)
        self._others: dict[Any, Contexts] = {}  # of groups that calls bring

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **more: Any,
    ) -> torch.Tensor:
        """Return out [s, b, np · hn] of query [s, b, np, hn], key and value [s, b, ng, hn]; if packed, [t, np · hn].

        Packed inputs are [t, np or ng, hn]. hn of value, and so of out, may be another than that of query and key.

        Raises UnsupportedError for masks and biases that cannot be split, ConfigurationError for documents that cannot.
        """
        packed = getattr(packed_seq_params, "qkv_format", None) == "thd"
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        contexts = self._contexts_of_call(packed_seq_params)
        with contexts.hearing(self.schedule, query):
            check_call(attention_bias, more)
            mask = mask_of_call(mask_type, attention_mask, packed, self.window)
        if packed:
            out = self._packed(contexts, packed_seq_params, mask, query, key, value)
        else:
            out = self._batch(contexts, mask, query, key, value)
        return out.flatten(-2)

    def _batch(
        self, contexts: Contexts, mask: Mask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        with contexts.hearing(self.schedule, q):
            check_shapes(q, k, contexts.ranks)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return self._attend(contexts, q, k, v, mask).transpose(0, 1)

    def _attend(
        self, contexts: Contexts, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask,
        layout: Layout | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return out [B, T, Hq, Dv] of one call; layout: None for zigzag."""
        return contexts.attend(
            self.schedule, q, k, v, mask, self.softmax_scale, self._training, sinks=self._sinks(q),
            softcap=self.softcap, layout=layout,
        )  # fmt: skip

    def _sinks(self, q: torch.Tensor) -> torch.Tensor | None:
        """Return a logit for each head, where the queries are; None: there are none."""
        return None if self.softmax_offset is None else self.softmax_offset.to(q.device)

    def _packed(
        self, contexts: Contexts, params: Any, mask: Mask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        with contexts.hearing(self.schedule, q):
            packing = contexts.packings.of(params, contexts.rank, contexts.ranks, q.shape[0])
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (q, k, v))
        return self._documents(contexts, packing, mask, q, k, v)

    def _documents(
        self, contexts: Contexts, packing: Packing, mask: Mask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        return attend_packed(
            q, k, v, packing, mask,
            lambda q, k, v, mask, pack: contexts.attend(
                self.schedule, q, k, v, mask, self.softmax_scale, self._training, any_length=True, sinks=self._sinks(q),
                softcap=self.softcap,
                layout=None if pack is None else contiguous(contexts.ranks, contexts.ranks * packing.tokens), pack=pack,
            ),
        )  # fmt: skip

    @property
    def _training(self) -> bool:
        """True if a backward pass follows: also where Megatron recomputes, and has gradients off in forward."""
        return self.training or torch.is_grad_enabled()

    def _contexts_of_call(self, packed_seq_params: Any) -> Contexts:
        group = kept(group_of_call(self.group, packed_seq_params))
        if group == self.group:
            return self._contexts
        if group not in self._others:
            options = {name: value for name, value in self.options.items() if name != "topology"}  # of other ranks
            self._others[group] = contexts_of(group, options)
        return self._others[group]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **more: Any) -> None:
        """Load nothing: checkpoints of models with TransformerEngine's attention have a state of it, ours has none."""
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *rest, **more)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return learned sinks as Megatron's distributed checkpoints want them; nothing else is kept."""
        return sharded_offset(self, prefix, sharded_offsets, metadata, self._tp_group)

    def extra_repr(self) -> str:
        """Return the schedule and the layer's number, for the module's repr."""
        return f"schedule={self.schedule!r}, layer_number={self.layer_number}"
