"""MindSpeed-MM: the function that it registers as transformers' flash attention, and the self-attention of Wan.

Read at 57069cd5. `flash_attention_forward` (ops/flash_attn/flash_attn.py:171) is registered as "flash_attention_2" and
"flash_attention_3" in transformers' AttentionInterface (:576), where every layer of its vision-language models looks it
up. It gets q, k, v of the tokens here in the order that `input_layout` says: of the whole in equal parts by
`ulysses_parallel_size`, zigzag by `ring_attention_size`, or both (communication.py:708); under a ring, vision encoders
cut each document by itself (:760), and say in `seq_split_lens` into which lengths. "total_seq_len" is the length of the
whole, cu_seq_lens_q the ends of its documents before it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from tokenring.api.context import ContextParallel
from tokenring.errors import BackendUnavailable, ConfigurationError, UnsupportedError
from tokenring.integrations.mindspeed_fsdp2 import wan
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
from tokenring.integrations.mindspeed_fsdp2.cuts import (
    CutCall,
    Ends,
    TrainerCut,
    cut_call,
    cut_of_documents,
    split_sizes,
)
from tokenring.integrations.mindspeed_fsdp2.replacing import Replaced, while_used
from tokenring.integrations.versions import MINDSPEED_MM
from tokenring.runtime.agreement import refusing
from tokenring.sequence.mask import Full, Mask

HOME, NAME = "mindspeed_mm.fsdp.ops.flash_attn.flash_attn", "flash_attention_forward"
REGISTERED = ("flash_attention_2", "flash_attention_3")
PARAMETERS = (
    "module", "query", "key", "value", "attention_mask", "dropout", "scaling", "sliding_window", "softcap",
    "cu_seq_lens_q", "cu_seq_lens_k", "input_layout", "ring_in_bnsd", "skip_ulysses", "total_seq_len",
    "seq_split_lens", "skip_flash_attn_recompute", "kwargs",
)  # fmt: skip
TOKENS_FIRST = {"BSND": True, "1TND": True, "BNSD": False, "1NTD": False}


def replace(contexts: TrainerContexts) -> list[Replaced]:
    """Put our attention in the place of theirs; return how to put it back."""
    home, own = MINDSPEED_MM.function(HOME, NAME, PARAMETERS)
    ours = while_used(own, attention_of(home, own, contexts), contexts)
    registry = home.ALL_ATTENTION_FUNCTIONS
    there = [Replaced(registry, name, own, ours) for name in REGISTERED if _registered(registry, name) is own]
    return [Replaced(home, NAME, own, ours), *there, *_of_wan(contexts)]


def _of_wan(contexts: TrainerContexts) -> list[Replaced]:
    """Return how Wan's layers are replaced; not in an environment in which there is no Wan."""
    try:
        return wan.replace(contexts)
    except BackendUnavailable:
        return []


def _registered(registry: Any, name: str) -> Any:
    return registry[name] if name in registry else None  # noqa: SIM401  (it has no `get` of a mapping)


def cut_of(state: Any) -> TrainerCut:
    """Return how the trainer cuts sequences."""
    return TrainerCut(state.get_ring_group_size(), state.get_ulysses_group_size())


def attention_of(home: Any, own: Callable[..., Any], contexts: TrainerContexts) -> Callable[..., Any]:
    """Return the function that layers call in the place of theirs, with its signature."""
    of_q, of_k, paddings = LastRead(ends_of), LastRead(ends_of), LastRead(is_right_padding)

    def flash_attention_forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        cu_seq_lens_q: torch.Tensor | Sequence[int] | None = None,
        cu_seq_lens_k: torch.Tensor | Sequence[int] | None = None,
        input_layout: str = "1NTD",
        ring_in_bnsd: bool = False,
        skip_ulysses: bool = False,
        total_seq_len: int | None = None,
        seq_split_lens: torch.Tensor | None = None,
        skip_flash_attn_recompute: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        state = home.get_parallel_state() if torch.distributed.is_initialized() else None
        if state is None or not state.is_cp_enable() or (skip_ulysses and not state.is_ring_enable()):
            found: tuple[torch.Tensor, None] = own(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                sliding_window=sliding_window, softcap=softcap, cu_seq_lens_q=cu_seq_lens_q,
                cu_seq_lens_k=cu_seq_lens_k, input_layout=input_layout, ring_in_bnsd=ring_in_bnsd,
                skip_ulysses=skip_ulysses, total_seq_len=total_seq_len, seq_split_lens=seq_split_lens,
                skip_flash_attn_recompute=skip_flash_attn_recompute, **kwargs,
            )  # fmt: skip
            return found  # of tokens that are not cut
        cp = contexts.of(state.get_cp_group())
        with refusing(cp, "forward", query):
            check_layer(module, dropout, kwargs)
            is_causal = kwargs.get("is_causal")
            causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
            _check_mask(module, attention_mask, causal, paddings, cp)
            mask = mask_of_layer(type(module).__name__, causal, sliding_window - 1 if sliding_window else None)
            q, k, v = _in_order(home, input_layout, query, key, value)
            if state.is_ring_enable() and seq_split_lens is not None:
                call = _of_documents(cut_of(state), seq_split_lens, mask, causal)
            else:
                given = cu_seq_lens_q
                if given is None and causal:  # which Qwen3-VL's text passes on under Ulysses alone
                    given = kwargs.get("cu_seqlens")
                ends = None if given is None else _ends(of_q.of(given), of_k, cu_seq_lens_k, mask)
                total = None if total_seq_len is None else int(total_seq_len)
                _check_is_cut(module, causal, total)
                call = _call(cut_of(state), q.shape[1], total, _within_rows(ends, q.shape[0]), mask)
            check_tokens(call, cp.rank, q.shape[1], k.shape[1])
        sinks = kwargs.get("s_aux")
        return attend_cut(q, k, v, cp, call, scaling, is_training(module), sinks, softcap or 0.0), None

    return flash_attention_forward


def _in_order(home: Any, name: str, *qkv: torch.Tensor) -> list[torch.Tensor]:
    """Return q, k and v as [B, T, H, D]. Elsewhere than on NPUs theirs takes [B, H, T, D], whatever the name."""
    if (order := str(name).upper()) not in TOKENS_FIRST:
        raise ConfigurationError(f"input_layout {name!r} is unknown: give one of {', '.join(TOKENS_FIRST)}")
    first = TOKENS_FIRST[order] and bool(getattr(home, "IS_NPU_AVAILABLE", True))
    return [x if first else x.transpose(1, 2) for x in qkv]


def _ends(of_q: Ends, reader: LastRead, of_keys: Any, mask: Mask) -> Ends | None:
    """Return the ends of documents. Raises UnsupportedError where those of keys are others; one document may differ."""
    keys = of_q if of_keys is None else reader.of(of_keys)
    if len(of_q) == len(keys) == 2 and mask == Full():
        return None
    if keys != of_q:
        raise UnsupportedError(
            "documents with other ends for keys (cu_seq_lens_k) than for queries are not supported, unless they are "
            "one document under a full mask: call the layer once for each"
        )
    return of_q


def _call(cut: TrainerCut, tokens: int, total: int | None, ends: Ends | None, mask: Mask) -> CutCall:
    """Return how a call is made of a sequence of which this rank holds so many tokens.

    Under a ring each document of a full mask, as an image, is cut by itself. Tokens behind the last end are padding, a
    document of their own. A shorter total is not read: encoders that compute a layer again may give another's.
    """
    if ends is None:
        return cut_call(cut, tokens, total, None, mask)
    if cut.ring > 1 and mask == Full():
        parts = [split_sizes(stop - start, cut.ring) for start, stop in pairwise(ends)]
        return cut_of_documents(cut, list(zip(*parts, strict=True)), mask)
    whole = (*ends, total) if total is not None and total > ends[-1] else ends
    return cut_call(cut, tokens, None, whole, mask)


def _within_rows(ends: Ends | None, rows: int) -> Ends | None:
    """Return the ends of documents in one sequence; None: each of so many rows is one document, or there are no ends.

    Of a batch without packing theirs counts the ends through all rows (qwen3_5/modeling_qwen3_5.py:1726).
    """
    if ends is None or rows == 1:
        return ends
    if ends != tuple(range(0, ends[-1] + 1, max(1, ends[-1] // rows))):
        raise UnsupportedError(f"packed documents in a batch of {rows} are not supported: give one sequence a batch")
    return None


def _of_documents(cut: TrainerCut, given: torch.Tensor, mask: Mask, causal: bool) -> CutCall:
    """Return how a call is made of documents with these lengths on each rank of the ring: [R, documents], or [R]."""
    if causal:
        raise UnsupportedError(
            "seq_split_lens with is_causal=True is not supported: of a causal sequence a ring cuts the whole, zigzag"
        )
    if given.dim() not in (1, 2):
        raise ConfigurationError(f"seq_split_lens are {list(given.shape)}: give [{cut.ring}, documents]")
    return cut_of_documents(cut, given.reshape(len(given), -1).tolist(), mask)


def is_right_padding(mask: torch.Tensor, is_first: bool) -> bool:
    """Tell whether a mask [B, S] is ones and then zeros.

    is_first: it has the first token of the whole, which must be a one.
    """
    real = mask.bool()
    begins = bool(real[:, 0].all()) if is_first else True
    return begins and not bool((real[:, 1:] & ~real[:, :-1]).any())


def _check_is_cut(module: torch.nn.Module, causal: bool, total: int | None) -> None:
    """Raise UnsupportedError for causal layers of models that do not cut their sequence: those that do say its length.

    Under a full mask copies change nothing.
    """
    if causal and total is None:
        raise UnsupportedError(
            f"{type(module).__name__} does not say how long the whole sequence is (total_seq_len), as all models of "
            f"MindSpeed-MM do that cut it over ranks: train this one without context parallelism"
        )


def _check_mask(
    module: torch.nn.Module, mask: torch.Tensor | None, causal: bool, paddings: LastRead, cp: ContextParallel
) -> None:
    """Raise UnsupportedError for a mask other than right padding, of which no causal token sees any."""
    if mask is None or (causal and mask.dim() == 2 and paddings.of(mask, cp.rank == 0)):
        return
    raise UnsupportedError(
        f"{type(module).__name__} got an attention_mask {list(mask.shape)} which is not supported: a causal layer may "
        f"have right padding, [B, S] of ones and then zeros; say documents by cu_seq_lens_q"
    )
