"""Multi-latent attention from latents: keys and values of all heads are made of them where a tile needs them.

A latent is what a token has in place of k and v: L elements of which a projection makes the rest, and R that every
head's key ends with (after the rotary embedding). It stands where k stands for schedules, [B, 1, S, L + R], and v
has no width there. So it alone travels; its gradient comes home as dk does. What is expanded lives as long as its tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenring.backends.interfaces import HeadLimited, MaskingKernel, PackingKernel, Tiles, refusal_of
from tokenring.sequence.region import Patch

Made = tuple[torch.Tensor, ...]


@dataclass
class Expansion:
    """The projection of a call: weight [H · (Dn + Dv), L], of each head first what makes its key, then its value.

    gradient: fp32, of the tiles that this rank has computed so far; None where none is wanted.
    """

    weight: torch.Tensor
    heads: int
    value_dim: int
    gradient: torch.Tensor | None = None

    @property
    def said(self) -> str:
        """Text on which ranks agree, beside the sizes of a call."""
        return f"latents of {self.weight.shape[1]}"

    @property
    def nope(self) -> int:
        """Elements of a key that come from the projection."""
        return self.weight.shape[0] // self.heads - self.value_dim

    def expanded(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k [B, H, S, Dn + R] and v [B, H, S, Dv] of latents [B, 1, S, L + R]."""
        of_heads, everywhere = self._parts(latent)
        made = (of_heads @ self.weight.t()).view(*of_heads.shape[:2], self.heads, -1)
        k = torch.cat([made[..., : self.nope], everywhere[:, :, None].expand(-1, -1, self.heads, -1)], dim=-1)
        return k.transpose(1, 2), made[..., self.nope :].transpose(1, 2)

    def contracted(self, latent: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> torch.Tensor:
        """Return the gradient of latents from those of k and v that were made of them; add that of the weight up."""
        of_heads, _ = self._parts(latent)
        made = torch.cat([dk[..., : self.nope], dv], dim=-1).transpose(1, 2).flatten(2)  # [B, S, H · (Dn + Dv)]
        if self.gradient is not None:
            self.gradient += made.flatten(0, 1).t() @ of_heads.flatten(0, 1).to(made.dtype)
        everywhere = dk[..., self.nope :].sum(dim=1)
        return torch.cat([made @ self.weight.to(made.dtype), everywhere], dim=-1)[:, None]

    def _parts(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the projection takes, [B, S, L], and what every key ends with, [B, S, R]."""
        size = self.weight.shape[1]
        return latent[:, 0, :, :size], latent[:, 0, :, size:]


@dataclass(frozen=True)
class SharedLatents:
    """Latents that are keys and values as they are, of all heads alike: weights are absorbed in queries and results.

    value_dim: the first elements of a latent, its value. There is no backward pass.
    """

    value_dim: int

    @property
    def said(self) -> str:
        """Text on which ranks agree, beside the sizes of a call."""
        return f"latents of {self.value_dim}, absorbed"

    def expanded(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k [B, 1, S, L + R] and v [B, 1, S, L] of latents [B, 1, S, L + R], without a copy."""
        return latent, latent[..., : self.value_dim]


Weights = Expansion | SharedLatents


class LatentKernel:
    """A kernel that is given latents for k, and nothing for v; it computes by another one.

    In a program it has no weights: `of` gives those of a call.
    """

    def __init__(self, kernel: Any, expansion: Weights | None = None, name: str = "") -> None:
        self.name, self._kernel, self._expansion = name or kernel.name, kernel, expansion

    def of(self, expansion: Weights, wrap: Any = None) -> LatentKernel:
        """Return this kernel for a call with these weights. wrap: makes the kernel beneath that of the call."""
        return LatentKernel(self._kernel if wrap is None else wrap(self._kernel), expansion, self.name)

    # ---------- what the kernel beneath says

    def supports(self, head_dim: int, dtype: torch.dtype) -> str | None:
        """Return None, or why it cannot compute such a call; see AttentionKernel.supports."""
        found: str | None = self._kernel.supports(head_dim, dtype)
        return found

    def supports_widths(self, head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
        """Return None, or why it cannot compute with these widths of expanded keys and values."""
        return refusal_of(self._kernel, head_dim, value_dim, dtype)

    def supports_heads(self, q_heads: int) -> str | None:
        """Return None, or why it cannot compute with so many query heads."""
        return self._kernel.supports_heads(q_heads) if isinstance(self._kernel, HeadLimited) else None

    def supports_patch(self, patch: Patch) -> str | None:
        """Return None, or why a patch should be cut; see AttentionKernel.supports_patch."""
        found: str | None = self._kernel.supports_patch(patch)
        return found

    def holding(self, tiles: Tiles) -> LatentKernel:
        """Return this kernel with the masks of these tiles; see MaskingKernel.holding."""
        kernel = self._kernel.holding(tiles) if isinstance(self._kernel, MaskingKernel) else self._kernel
        return LatentKernel(kernel, self._expansion)

    def packs(self, patches: Sequence[Patch]) -> bool:
        """Return True if the kernel beneath takes these patches in one call."""
        return isinstance(self._kernel, PackingKernel) and self._kernel.packs(patches)

    # ---------- tiles

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Made:
        """Return out [B, H, Sq, Dv] and lse of a tile; k: latents [B, 1, S, L + R]."""
        found: Made = self._kernel.forward(q, *self._own.expanded(k), **options)
        return found

    def forward_packed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> list[Made]:
        """Return (out, lse) of each patch."""
        kernel: Any = self._kernel
        found: list[Made] = kernel.forward_packed(q, *self._own.expanded(k), **options)
        return found

    def backward(
        self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any, **options: Any
    ) -> Made:
        """Return dq, the gradient of the latents in the place of dk, and a dv of no width."""
        made = self._kernel.backward(dout, q, *self._own.expanded(k), *others, **options)
        return self._with_latents(k, made)

    def backward_packed(
        self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any,
        patches: Sequence[Patch], **options: Any,
    ) -> list[Made]:  # fmt: skip
        """Return what `backward` does of each patch."""
        kernel: Any = self._kernel
        made = kernel.backward_packed(dout, q, *self._own.expanded(k), *others, patches=patches, **options)
        columns = (k[:, :, patch.col0 : patch.col1] for patch in patches)  # what lies between may not be read
        return [self._with_latents(some, each) for some, each in zip(columns, made, strict=True)]

    def _with_latents(self, latent: torch.Tensor, made: Made) -> Made:
        dq, dk, dv = made
        found: torch.Tensor = self._own.contracted(latent, dk, dv)
        return dq, found, found[..., :0]

    @property
    def _own(self) -> Any:
        if self._expansion is None:
            raise TypeError("a kernel of latents computes with the weights of a call: `of` gives them")
        return self._expansion
