"""torch's CUDA attention operators for CPU tensors, behind torch's own dispatcher and so behind its real schemas.

`with operators():` registers them; what they refuse, how they align causal masks and what their statistics look like
is that of torch 2.13's CUDA sources (see backends/kernels/torch_cuda.py). Calls are noted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cuda_ops import golden

HALF = (torch.float16, torch.bfloat16)
POISON = (math.nan, math.inf)  # what may stand in a row that sees nothing
calls: list[tuple[str, dict[str, Any]]] = []


def note(name: str, **what: Any) -> None:
    calls.append((name, what))


def check(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(text)


# ---------- flash: [B, S, H, D]


def flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: Any, cum_seq_k: Any, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Any = None,
    alibi_slopes: Any = None, block_table: Any = None, num_splits: int | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    sides = _sides(window_size_left, window_size_right)
    note("flash", causal=is_causal, sides=sides, rows=query.shape[1], cols=key.shape[1])
    _check_flash(query, key, value, cum_seq_q, dropout_p, return_debug_mask, scale)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    visible = golden.second_version(q.shape[2], k.shape[2], is_causal, *sides)
    out, lse = golden.forward(q, k, v, visible, _given(scale), (0.0, math.inf))
    seeds = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    return out.transpose(1, 2).contiguous(), lse.contiguous(), *seeds, torch.empty(0, dtype=q.dtype)


def flash_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    logsumexp: torch.Tensor, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, rng_state: torch.Tensor, unused: torch.Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    sides = _sides(window_size_left, window_size_right)
    note("flash backward", causal=is_causal, sides=sides)
    _check_flash(query, key, value, cum_seq_q, dropout_p, False, scale)
    check(out.dtype == grad_out.dtype == query.dtype, "query and out must have the same dtype")
    dout, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    lse = golden.as_contiguous(logsumexp, *q.shape[:3])
    visible = golden.second_version(q.shape[2], k.shape[2], is_causal, *sides)
    made = golden.backward(dout, q, k, v, out, lse, visible, _given(scale), rounds_heads=True)
    dq, dk, dv = (x.transpose(1, 2).contiguous() for x in made)
    return dq, dk, dv


def _check_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Any, dropout: float, debug: bool, scale: float | None
) -> None:
    check(lengths is None and dropout == 0.0 and not debug and scale is not None, "not emulated")
    check(q.dtype in HALF, "FlashAttention only support fp16 and bf16 data type")
    check(q.shape[-1] % 8 == 0, "head_size must be a multiple of 8, this is ensured by padding!")
    check(q.shape[-1] <= 256, "FlashAttention forward only supports head dimension at most 256")
    # CHECK_SHAPE(v, batch_size, seqlen_k, num_heads_k, head_size) of mha_fwd and mha_bwd in flash_attn/flash_api.cpp
    check(v.shape[-1] == k.shape[-1], "v must have shape (batch_size, seqlen_k, num_heads_k, head_size)")
    check(min(q.numel(), k.numel()) > 0, "an empty operand")
    golden.check_aligned(q, k, v)


def _sides(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


def _given(scale: float | None) -> float:
    assert scale is not None
    return scale


# ---------- cuDNN: [B, H, S, D]

Graph = tuple[object, ...]  # what torch finds a graph by: MHAParams in ATen/native/cudnn/MHA.cpp
graphs: dict[Graph, object] = {}  # of each gradient's: how out and dout lay when it was built


def cudnn_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    note("cudnn", causal=is_causal, rows=query.shape[2], cols=key.shape[2], graph=_graph(query, key, value, is_causal))
    _check_cudnn(query, key, value, attn_bias)
    check(compute_log_sumexp, "no lse was asked for")
    visible = _top_left(query, key, is_causal)
    out, lse = golden.forward(query, key, value, visible, _given(scale), POISON)
    seed = torch.empty((), dtype=torch.int64)
    return out, lse[..., None].contiguous(), None, None, query.shape[2], key.shape[2], seed, seed.clone(), None


def cudnn_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    logsumexp: torch.Tensor, philox_seed: torch.Tensor, philox_offset: torch.Tensor, attn_bias: torch.Tensor | None,
    cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    graph = _graph(query, key, value, is_causal)
    note("cudnn backward", causal=is_causal, graph=graph)
    _check_cudnn(query, key, value, attn_bias)
    check(tuple(logsumexp.shape) == (*query.shape[:3], 1), f"cuDNN Frontend error: Stats of {tuple(logsumexp.shape)}")
    check(out.stride() == grad_out.stride(), "cuDNN Frontend error: O and dO lie differently")
    # check_tensor_matches_graph in MHA.cpp: strides of all axes, while the graph is found by those of q, k and v alone.
    built = graphs.setdefault(graph, out.stride())
    check(built == out.stride(), f"t.strides() == IntArrayRef(attrs.get_stride()): {built}, {out.stride()}")
    check((max_q, max_k) == (query.shape[2], key.shape[2]), "lengths that are not those of the operands")
    visible = _top_left(query, key, is_causal)
    return golden.backward(
        grad_out, query, key, value, out, logsumexp[..., 0], visible, _given(scale), rounds_heads=False
    )


def _graph(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Graph:
    return (q.dtype, causal, *((x.shape, x.stride()) for x in (q, k, v)))


def _check_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Stricter than cuDNN, which takes values of another width on some chips and in some versions."""
    check(v.shape[-1] == k.shape[-1], "cuDNN Frontend error: No execution plans support the graph.")
    check(q.dtype in HALF, "cuDNN Frontend error: No execution plans support the graph.")
    check(q.shape[-1] % 8 == 0 and q.shape[-1] <= 128, "cuDNN Frontend error: No execution plans support the graph.")
    check(q.shape[2] > 1 and k.shape[2] > 1, "CUDA error: a tile of one row or one column")
    check(bias is None, "not emulated")
    golden.check_aligned(q, k)


def _top_left(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    return golden.band(q.shape[2], k.shape[2], math.inf, 0 if causal else math.inf, 0)


# ---------- memory-efficient: [B, H, S, D]


def efficient_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool, dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    note("efficient", causal=is_causal, bias=attn_bias is not None, rows=query.shape[2], cols=key.shape[2])
    _check_efficient(query, key, value, attn_bias, is_causal)
    check(compute_log_sumexp, "no lse was asked for")
    visible = _biased(query, key, attn_bias, is_causal)
    out, lse = golden.forward(query, key, value, visible, _given(scale), POISON)
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    seed = torch.empty((), dtype=torch.int64)
    return out.transpose(1, 2).contiguous().transpose(1, 2), padded, seed, seed.clone()


def efficient_backward(
    grad_out_: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_bias: torch.Tensor | None, out: torch.Tensor, logsumexp: torch.Tensor, philox_seed: torch.Tensor,
    philox_offset: torch.Tensor, dropout_p: float, grad_input_mask: list[bool], is_causal: bool = False, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    note("efficient backward", causal=is_causal, bias=attn_bias is not None)
    _check_efficient(query, key, value, attn_bias, is_causal)
    rows = query.shape[2]
    check(logsumexp.shape[-1] == rows + -rows % 32 and logsumexp.stride(1) % 8 == 0, "LSE is not correctly aligned")
    check(bool((logsumexp[..., rows:] == math.inf).all()), "CUDA error: rows beyond the last one count")
    check(grad_input_mask == [True, True, True, False], "not emulated")
    visible = _biased(query, key, attn_bias, is_causal)
    made = golden.backward(
        grad_out_, query, key, value, out, logsumexp[..., :rows], visible, _given(scale), rounds_heads=False
    )
    return *made, None


def _check_efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool
) -> None:
    check(q.dtype in (*HALF, torch.float32), "Expected query to be of fp16, bf16 or fp32")
    check(q.shape[1] == k.shape[1], "query.size(2) == key.size(2)")
    # Values of another width it takes (Kv in torch/_meta_registrations.py), as well aligned.
    for x in (q, v):
        check(x.shape[-1] % (16 // x.element_size()) == 0, "cutlassF: no kernel found to launch!")
    golden.check_aligned(q, k, v)
    if bias is not None:
        check(not causal, "not emulated: a causal mask and a bias")
        check(bias.dtype == q.dtype, "invalid dtype for bias - should match query's dtype")
        check(tuple(bias.shape) == (*q.shape[:3], k.shape[2]), "attn_bias: wrong shape")
        check(bias.stride(-1) == 1 and bias.stride(-2) % 8 == 0, "attn_bias is not correctly aligned (strideM)")


def _biased(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, causal: bool) -> torch.Tensor:
    return _top_left(q, k, causal) if bias is None else bias[0, 0] == 0


IMPLEMENTED: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_scaled_dot_product_efficient_attention": efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
}


@contextmanager
def operators(**others: Callable[..., Any]) -> Iterator[None]:
    """torch.ops.aten computes these for CPU tensors inside; others: by name, in place of those above."""
    calls.clear()
    graphs.clear()
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for name, function in (IMPLEMENTED | others).items():
            library.impl(name, function, "CPU")
        yield
    finally:
        library._destroy()
