"""The attention that takes the place of Megatron's: tokenring's, or MindSpeed's own where the plan saves too little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenring.api.attention import prepared
from tokenring.integrations.megatron import TokenRingAttention
from tokenring.integrations.megatron.arguments import check_call, check_cut
from tokenring.integrations.megatron.contexts import Contexts
from tokenring.integrations.megatron.masks import mask_of_call
from tokenring.integrations.megatron.worth import saves_too_little
from tokenring.integrations.mindspeed.flags import is_auto
from tokenring.integrations.mindspeed_llm import as_subclasses_expect, check_whole
from tokenring.sequence.mask import Mask
from tokenring.sequence.workload import Request

WORTH = 0.05  # of the time of MindSpeed's own algorithm: predictions are not good enough to change for less


def attention_class(own: type[Any], schedule: str, options: Mapping[str, Any]) -> type[TokenRingAttention]:
    """Make a class for one of Megatron's attentions. own: the class it replaces; schedule, options: of our flags."""
    found: dict[tuple[str, Request], bool] = {}  # by schedule and kind of call, of all layers: whether own stays

    class MindSpeedTokenRingAttention(TokenRingAttention):
        """Attention of one layer, made and called as Megatron's."""

        replaces = own

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, schedule=schedule, **(dict(options) | kwargs))
            as_subclasses_expect(self)
            # In subclasses of theirs, in windows and with head dims of its own MindSpeed's does something else.
            widths = kwargs.get("k_channels"), kwargs.get("v_channels")
            self._plain = type(self) is MindSpeedTokenRingAttention and self.window is None and widths == (None, None)
            self._plain = self._plain and self.softmax_offset is None
            # MindSpeed's, where it may be taken; in a tuple, or it would be part of checkpoints.
            self._own = (own(*args, **kwargs),) if self._compares else ()

        @property
        def _compares(self) -> bool:
            return self._plain and is_auto(self.schedule)

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
            """Compute as TokenRingAttention does. Raises ConfigurationError, too, for a sequence that was not cut."""
            check_call(attention_bias, more)
            check_whole(query, key)
            call = query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
            if packed_seq_params is None:
                check_cut(query, self.config)
                mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
                mask = mask_of_call(mask_type, attention_mask, False, self.window)
                if self._own and self._compares and self._own_stays(mask, query, key, value):
                    return self._own[0](*call)  # type: ignore[no-any-return]
            return super().forward(*call)

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
