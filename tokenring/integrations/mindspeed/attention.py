"""The attention that takes the place of Megatron's: tokenring's, or MindSpeed's own where the plan saves too little."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from tokenring.api.attention import prepared
from tokenring.errors import ConfigurationError
from tokenring.integrations.megatron import TokenRingAttention
from tokenring.integrations.megatron.arguments import check_call, check_cut, check_shapes
from tokenring.integrations.megatron.contexts import Contexts
from tokenring.integrations.megatron.masks import mask_of_call
from tokenring.integrations.megatron.worth import saves_too_little
from tokenring.integrations.mindspeed.flags import is_auto
from tokenring.integrations.mindspeed_cuts.documents import batched, packing_of_ends, sequences_of_ends
from tokenring.integrations.mindspeed_cuts.general import LastMask
from tokenring.integrations.mindspeed_cuts.layouts import (
    ULYSSES,
    algorithm,
    cuts_documents,
    is_general,
    is_packed,
    layout_of,
    may_keep_mindspeed,
)
from tokenring.integrations.mindspeed_llm import Parts, as_subclasses_expect, joined_parts
from tokenring.sequence.mask import Mask
from tokenring.sequence.workload import Request

WORTH = 0.05  # of the time of MindSpeed's own algorithm: predictions are not good enough to change for less


def attention_class(own: type[Any], schedule: str, options: Mapping[str, Any]) -> type[TokenRingAttention]:
    """Make a class for one of Megatron's attentions. own: the class it replaces; schedule, options: of our flags."""
    found: dict[tuple[str, Request], bool] = {}  # by schedule and kind of call, of all layers: whether own stays
    last = LastMask()

    class MindSpeedTokenRingAttention(TokenRingAttention):
        """Attention of one layer, made and called as Megatron's."""

        replaces = own

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, schedule=schedule, **(dict(options) | kwargs))
            as_subclasses_expect(self)
            # In subclasses of theirs, in windows and with head dims of its own MindSpeed's does something else; and in
            # Ulysses it is called by what exchanges heads.
            widths = kwargs.get("k_channels"), kwargs.get("v_channels")
            self._plain = type(self) is MindSpeedTokenRingAttention and self.window is None and widths == (None, None)
            self._plain = self._plain and self.softmax_offset is None and may_keep_mindspeed(self.config)
            # MindSpeed's, where it may be taken; in a tuple, or it would be part of checkpoints.
            self._own = (own(*args, **kwargs),) if self._compares else ()

        @property
        def _compares(self) -> bool:
            return self._plain and is_auto(self.schedule)

        def forward(
            self,
            query: Parts,
            key: Parts,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            attn_mask_type: Any = None,
            attention_bias: torch.Tensor | None = None,
            packed_seq_params: Any = None,
            **more: Any,
        ) -> torch.Tensor:
            """Compute as TokenRingAttention does, of a sequence in MindSpeed's cut; packed [t, np, hn] if given so.

            query, key: also as lists of two parts of hn. Raises ConfigurationError, too, for a sequence that was not
            cut, and for ends of documents that do not fit.
            """
            q, k = joined_parts(query), joined_parts(key)
            with self._hearing(q):
                check_call(attention_bias, {name: value for name, value in more.items() if value is not False})
            mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
            is_pack = is_packed(self.config) or algorithm(self.config) == ULYSSES
            if packed_seq_params is not None and not is_pack:  # as Megatron's, and from 0 on
                return super().forward(q, k, value, attention_mask, attn_mask_type, None, packed_seq_params)
            q, k, value, weight = self._read(q, k, value)
            if packed_seq_params is not None:
                with self._hearing(q):
                    mask = mask_of_call(mask_type, attention_mask, True, self.window)
                return self._pack(packed_seq_params, mask, weight, q, k, value)
            call = q, k, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
            length, general = q.shape[0] * self._contexts.ranks, is_general(self.config)
            with self._hearing(q):
                check_cut(q, self.config)
                if is_packed(self.config):
                    raise ConfigurationError(
                        "--reset-attention-mask, and a call has no packed_seq_params, the ends of its documents: keep "
                        "MindSpeed's patch of the model's forward, or leave the flag out"
                    )
                if general:
                    mask = last.of(attention_mask, length, self.window, self.config)
                else:
                    mask = mask_of_call(mask_type, attention_mask, False, self.window)
                layout = layout_of(self.config, self._contexts.ranks, length)
            may_stay = not general and weight is None
            if may_stay and self._own and self._compares and self._own_stays(mask, q, k, value):
                return self._own[0](*call)  # type: ignore[no-any-return]
            with self._hearing(q):
                check_shapes(q, k, self._contexts.ranks)
            q, k, v = (x.transpose(0, 1) for x in (q, k, value))
            out = self._attend(self._contexts, q, k, v, mask, layout, weight)
            return out.transpose(0, 1).flatten(-2)

        def as_latents(self, query: Parts, key: Parts, value: torch.Tensor) -> tuple[Any, Any, Any]:
            """Return what TokenRingAttention does, of parts of query and key too."""
            return super().as_latents(joined_parts(query), joined_parts(key), value)

        def _pack(self, params: Any, mask: Mask, weight: torch.Tensor | None, *qkv: torch.Tensor) -> torch.Tensor:
            """Compute packed documents: out [t, np, hn], or [s, b, np · hn] where q has a dim for b."""
            of, is_batch = self._contexts, qkv[0].dim() == 4
            together = int(getattr(self.config, "micro_batch_size", 1)) if is_packed(self.config) else 1
            batch = qkv[0].shape[1] if is_batch else together
            if cuts_documents(self.config):
                q, k, v = (x.transpose(0, 1).flatten(0, 1) if is_batch else x for x in qkv)
                with self._hearing(q):
                    packing = of.packings.of(params, of.rank, of.ranks, q.shape[0], packing_of_ends)
                out = self._documents(of, packing, mask, q, k, v, weight)
            else:
                q, k, v = (batched(x, batch).flatten(0, 1)[None] for x in qkv)
                with self._hearing(q):
                    found = of.packings.of(params, of.rank, of.ranks, q.shape[1], sequences_of_ends)
                    of_all = found.mask_of_all(mask, batch)
                    layout = layout_of(self.config, of.ranks, q.shape[1] * of.ranks)
                out = self._attend(of, q, k, v, of_all, layout, weight)[0]
            return out.view(batch, -1, *out.shape[1:]).transpose(0, 1).flatten(-2) if is_batch else out

        def _hearing(self, q: torch.Tensor) -> AbstractContextManager[None]:
            return self._contexts.hearing(self.schedule, q)

        def _own_stays(self, mask: Mask, *qkv: torch.Tensor) -> bool:
            q, k, v = (x.transpose(0, 1) for x in qkv)
            cp = self._contexts.context(self.schedule, q.device)
            *_, request = prepared(q, k, v, cp, mask, self.softmax_scale, self._training)
            kind = self.schedule, request
            if kind not in found:
                found[kind] = own_stays(self._contexts, *kind, self.config)
            return found[kind]

    return MindSpeedTokenRingAttention


def own_stays(contexts: Contexts, schedule: str, request: Request, config: Any) -> bool:
    """Tell whether the planner's choice saves too little; all ranks of the group ask together, and rank 0 logs it."""
    window = int(getattr(config, "cp_window_size", 1))
    own = "ring" if window == 1 else f"double-ring/{window}"  # our schedules that do what MindSpeed does
    return saves_too_little(contexts, schedule, request, own, WORTH, "MindSpeed's own")
