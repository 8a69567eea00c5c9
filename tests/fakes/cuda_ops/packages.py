"""The packages flash_attn 2, 3 and 4 as far as kernels call them: the signatures of releases, float64 behind them.

Written from the public sources of Dao-AILab/flash-attention: flash_attn/flash_attn_interface.py at 2.5, 2.6 and 2.8,
hopper/flash_attn_interface.py (2026), flash_attn/cute/interface.py (2025, whose gradient has no windows; 2026).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from cuda_ops import golden
from cuda_ops.aten import HALF, check, note

Masks = Callable[..., torch.Tensor]


class CustomOperator:
    """As torch.library.custom_op leaves a function: it can be called, and its own signature says nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._init_fn = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._init_fn(*args, **kwargs)


def compute(
    release: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, visible: torch.Tensor,
    empty_lse: float = math.inf, softcap: float = 0.0,
) -> golden.Forward:  # fmt: skip
    """out [B, S, H, D], lse [B, H, S]."""
    note(release, rows=q.shape[1], cols=k.shape[1])
    _check(q, k, v)
    _check_widths(release, k.shape[-1], v.shape[-1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = golden.forward(q, k, v, visible, scale, (0.0, empty_lse), softcap)
    return golden.Forward(out.transpose(1, 2).contiguous(), lse.contiguous())


def compute_gradients(
    release: str, operands: tuple[torch.Tensor, ...], lse: torch.Tensor, scale: float, visible: torch.Tensor,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv [B, S, H, D]. operands: dout, q, k, v, out."""
    note(f"{release} backward", rows=operands[1].shape[1], cols=operands[2].shape[1])
    _check(*operands)
    dout, q, k, v, out = (x.transpose(1, 2) for x in operands)
    _check_widths(release, k.shape[-1], v.shape[-1])
    check(dout.shape[-1] == out.shape[-1] == v.shape[-1], "dout and out must be as wide as v")
    lse = golden.as_contiguous(lse, *q.shape[:3])
    made = golden.backward(dout, q, k, v, out, lse, visible, scale, True, softcap)
    return tuple(x.transpose(1, 2).contiguous() for x in made)


def _check(*operands: torch.Tensor) -> None:
    for x in operands:
        check(x.dtype in HALF, "FlashAttention only support fp16 and bf16 data type")
        check(x.shape[-1] % 8 == 0, "head_size must be a multiple of 8")
        check(x.shape[-1] <= 256, "FlashAttention forward only supports head dimension at most 256")
    golden.check_aligned(*operands)


def _check_widths(release: str, width: int, value_width: int) -> None:
    """Of keys and of values. csrc/flash_attn/flash_api.cpp, hopper/flash_api.cpp, and cute/interface.py on Hopper."""
    if release.startswith("2"):
        check(width == value_width, "v must have shape (batch_size, seqlen_k, num_heads_k, head_size)")
    elif release.startswith("3") and width != value_width:
        check(
            (128 < width <= 192 and 96 < value_width <= 128) or (width <= 64 and value_width <= 512),
            "If V headdim is different from Q/K dim, we only support Q/K headdim in (128, 192] and V headdim in "
            "(96, 128], or (Q/K <= 64 and V <= 512).",
        )
    elif release.startswith("4"):
        assert 8 <= width <= 256 and 8 <= value_width <= 256, "is not supported on SM90"  # _validate_head_dims


def _second(q: torch.Tensor, k: torch.Tensor, causal: bool, left: int, right: int) -> torch.Tensor:
    return golden.second_version(q.shape[1], k.shape[1], causal, left, right)


def _neutral(**values: Any) -> None:
    assert not any(values.values()), values


# ---------- 2.5, 2.6: eight results, a pair for the window


def forward_2_5(q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_softmax):  # type: ignore[no-untyped-def]
    return older_forward(q, k, v, dropout_p, softmax_scale, causal, window_size, 0.0, alibi_slopes, return_softmax)


def backward_2_5(  # type: ignore[no-untyped-def]
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
    deterministic, rng_state=None,
):  # fmt: skip
    return older_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size, 0.0, alibi_slopes,
        deterministic, rng_state,
    )  # fmt: skip


def forward_2_6(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax):  # type: ignore[no-untyped-def]
    _neutral(dropout=dropout_p, alibi=alibi_slopes, debug=return_softmax)
    visible = _second(q, k, causal, *window_size)
    out, lse = compute("2.6", q, k, v, softmax_scale, visible, softcap=softcap)
    return out, q, k, v, out, lse, None, torch.empty(2)


def backward_2_6(  # type: ignore[no-untyped-def]
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size, softcap,
    alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    _neutral(dropout=dropout_p, alibi=alibi_slopes, seeds=rng_state)
    visible = _second(q, k, causal, *window_size)
    made = compute_gradients("2.6", (dout, q, k, v, out), softmax_lse, softmax_scale, visible, softcap)
    for target, each in zip((dq, dk, dv), made, strict=True):
        target.copy_(each)
    return dq, dk, dv, torch.empty(0)


older_forward: Any = forward_2_6
older_backward: Any = backward_2_6


# ---------- 2.7, 2.8: custom operators, four results


def forward_2_8(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    _neutral(dropout=dropout_p, alibi=alibi_slopes, debug=return_softmax)
    visible = _second(q, k, causal, window_size_left, window_size_right)
    out, lse = compute("2.8", q, k, v, softmax_scale, visible, softcap=softcap)
    return out, lse, torch.empty(0), torch.empty(2)


def backward_2_8(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    softmax_lse: torch.Tensor, dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: torch.Tensor | None, deterministic: bool, rng_state: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    older_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        (window_size_left, window_size_right), softcap, alibi_slopes, deterministic, rng_state,
    )  # fmt: skip
    return torch.empty(0)


# ---------- 3


def forward_3(  # type: ignore[no-untyped-def]
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    visible = golden.third_version(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    out, lse = compute("3", q, k, v, softmax_scale, visible, softcap=softcap)
    return out, lse, torch.empty(0), torch.empty(0)


def backward_3(  # type: ignore[no-untyped-def]
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
    max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    visible = golden.third_version(q.shape[1], k.shape[1], is_causal, window_size_left, window_size_right)
    made = compute_gradients("3", (dout, q, k, v, out), softmax_lse, softmax_scale, visible, softcap)
    for target, each in zip((dq, dk, dv), made, strict=True):
        target.copy_(each)
    return torch.empty(0)


# ---------- 4


def _fourth(q: torch.Tensor, k: torch.Tensor, causal: bool, left: int | None, right: int | None) -> torch.Tensor:
    right = 0 if causal else right
    rows, cols = q.shape[1], k.shape[1]
    before, after = (math.inf if side is None else side for side in (left, right))
    return golden.band(rows, cols, before, after, cols - rows)


def forward_4(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
    max_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None,
    window_size_right=None, learnable_sink=None, m_block_size=128, n_block_size=128, num_threads=384, num_splits=1,
    pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, cu_total_m_blocks=None,
    cu_total_n_blocks=None, return_lse=False, out=None, lse=None, aux_tensors=None,
):  # fmt: skip
    _neutral(softcap=softcap)
    visible = _fourth(q, k, causal, window_size_left, window_size_right)
    made = compute("4", q, k, v, softmax_scale, visible, -math.inf)
    return made.out, made.lse if return_lse else None


def backward_4(  # type: ignore[no-untyped-def]
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
    num_stages_dO=2, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
    max_seqlen_k=None, deterministic=False, dlse=None,
):  # fmt: skip
    _neutral(softcap=softcap)
    visible = _fourth(q, k, causal, window_size_left, window_size_right)
    return compute_gradients("4", (dout, q, k, v, out), lse, softmax_scale, visible)


newer_backward: Any = backward_4


def backward_4_without_windows(  # type: ignore[no-untyped-def]
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, m_block_size=64, deterministic=False
):  # fmt: skip
    return newer_backward(q, k, v, out, dout, lse, softmax_scale, causal)


Functions = dict[str, Callable[..., Any]]
RELEASES: dict[str, tuple[str, str, Functions]] = {  # kernel, module, functions
    "2.5": (
        "flash-attn", "flash_attn.flash_attn_interface",
        {"_flash_attn_forward": forward_2_5, "_flash_attn_backward": backward_2_5},
    ),
    "2.6": (
        "flash-attn", "flash_attn.flash_attn_interface",
        {"_flash_attn_forward": forward_2_6, "_flash_attn_backward": backward_2_6},
    ),
    "2.8": (
        "flash-attn", "flash_attn.flash_attn_interface",
        {"_flash_attn_forward": CustomOperator(forward_2_8), "_flash_attn_backward": CustomOperator(backward_2_8)},
    ),
    "3": (
        "flash-attn-3", "flash_attn_interface",
        {"_flash_attn_forward": CustomOperator(forward_3), "_flash_attn_backward": CustomOperator(backward_3)},
    ),
    "3, as a package": (
        "flash-attn-3", "flash_attn_3.flash_attn_interface",
        {"_flash_attn_forward": CustomOperator(forward_3), "_flash_attn_backward": CustomOperator(backward_3)},
    ),
    "4": (
        "flash-attn-4", "flash_attn.cute.interface",
        {"_flash_attn_fwd": forward_4, "_flash_attn_bwd": backward_4},
    ),
    "4, gradient without windows": (
        "flash-attn-4", "flash_attn.cute.interface",
        {"_flash_attn_fwd": forward_4, "_flash_attn_bwd": backward_4_without_windows},
    ),
}  # fmt: skip


@contextmanager
def installed(release: str, **others: Callable[..., Any]) -> Iterator[None]:
    """Inside, the modules of a release can be imported; others: its functions by name, in place of those."""
    _, module, functions = RELEASES[release]
    made = ModuleType(module)
    made.__dict__.update(functions | others)
    names = module.split(".")
    added = {".".join(names[:count]): ModuleType(names[count - 1]) for count in range(1, len(names))} | {module: made}
    before = {name: sys.modules.get(name) for name in added}
    for name in list(added)[:-1]:
        added[name].__path__ = []
    sys.modules.update(added)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = old
