"""The attention that takes the place of Megatron's: tokenring's, or MindSpeed's own where the plan saves too little."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.distributed as dist

from tokenring.errors import ConfigurationError
from tokenring.inputs import call_inputs, make_request
from tokenring.integrations.megatron import TokenRingAttention
from tokenring.integrations.megatron.arguments import check_call
from tokenring.integrations.megatron.attention import with_one_head_dim
from tokenring.integrations.megatron.contexts import Contexts
from tokenring.integrations.megatron.masks import mask_of_call
from tokenring.integrations.mindspeed.flags import SCHEDULE, is_auto, ranks
from tokenring.mask import Mask
from tokenring.planner.plan import Plan
from tokenring.planner.select import time_text
from tokenring.request import Request

LOG = logging.getLogger("tokenring")
WORTH = 0.05  # of the time of MindSpeed's own algorithm: predictions are not good enough to change for less


def attention_class(own: type[Any], schedule: str) -> type[TokenRingAttention]:
    """A class for both of Megatron's attentions. own: the class that it replaces; schedule: of --tokenring-schedule."""
    found: dict[tuple[str, Request], bool] = {}  # by schedule and kind of call, of all layers: whether own stays

    class MindSpeedTokenRingAttention(TokenRingAttention):
        """Attention of one layer, made and called as Megatron's."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, schedule=schedule, **kwargs)
            # In a tuple: as a sub-module it would be part of checkpoints.
            self._own = (own(*args, **kwargs),) if is_auto(self.schedule) else ()

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
            """As TokenRingAttention. Raises ConfigurationError, too, for a sequence that was not cut."""
            check_call(attention_bias, more)
            call = query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
            if packed_seq_params is None:
                check_cut(query, self.config)
                mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
                mask = mask_of_call(mask_type, attention_mask, False, self.window)
                if self._own and self._own_stays(mask, *with_one_head_dim(query, key, value)):
                    return self._own[0](*call)  # type: ignore[no-any-return]
            return super().forward(*call)

        def _own_stays(self, mask: Mask, *qkv: torch.Tensor) -> bool:
            q, k, v = (x.transpose(0, 1) for x in qkv)
            cp = self._contexts.context(self.schedule, q.device)
            q, k, v = call_inputs(q, k, v, cp)
            kind = self.schedule, make_request(q, k, v, cp, mask, self.softmax_scale, self._training)
            if kind not in found:
                found[kind] = own_stays(self._contexts, *kind, self.config)
            return found[kind]

    return MindSpeedTokenRingAttention


def check_cut(query: torch.Tensor, config: Any) -> None:
    """Raises ConfigurationError where every rank holds the whole sequence. query [s / cp, b, np, hn]."""
    length = getattr(config, "seq_length", None)
    if length is not None and query.shape[0] * ranks(config) > length:
        raise ConfigurationError(
            f"attention gets {query.shape[0]} of a sequence of {length} tokens on each of {ranks(config)} ranks: the "
            f"batch was not cut; keep --context-parallel-algo megatron_cp_algo, and MindSpeed's cutting of batches"
        )


def own_stays(contexts: Contexts, schedule: str, request: Request, config: Any) -> bool:
    """Whether the planner's choice saves too little; all ranks of the group ask together, and rank 0 says it."""
    window = int(getattr(config, "cp_window_size", 1))
    own = "ring" if window == 1 else f"double-ring/{window}"  # our schedules that do what MindSpeed does
    plan = contexts.context(schedule, request.device).agreed_plan(request)
    own_plan = contexts.context(f"auto:{own}", request.device).agreed_plan(request)
    best_seconds, own_seconds = seconds_of(plan, plan.name), seconds_of(own_plan, own)
    stays = (saved := 1 - best_seconds / own_seconds) < WORTH
    contexts.announce(schedule, request)  # also where ours does not run
    if dist.get_rank() == 0:
        text = f"{plan.name} is predicted to take {time_text(best_seconds)}, MindSpeed's own algorithm ({own}) "
        text += f"{time_text(own_seconds)}; {saved:.1%} saved, {WORTH:.0%} are worth a change"
        text += f": MindSpeed's own stays (to force it: {SCHEDULE} {plan.name})" if stays else ""
        LOG.log(logging.WARNING if stays else logging.INFO, text)
    return stays


def seconds_of(plan: Plan, name: str) -> float:
    """What the planner predicts for a schedule; inf where it was not simulated, because it cannot win."""
    found = {each.name: each.predicted_seconds for each in plan.candidates}[name]
    return math.inf if found is None else found
