"""Checks of layers and calls: what cannot be done is refused by its name in Megatron, with what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.megatron.softmax import KINDS

OPTIONS = ("transport", "topology", "memory_limit_bytes", "kernel", "pieces", "timeout_seconds")  # of ContextParallel
WITHOUT_ATTENTION = {"mlp", "moe", "moe_router", "moe_preprocess", "mamba"}  # scopes of CUDA graphs
OF_LINEARS = ("transport", "topology", "partials", "kernel", "timeout_seconds")  # of TensorParallel
LOGITS = "the largest attention logit is not computed here"


def check_layer(config: Any, attention_type: str, attention_dropout: float | None) -> None:
    """Raise UnsupportedError for a layer that no schedule computes."""
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    if dropout:
        raise UnsupportedError(
            f"attention_dropout is {dropout} (Megatron's default is 0.1), which attention that is split over ranks "
            f"cannot repeat: set config.attention_dropout=0.0 (--attention-dropout 0.0)"
        )
    if attention_type != "self":
        raise UnsupportedError(
            f"attention of type {attention_type!r} is not supported: keep Megatron's own core_attention for it"
        )
    softmax = getattr(config, "softmax_type", "vanilla")
    if softmax not in KINDS:
        raise UnsupportedError(f"softmax_type {softmax!r} is not supported: use one of {', '.join(KINDS)}")
    for name in ("qk_clip", "log_max_attention_logit"):
        if getattr(config, name, False):
            raise UnsupportedError(f"{name} is not supported, {LOGITS}: set config.{name}=False")
    if config.context_parallel_size > 1 and _records_attention(config):
        raise UnsupportedError(
            "CUDA graphs of attention are not supported under context parallelism, as ranks agree on each call over "
            "the host: turn them off (cuda_graph_impl='none'), or leave attn out of cuda_graph_scope"
        )


def _records_attention(config: Any) -> bool:
    """Tell whether Megatron is to make CUDA graphs that have attention in them."""
    scope = getattr(config, "cuda_graph_scope", "full")
    parts = {getattr(part, "name", part) for part in (scope if isinstance(scope, list) else [scope])}
    return _records(config) and not (parts and parts <= WITHOUT_ATTENTION)


def _records(config: Any) -> bool:
    """Tell whether Megatron is to make CUDA graphs."""
    graphs = [getattr(config, name, None) for name in ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl")]
    return any(graph not in (None, False, "none") for graph in graphs)


def check_linear(config: Any, more: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a column or row linear that no schedule computes. more: how Megatron makes it."""
    if getattr(config, "fp16", False):
        raise UnsupportedError("linear layers in float16 are not supported: use bf16, or float32")
    for name, wrong, instead in (
        ("gather_output", True, "as of output layers"),
        ("disable_grad_reduce", True, "as of LoRA's adapters"),
        ("input_is_parallel", False, "where the input is cut"),
    ):
        if more.get(name) is wrong:
            raise UnsupportedError(f"{name}={wrong} is not supported: keep Megatron's own layer, {instead}")
    if config.tensor_model_parallel_size > 1 and _records(config):
        raise UnsupportedError(
            "CUDA graphs of tensor-parallel layers are not supported, as ranks agree on each call over the host: turn "
            "them off (cuda_graph_impl='none')"
        )


def check_linear_kernel(config: Any, kernel: str) -> None:
    """Raise UnsupportedError for a kernel by name where the ranks do not split the sequence."""
    if kernel != "auto" and config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise UnsupportedError(
            f"kernel {kernel!r} is for layers under sequence_parallel: set config.sequence_parallel=True "
            f"(--sequence-parallel), or leave kernel='auto'"
        )


def check_linear_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for options that TensorParallel does not take."""
    if unknown := [name for name in options if name not in OF_LINEARS]:
        raise ConfigurationError(
            f"use_tokenring_linears got {', '.join(unknown)}; known are {', '.join(OF_LINEARS)}, schedule, any_version"
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for options that ContextParallel does not take."""
    if unknown := [name for name in options if name not in OPTIONS]:
        raise ConfigurationError(
            f"TokenRingAttention got {', '.join(unknown)}; known are {', '.join(OPTIONS)}, schedule, any_version; "
            f"if Megatron passed it, tokenring does not know this version of Megatron-core"
        )


def check_call(attention_bias: Any, more: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for arguments of a call that would change its result."""
    if attention_bias is not None:
        raise UnsupportedError(
            "attention_bias is not supported: only masks of positions can be split (causal, windows, packed documents)"
        )
    if given := [name for name, value in more.items() if value is not None]:
        raise UnsupportedError(f"core_attention was called with {', '.join(given)}, which tokenring does not know")


def check_shapes(q: torch.Tensor, k: torch.Tensor, ranks: int) -> None:
    """Raise UnsupportedError if keys are more than queries, as with a cache, and the sequence is split.

    q [s, b, np, hn], k [s', b, ng, hn].
    """
    if ranks > 1 and q.shape[0] != k.shape[0]:
        raise UnsupportedError(
            f"{q.shape[0]} queries and {k.shape[0]} keys on a rank: a KV cache is not supported under context "
            f"parallelism; infer with context_parallel_size=1"
        )


def check_cut(query: torch.Tensor, config: Any) -> None:
    """Raise ConfigurationError if every rank holds the whole sequence. query [s / cp, b, np, hn]."""
    length, ranks = getattr(config, "seq_length", None), int(config.context_parallel_size)
    if length is not None and query.shape[0] * ranks > length:
        raise ConfigurationError(
            f"attention gets {query.shape[0]} of a sequence of {length} tokens on each of {ranks} ranks: the batch was "
            f"not cut; keep --context-parallel-algo megatron_cp_algo, and MindSpeed's cutting of batches"
        )
