"""A stand-in for the package `flash_attn`, so that peers which are built on it run on a CPU.

It has the names and signatures of flash-attn 2.7 that these peers use, on the attention kernel that our
own schedules use (`computing_with` another): what differs is how the work is split, not the kernel. Causal is
bottom-right aligned, as flash-attn's is. Dropout, windows, soft-capping and ALiBi are refused.

B batch, T query tokens, S kv tokens, H heads, D head dim.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tokenring.backends.interfaces import AttentionKernel
from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.backends.merging.torch_merger import merge_
from tokenring.errors import UnsupportedError
from tokenring.sequence.region import Patch

VERSION = "2.7.4"
_kernel: AttentionKernel = CpuFlash()


@contextmanager
def computing_with(kernel: AttentionKernel) -> Iterator[None]:
    """Stand in for the package inside the block, even where it is importable, and compute with this kernel."""
    global _kernel
    before, replaced = _kernel, _modules()
    _kernel = kernel
    _put()
    try:
        yield
    finally:
        _kernel = before
        for name in _modules():
            del sys.modules[name]
        sys.modules.update(replaced)


def install() -> bool:
    """Put the stand-in into sys.modules, unless the real package is importable; return whether it is there now."""
    if _is_there():
        return True
    try:
        import_module("flash_attn.flash_attn_interface")
        return False
    except ImportError:
        _put()
    return True


def _is_there() -> bool:
    return bool(getattr(sys.modules.get("flash_attn"), "is_stand_in", False))


def _modules() -> dict[str, ModuleType]:
    """Return the modules of the package, real or stand-in, by name."""
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "flash_attn"}


def _put() -> None:
    if _is_there():
        return
    for name in _modules():
        del sys.modules[name]
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.__path__ = []
    for module in (package, interface):
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=module is package)
        module.__dict__.update(NAMES, __version__=VERSION, is_stand_in=True)
    package.__dict__["flash_attn_interface"] = interface
    sys.modules |= {package.__name__: package, interface.__name__: interface}


def patch_function(module: ModuleType, name: str, replacements: Mapping[str, str]) -> list[str]:
    """Define a function of a module again with its text changed; return those texts that were found in it."""
    source = inspect.getsource(getattr(module, name))
    found = [old for old in replacements if old in source]
    for old in found:
        source = source.replace(old, replacements[old])
    if found:
        exec(compile(source, f"{module.__file__} (patched)", "exec"), vars(module))
    return found


# ---------- tiles, as flash-attn calls them


def flash_attn_forward(
    q_BTHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return out [B, T, H, D] in q's dtype and lse [B, H, T]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BSHD, v_BSHD))
    (cols, patch), *others = _tiles(q.shape[2], k.shape[2], causal)
    out, lse = _kernel.forward(q, k[:, :, cols], v[:, :, cols], patch=patch, scale=scale)
    for cols, patch in others:
        lse = lse.contiguous()
        part, part_lse = _kernel.forward(q, k[:, :, cols], v[:, :, cols], patch=patch, scale=scale)
        merge_(out, lse, part, part_lse, torch.empty(2, *lse.shape))
    return out.transpose(1, 2).to(q.dtype).contiguous(), lse.contiguous()


def flash_attn_backward(
    dout_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    out_BTHD: Tensor,
    lse_BHT: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
    scale: float,
    causal: bool,
) -> None:
    """Write dq, dk and dv into `results`."""
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout_BTHD, q_BTHD, k_BSHD, v_BSHD, out_BTHD))
    dq, dk, dv = (x.transpose(1, 2) for x in results)
    for index, (cols, patch) in enumerate(_tiles(q.shape[2], k.shape[2], causal)):
        tile = dout, q, k[:, :, cols], v[:, :, cols], lse_BHT, None
        parts = _kernel.backward(*tile, out=out, patch=patch, scale=scale)
        dq.copy_(parts[0]) if index == 0 else dq.add_(parts[0])
        dk[:, :, cols].copy_(parts[1])
        dv[:, :, cols].copy_(parts[2])


def _tiles(rows: int, cols: int, causal: bool) -> list[tuple[slice, Patch]]:
    """Return the tiles of a call: one tile, or where kv begins before q, a full one and a triangle."""
    if not causal:
        return [(slice(0, cols), Patch(0, rows, 0, cols))]
    before = cols - rows
    if before < 0:
        raise UnsupportedError(
            f"the stand-in flash_attn has no causal attention of {rows} query tokens to {cols} kv tokens: give as many "
            f"kv tokens, or install flash_attn"
        )
    triangle = (slice(before, cols), Patch(0, rows, 0, rows, high=0))
    return [triangle] if before == 0 else [triangle, (slice(0, before), Patch(0, rows, 0, before))]


# ---------- flash-attn's own signatures


def _refuse(options: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for options that the stand-in lacks; flash-attn spells "none" in several ways."""
    for name in ("dropout_p", "softcap", "alibi_slopes", "block_table", "leftpad_k", "seqused_k"):
        if options.get(name):
            raise UnsupportedError(f"the stand-in flash_attn has no {name}: leave it out, or install flash_attn")
    for name in ("window_size_left", "window_size_right"):
        if options.get(name, -1) >= 0:
            raise UnsupportedError("the stand-in flash_attn has no windows: leave them out, or install flash_attn")


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    _refuse(locals())
    return *flash_attn_forward(q, k, v, softmax_scale, causal), None, None


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    _refuse(locals())
    flash_attn_backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), softmax_scale, causal)


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None, leftpad_k: Tensor | None = None, seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """Return out [tokens, H, D] and lse [H, tokens] of packed sequences; q, k, v [tokens, H, D]."""
    _refuse(locals())
    parts = [
        flash_attn_forward(q[None, rows], k[None, cols], v[None, cols], softmax_scale, causal)
        for rows, cols in _sequences(cu_seqlens_q, cu_seqlens_k)
    ]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1), None, None


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> None:  # fmt: skip
    _refuse(locals())
    for rows, cols in _sequences(cu_seqlens_q, cu_seqlens_k):
        dout_part, q_part, out_part = (x[None, rows] for x in (dout, q, out))
        lse, results = softmax_lse[None, :, rows].contiguous(), (dq[None, rows], dk[None, cols], dv[None, cols])
        flash_attn_backward(
            dout_part, q_part, k[None, cols], v[None, cols], out_part, lse, results, softmax_scale, causal
        )


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """Return the rows and columns of each packed sequence."""
    bounds = [cu_seqlens.tolist() for cu_seqlens in (cu_seqlens_q, cu_seqlens_k)]
    rows, cols = ([slice(a, b) for a, b in pairwise(each)] for each in bounds)
    return list(zip(rows, cols, strict=True))


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        out, lse = flash_attn_forward(q, k, v, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        results = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        flash_attn_backward(douts[0], q, k, v, out, lse, results, *ctx.options)
        return *results, None, None


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """Return out [B, T, H, D] of q [B, T, H, D] and k, v [B, S, H, D]. Raises UnsupportedError for what it lacks."""
    _refuse(locals() | {"window_size_left": window_size[0], "window_size_right": window_size[1]})
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out: Tensor = _FlashAttention.apply(q, k, v, scale, causal)  # type: ignore[no-untyped-call]
    return out


NAMES = {
    function.__name__: function
    for function in (
        _flash_attn_forward,
        _flash_attn_backward,
        _flash_attn_varlen_forward,
        _flash_attn_varlen_backward,
        flash_attn_func,
    )
}
