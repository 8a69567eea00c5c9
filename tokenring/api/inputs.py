"""Inputs of a call: their checks, and the request that they make."""

from __future__ import annotations

import torch

from tokenring.api.context import ContextParallel
from tokenring.api.tensor_checks import check_tensor
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.runtime.scaling import checked_scale
from tokenring.sequence.mask import Full, Mask
from tokenring.sequence.mask_words import MaskLike, mask_of
from tokenring.sequence.request import Request
from tokenring.sequence.workload import Workload


def make_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    mask: MaskLike,
    scale: float | None,
    training: bool | None = None,
    is_causal: bool | None = None,
) -> Request:
    """Return a call's request, after checks that everything fits together. training None: if gradients are on."""
    training = torch.is_grad_enabled() if training is None else training
    differentiable = any(x.requires_grad for x in (q, k, v))
    return request_of(q, k, v, cp, mask_of(mask, is_causal), scale, training, differentiable)


def request_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    mask: Mask | None,
    scale: float | None,
    training: bool,
    differentiable: bool,
) -> Request:
    """Return a call's request where autograd's mode was another one when the call was made, as in a compiled graph."""
    mask = Full() if mask is None else mask
    workload = _workload(q, k, v, cp, mask)
    return Request(workload, mask, checked_scale(scale, q.shape[-1]), training, q.device, differentiable)


def call_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v in the dtype that they are computed with, under autocast too; checks their types and cp's."""
    check_context(cp)
    check_types(q, k, v)
    check_tensors(q, k, v)
    return under_autocast(q), under_autocast(k), under_autocast(v)


def check_context(cp: object) -> None:
    """Raise ConfigurationError unless this is a ContextParallel."""
    if not isinstance(cp, ContextParallel):
        raise ConfigurationError(
            f"cp is of type {type(cp).__name__}; make a ContextParallel, once, and give it to every call"
        )


def check_types(*qkv: object) -> None:
    """Raise ConfigurationError unless these are tensors."""
    found = [type(x).__name__ for x in qkv if not isinstance(x, torch.Tensor)]
    if found:
        raise ConfigurationError(f"q, k and v must be tensors [B, T, H, D]; one is of type {found[0]}")


def check_tensors(*qkv: torch.Tensor) -> None:
    """Raise UnsupportedError for tensors that have no dense data to compute with."""
    for x in qkv:
        check_tensor("attention", x)
    if sparse := [x.layout for x in qkv if x.layout != torch.strided]:
        raise UnsupportedError(f"attention of {sparse[0]} tensors is not supported; make q, k and v dense and padded")


def under_autocast(x: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype to which scaled_dot_product_attention casts it under autocast."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _workload(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: Mask) -> Workload:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ConfigurationError(f"attention wants q, k and v as [B, T, H, D]; got {shapes}")
    if not q.shape[3] == k.shape[3] == v.shape[3]:
        raise UnsupportedError(f"q, k and v must have one head dimension; got {shapes}")
    if k.shape != v.shape or q.shape[0] != k.shape[0]:
        raise ConfigurationError(f"k and v must have one shape, and q the same batch; got {shapes}")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ConfigurationError(
            f"q, k and v must share dtype and device; got {q.dtype}/{k.dtype}/{v.dtype} "
            f"on {q.device}/{k.device}/{v.device}"
        )
    if min(q.shape[1], k.shape[1]) == 0:
        raise ConfigurationError(f"a rank with an empty shard cannot take part: {shapes}; pad the sequence")
    q_length, kv_length = q.shape[1] * cp.world_size, k.shape[1] * cp.world_size
    if q_length != kv_length and mask.needs_equal_lengths:
        raise UnsupportedError(
            f"mask {mask} numbers one sequence, but q has {q_length} positions and kv {kv_length}: only Full takes both"
        )
    mask.check_length(q_length)
    return Workload(q.shape[0], q_length, kv_length, q.shape[2], k.shape[2], q.shape[3], q.dtype)
