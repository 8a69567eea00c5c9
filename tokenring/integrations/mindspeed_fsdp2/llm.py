"""MindSpeed-LLM: the one function that its manager of context parallelism puts into models.

Read at c77308a1. Its manager (context_parallel_manager.py:127) sets `context_parallel_attention_forward`
(context_parallel_functions.py:16) in the place of `eager_attention_forward` of a model's module, or of the model's own
`flash_attention_forward`. It gets q, k, v [B, H, T, D] of the tokens here: in `cp_size` equal parts for `cp_type`
ulysses and kvallgather, zigzag for ring (trainer.py:525, :569), and in "actual_seq_len" the ends of documents in the
whole sequence. attention_mask is what the model makes of its own tokens: it says nothing of the whole, and is not read
there either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.mindspeed_fsdp2.calls import (
    LastRead,
    attend_cut,
    check_layer,
    check_tokens,
    ends_of,
    is_training,
    mask_of_layer,
)
from tokenring.integrations.mindspeed_fsdp2.contexts import TrainerContexts
from tokenring.integrations.mindspeed_fsdp2.cuts import TrainerCut, cut_call
from tokenring.integrations.mindspeed_fsdp2.replacing import Replaced, while_used
from tokenring.integrations.versions import MINDSPEED_LLM
from tokenring.runtime.agreement import refusing

FOLDER = "mindspeed_llm.fsdp2.distributed.context_parallel"
HOME, NAME = f"{FOLDER}.context_parallel_functions", "context_parallel_attention_forward"
MANAGER, MAPPINGS = f"{FOLDER}.context_parallel_manager", "ContextParallelMappingManager.get_model_cp_mappings"
MODELS = ("transformers.models.", "mindspeed_llm.fsdp2.models.")  # modules into which the manager puts functions
PARAMETERS = (
    "module", "query", "key", "value", "attention_mask", "dropout", "scaling", "sliding_window", "ring_fa_layout",
    "is_causal", "kwargs",
)  # fmt: skip
CUTS = ("ulysses", "kvallgather", "ring")
NOT_COMPARED = {"qwen3_next": "its gated delta-net layers (GDN) exchange heads by themselves"}


def replace(contexts: TrainerContexts, any_model: bool) -> list[Replaced]:
    """Put our attention in the place of theirs, in models that were built, too; return how to put it back."""
    home, own = MINDSPEED_LLM.function(HOME, NAME, PARAMETERS)
    _, mappings = MINDSPEED_LLM.function(MANAGER, MAPPINGS, ("self", "model_id", "cp_type_config"))
    manager = sys.modules[MANAGER].ContextParallelMappingManager
    ours = while_used(own, attention_of(home, contexts), contexts)
    there = [Replaced(module, name, own, ours) for module, name in _holders(own)]
    return [
        Replaced(home, NAME, own, ours),
        Replaced(manager, MAPPINGS.partition(".")[2], mappings, checking_models(mappings, any_model)),
        *there,
    ]


def _holders(function: Callable[..., Any]) -> Iterator[tuple[ModuleType, str]]:
    """Yield the modules of models that hold a function, and the names that it has there."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(MODELS):
            for name in [name for name, value in vars(module).items() if value is function]:
                yield module, name


def checking_models(own: Callable[..., Any], any_model: bool) -> Callable[..., Any]:
    """Return the manager's method that refuses models whose attention is not the function that we replace."""

    @wraps(own)
    def get_model_cp_mappings(self: Any, model_id: str, cp_type_config: Any) -> Any:
        found = own(self, model_id, cp_type_config)
        if f"{HOME}.{NAME}" not in [patch for _, patch in found]:
            raise UnsupportedError(
                f"models of type {model_id!r} are not supported under use_tokenring: their sparse attention (DSA, or "
                f"that of DeepSeek-V4) sees what an indexer chooses, which no mask of positions says; leave "
                f"use_tokenring out for them"
            )
        if (why := NOT_COMPARED.get(model_id)) is not None and not any_model:
            raise UnsupportedError(
                f"models of type {model_id!r} were not compared under use_tokenring: {why}; compare the gradients of a "
                f"step with those of one process, and say any_model=True"
            )
        return found

    return get_model_cp_mappings


def attention_of(home: Any, contexts: TrainerContexts) -> Callable[..., Any]:
    """Return the function that layers call in the place of theirs, with its signature."""
    ends_read = LastRead(ends_of)

    def context_parallel_attention_forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        ring_fa_layout: str = "BNSD",
        is_causal: bool = True,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        cp = contexts.of(home.ParallelState().get_group("cp"))
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        sinks = getattr(module, "sinks", None) if kwargs.get("s_aux") is None else kwargs["s_aux"]
        with refusing(cp, "forward", query):
            check_layer(module, dropout, kwargs)
            _check_mask(module, attention_mask, is_causal, q.shape[1])
            mask = mask_of_layer(type(module).__name__, is_causal, window_of(sliding_window, sinks))
            ends = kwargs.get("actual_seq_len")
            found = None if ends is None else ends_read.of(ends)
            if found is not None and q.shape[0] != 1:
                raise UnsupportedError(
                    f"packed documents in a batch of {q.shape[0]} are not supported: set per_device_train_batch_size "
                    f"to 1, as reset_attention_mask demands"
                )
            cut = _cut(str(home.get_args().cp_type), cp.world_size)
            call = cut_call(cut, q.shape[1], None, found, mask)
            check_tokens(call, cp.rank, q.shape[1], k.shape[1])
        return attend_cut(q, k, v, cp, call, scaling, is_training(module), sinks, kwargs.get("softcap") or 0.0), None

    return context_parallel_attention_forward


def window_of(sliding_window: int | None, sinks: torch.Tensor | None) -> int | None:
    """Return how many tokens before its own one sees, with and without context parallelism; None: all.

    transformers counts a token's own in its window. MindSpeed-LLM's layers with sinks hand the window to their operator
    as pre_tokens, which does not: they see one more (modeling_gpt_oss.py:503-518, ulysses_cp_attention.py:74-103).
    """
    if not sliding_window:
        return None
    return sliding_window if isinstance(sinks, torch.Tensor) else sliding_window - 1


def _cut(kind: str, ranks: int) -> TrainerCut:
    if kind not in CUTS:
        raise ConfigurationError(f"cp_type {kind!r} is not one that tokenring knows: set one of {', '.join(CUTS)}")
    return TrainerCut(ranks, 1) if kind == "ring" else TrainerCut(1, ranks)


def _check_mask(module: torch.nn.Module, mask: torch.Tensor | None, is_causal: bool, tokens: int) -> None:
    """Raise UnsupportedError for a mask that says more than which tokens here come later than others."""
    if mask is None or (is_causal and mask.dim() == 4 and tuple(mask.shape[-2:]) == (tokens, tokens)):
        return
    raise UnsupportedError(
        f"{type(module).__name__} got an attention_mask {list(mask.shape)} for {tokens} tokens here, which is not "
        f"supported: a mask of the whole sequence is not cut with it; say packed documents by actual_seq_len "
        f"(reset_attention_mask), and pad at the right"
    )
