"""Multi-latent attention whose latents travel, in place of the keys and values that are made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch

from tokenring.api.arguments import refuse_wire
from tokenring.api.attention import attend
from tokenring.api.autograd import (
    FORWARD_MODE,
    backward_pass,
    check_gradients,
    first,
    forward_pass,
    refuse_transforms,
    rows_packed,
    saved_for_backward,
)
from tokenring.api.context import ContextParallel
from tokenring.api.inputs import call_inputs, check_context, check_tensor, request_of, with_lengths
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.runtime.agreement import refusing
from tokenring.sequence.mask_words import MaskLike, mask_of
from tokenring.sequence.workload import Request

if TYPE_CHECKING:
    from tokenring.runtime.latent_kernel import Expansion
    from tokenring.sequence.layout import Layout
    from tokenring.sequence.mask import Mask

COMPILED = (
    "latent_attention is not supported in a compiled call: call it outside, or expand the latents and call attention"
)


@overload
def latent_attention(
    q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, weight: torch.Tensor, cp: ContextParallel,
    mask: MaskLike = None, scale: float | None = None, return_lse: Literal[False] = False, *,
    is_causal: bool | None = None,
) -> torch.Tensor: ...  # fmt: skip


@overload
def latent_attention(
    q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, weight: torch.Tensor, cp: ContextParallel,
    mask: MaskLike = None, scale: float | None = None, *, return_lse: Literal[True], is_causal: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def latent_attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    weight: torch.Tensor,
    cp: ContextParallel,
    mask: MaskLike = None,
    scale: float | None = None,
    return_lse: bool = False,
    *,
    is_causal: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute exact multi-latent attention, of which latents travel where they are fewer bytes than keys and values.

    q: [B, T, H, Dn + R], this rank's part in cp's layout; latent: [B, T', L], normalised as the model's projection
    takes it; rope: [B, T', R], what the key of every head ends with, rotated; weight: [H · (Dn + Dv), L], that of the
    projection (a Linear without bias, as Megatron's linear_kv_up_proj): of each head first Dn rows of its key, then Dv
    of its value. The same on every rank, as a parameter is. mask, scale (default 1/√(Dn + R)), is_causal: as for
    `attention`.

    L + R elements of a token travel in place of H · (Dn + R + Dv), in both directions of each pass; each rank makes
    keys and values of a tile when it computes it, and forgets them, so that what forward keeps are latents. Where
    these are no fewer (few heads), keys and values are made once, by their owner, and travel. Schedules that split
    heads, as Ulysses does, are refused by name; "auto" plans with the others, and with what expansion costs.

    Returns out [B, T, H, Dv], and with return_lse also lse [B, H, T] (fp32), both differentiable. The gradient of
    weight on a rank is that of the tiles it computed: add those of all ranks up, as those of any parameter.

    Raises ConfigurationError (sizes that do not fit), UnsupportedError (torch.compile, derivatives but the first,
    what `attention` does not compute) and PeerLost.
    """
    check_context(cp)
    if torch.compiler.is_compiling():
        raise UnsupportedError(COMPILED)
    # As for `attention`: not whether these tensors want gradients.
    training, operands = torch.is_grad_enabled(), (q, latent, rope, weight)
    with refusing(cp, "forward", *operands):
        refuse_wire(cp.wire, "latent_attention")
        heads, value_dim = latent_sizes(*operands)
        travels = latent.shape[-1] + rope.shape[-1]
        whole = heads * (q.shape[-1] + value_dim)
    if travels >= whole:
        from tokenring.runtime.latent_kernel import Expansion

        made = Expansion(weight, heads, value_dim).expanded(torch.cat([latent, rope], dim=-1)[:, None])
        k, v = (x.transpose(1, 2) for x in made)
        out, lse = attend(q, k, v, cp, mask, scale, training, is_causal)
    else:
        out, lse = with_lengths(cp, lambda: _attend(*operands, value_dim, cp, mask, scale, training, is_causal))
    return (out, lse) if return_lse else out


def _attend(
    q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, weight: torch.Tensor, value_dim: int,
    cp: ContextParallel, mask: MaskLike, scale: float | None, training: bool, is_causal: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out and lse of a call in which latents travel."""
    with refusing(cp, "forward", q, latent, rope, weight):
        both = torch.cat([latent, rope], dim=-1)[:, :, None]
        q, both, weight, request = latent_request(
            q, both, weight, value_dim, cp, mask_of(mask, is_causal), scale, training
        )
    return attend_latents_as(q, both, weight, cp, request)


def latent_request(
    q: torch.Tensor, both: torch.Tensor, weight: torch.Tensor, value_dim: int, cp: ContextParallel, mask: Mask | None,
    scale: float | None, training: bool, layout: Layout | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Request]:  # fmt: skip
    """Return the inputs of a call in which latents travel, as they are computed with, and its request.

    both: [B, T, 1, L + R], latents and what every key ends with; others as for `latent_attention`. layout: of the
    tokens, where that is not cp's. Called under `refusing`.
    """
    q, both, weight = call_inputs(q, both, weight, cp)
    refuse_transforms()
    k, v = (both[..., :1].expand(-1, -1, -1, size) for size in (q.shape[-1], value_dim))
    wanted = any(x.requires_grad for x in (q, both, weight))
    plain = request_of(q, k, v, cp, mask, scale, training, wanted, layout=layout)
    return q, both, weight, replace(plain, workload=replace(plain.workload, latent_dim=both.shape[-1]))


def attend_latents_as(
    q: torch.Tensor, both: torch.Tensor, weight: torch.Tensor, cp: ContextParallel, request: Request
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse for a request that `latent_request` made of these inputs."""
    out, lse = LatentFunction.apply(q, both, weight, cp, request)  # type: ignore[no-untyped-call]
    return out, lse


def latent_sizes(
    q: object, latent: object, rope: object, weight: object, name_of_call: str = "latent_attention"
) -> tuple[int, int]:
    """Return the number of heads and the width of values. Raises ConfigurationError."""
    given = {"q": (q, 4), "latent": (latent, 3), "rope": (rope, 3), "weight": (weight, 2)}
    for name, (x, dims) in given.items():
        if not isinstance(x, torch.Tensor) or x.dim() != dims:
            found = list(x.shape) if isinstance(x, torch.Tensor) else f"of type {type(x).__name__}"
            raise ConfigurationError(f"{name_of_call} expects {name} as a tensor of {dims} dimensions; it is {found}")
        if x.dtype != q.dtype or x.device != q.device:  # type: ignore[attr-defined]
            raise ConfigurationError(
                f"{name} is {x.dtype} on {x.device}, and q {q.dtype} on {q.device}: "  # type: ignore[attr-defined]
                f"give all four in one dtype, on one device"
            )
        check_tensor(name_of_call, x)
    shapes = f"q {list(q.shape)}, latent {list(latent.shape)}, rope {list(rope.shape)}"  # type: ignore[attr-defined]
    if latent.shape[:2] != rope.shape[:2] or q.shape[0] != latent.shape[0]:  # type: ignore[attr-defined]
        raise ConfigurationError(f"latent and rope must have the same tokens, and q the same batch; got {shapes}")
    heads, nope = q.shape[2], q.shape[3] - rope.shape[2]  # type: ignore[attr-defined]
    rows, size = weight.shape  # type: ignore[attr-defined]
    if nope < 1 or size != latent.shape[2] or rows % heads or rows // heads <= nope:  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"weight is [{rows}, {size}], and with {shapes} it must be [{heads} · ({max(nope, 0)} + Dv), "
            f"{latent.shape[2]}]: the rows of each head's key without its last {rope.shape[2]} "  # type: ignore[attr-defined]
            f"elements, then those of its value"
        )
    return heads, rows // heads - nope


class LatentFunction(torch.autograd.Function):
    """Forward and backward of one distributed call of which latents travel."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, latent: torch.Tensor, weight: torch.Tensor, cp: ContextParallel, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [B, T, H, Dv] in q's dtype and lse [B, H, T] fp32; save what backward needs."""
        with cp.turn:
            with refusing(cp, "forward", q):
                q, latent, weight = (rows_packed(x) for x in (q, latent, weight))
            out, lse, kept = _forward(cp, request, q, latent, weight)
        ctx.cp, ctx.request = cp, request
        return saved_for_backward(ctx, q, latent, weight, out, lse, kept)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return dq, the gradient of the latents, and this rank's part of that of weight."""
        dout, dlse = grads
        cp, request = ctx.cp, ctx.request
        with refusing(cp, "backward", dout, dlse):
            if dout is None and dlse is None:
                return (None,) * 5
            check_gradients("latent_attention", dout, dlse)
            q, latent, weight, *made = ctx.saved_tensors
            dout = torch.zeros_like(made[0]) if dout is None else dout
        wanted = ctx.needs_input_grad[2]

        def compute() -> tuple[torch.Tensor, ...]:
            with cp.turn:
                if ctx.changes.found():
                    made[:2] = _forward(cp, request, q, latent, weight)[:2]
                expansion = _expansion(request, weight, wanted)
                saved = q, latent, latent[..., :0], *made
                dq, dlatent, _ = backward_pass(cp, request, dout, dlse, *saved, expansion=expansion)
                found = expansion.gradient
                return dq, dlatent, *(() if found is None else (found.to(weight.dtype),))

        depends = [x for x in (dout, dlse, q, latent, weight) if x is not None]
        dq, dlatent, *dweight = first(compute, *depends)
        return dq, dlatent, dweight[0] if dweight else None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> NoReturn:
        """Raise UnsupportedError: forward mode is not computed here."""
        raise UnsupportedError(FORWARD_MODE)


def _forward(
    cp: ContextParallel, request: Request, q: torch.Tensor, latent: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return forward_pass(cp, request, q, latent, latent[..., :0], None, expansion=_expansion(request, weight))


def _expansion(request: Request, weight: torch.Tensor, wanted: bool = False) -> Expansion:
    from tokenring.runtime.latent_kernel import Expansion  # whoever calls attention alone need not load it

    size = request.workload
    wide = torch.promote_types(weight.dtype, torch.float32)
    gradient = torch.zeros_like(weight, dtype=wide) if wanted else None
    return Expansion(weight, size.q_heads, size.value_dim, gradient)
