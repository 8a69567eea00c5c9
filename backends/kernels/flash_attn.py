"""The packages of Dao-AILab: flash_attn 2, its version 3 for Hopper, and version 4 in CuTe DSL.

Imported when a kernel is made, and only then. Their functions are called by the names of their arguments, which
differ between releases: what a release has no name for and needs not is left out, and what it wants beyond what we
know has to be neutral (no dropout, no soft cap, no ALiBi, no cache), else the kernel is not available.

| package | functions of | releases whose names are known |
|---|---|---|
| flash_attn 2 | flash_attn.flash_attn_interface | 2.5 to 2.8 |
| 3 | flash_attn_interface, flash_attn_3.flash_attn_interface | hopper/, 2025 and 2026 |
| 4 | flash_attn.cute.interface | 2025 and 2026 |

All take [B, S, H, D] in fp16 or bf16, want the same heads as `AttentionKernel`, align masks at the bottom right and
give lse [B, H, S] in fp32. Values of another width than keys: version 2 takes none (CHECK_SHAPE of v in mha_fwd and
mha_bwd, csrc/flash_attn/flash_api.cpp), version 3 some (mha_fwd in hopper/flash_api.cpp; mha_bwd since it rounds
max(head_size, head_size_v)), version 4 all that it takes singly and 192 with 128, which on Blackwell it takes together
only (_validate_head_dims). A release that refuses them fails its trial, and gives way to another kernel.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, TypeVar

import torch

from tokenring.backends.kernels.flash_common import Gradients, TileKernel, Window, second_version, window
from tokenring.backends.kernels.reference import SoftCapped
from tokenring.errors import BackendUnavailable, UnsupportedError, one_line
from tokenring.sequence.region import Patch

F = TypeVar("F", bound="FlashPackage")
# What a release may want beside what we say, and its neutral value.
NEUTRAL: dict[str, object] = {
    "dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False, "deterministic": False,
    "rng_state": None, "attention_chunk": 0, "sm_margin": 0, "num_splits": 1, "pack_gqa": None,
    **dict.fromkeys((
        "k_new", "v_new", "qv", "out_", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k",
        "sequed_q", "sequed_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k",
        "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "scheduler_metadata",
    )),
}  # fmt: skip
SIDES = ("window_size_left", "window_size_right")
OURS = {
    "q", "k", "v", "dout", "out", "lse", "softmax_lse", "dq", "dk", "dv", "softmax_scale", "causal", "is_causal",
    "window_size", *SIDES,
}  # fmt: skip


class Function:
    """A function of a package, called with those of our options that it has a name for."""

    def __init__(self, kernel: str, function: Callable[..., Any]) -> None:
        self._call = function
        plain = getattr(function, "_init_fn", function)  # what a custom operator of torch's was made from
        parameters = inspect.signature(plain).parameters.values()
        self._names = {each.name for each in parameters}
        self._neutral = {
            each.name: NEUTRAL.get(each.name, each)
            for each in parameters
            if each.default is each.empty and each.name not in OURS
        }
        if unknown := [name for name, value in self._neutral.items() if isinstance(value, inspect.Parameter)]:
            raise BackendUnavailable(
                f"kernel {kernel!r}: {getattr(plain, '__name__', 'its function')} of this release wants "
                f"{', '.join(unknown)}, which this version of tokenring does not know: use ContextParallel(kernel="
                f"'auto'), or another release"
            )

    def takes(self, name: str) -> bool:
        """Return True if the function has an argument of this name."""
        return name in self._names

    def __call__(self, sides: Window | None, unbounded: int | None, causal: bool, **options: Any) -> Any:
        """Call the function with the window's sides and these options, as far as it has names for them."""
        left, right = (unbounded if side is None else side for side in sides or (None, None))
        options |= {"window_size": (left, right), "causal": causal, "is_causal": causal}
        options |= dict(zip(SIDES, (left, right), strict=True))
        return self._call(**self._neutral | {name: value for name, value in options.items() if name in self._names})


class FlashPackage(TileKernel):
    """A base of the kernels of the three packages. Raises BackendUnavailable if the package is missing or broken."""

    modules: ClassVar[tuple[str, ...]] = ()
    functions: ClassVar[tuple[str, str]] = ("_flash_attn_forward", "_flash_attn_backward")
    install: ClassVar[str] = ""
    unbounded: ClassVar[int | None] = -1  # a side of a window
    caps: ClassVar[bool] = True
    softcap = 0.0

    def __init__(self) -> None:
        super().__init__()
        module = self._module()
        forward, backward = (getattr(module, name, None) for name in self.functions)
        if forward is None or backward is None:
            raise BackendUnavailable(
                f"kernel {self.name!r}: {module.__name__} has no {' and '.join(self.functions)}: {self.install}"
            )
        self._forward, self._backward = Function(self.name, forward), Function(self.name, backward)
        self._windows = all(
            each.takes(SIDES[0]) or each.takes("window_size") for each in (self._forward, self._backward)
        )

    def _module(self) -> Any:
        reasons = []
        for name in self.modules:
            try:
                return import_module(name)
            except Exception as error:  # a binary package for another torch or driver may raise anything
                reasons.append(f"{name}: {one_line(error)}")
        raise BackendUnavailable(
            f"kernel {self.name!r} cannot be imported ({'; '.join(reasons)}): {self.install}, or use "
            f"ContextParallel(kernel='auto')"
        )

    def capped(self: F, softcap: float) -> F:
        """Return this kernel with this cap; see CappingKernel.capped. Raises UnsupportedError for older releases."""
        if not self.caps or not (self._forward.takes("softcap") and self._backward.takes("softcap")):
            raise UnsupportedError(f"kernel {self.name!r} of this release does not compute soft-capping in both passes")
        made = copy.copy(self)
        made.softcap, made._plain = softcap, SoftCapped(softcap)
        return made

    @property
    def _cap(self) -> dict[str, float]:
        return {"softcap": self.softcap} if self.softcap else {}

    def window(self, patch: Patch) -> Window | None:
        """Return the window that means this patch; None: it has to be cut."""
        return window(patch)

    def says(self, patch: Patch) -> bool:
        """Return True if one call computes the patch; see TileKernel.says."""
        found = self.window(patch)
        return found is not None and (self._windows or found.causal or patch.is_full)

    def call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse of one call of the package; see TileKernel.call_forward."""
        sides, causal = self._said(patch)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        made = self._forward(
            sides, self.unbounded, causal, q=q, k=k, v=v, softmax_scale=scale, return_lse=True, **self._cap
        )  # fmt: skip
        # Up to 2.6 it gives the padded operands before the statistics.
        out, lse = (made[0], made[5]) if len(made) == 8 else made[:2]
        return out.transpose(1, 2), lse

    def call_backward(
        self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, patch: Patch, scale: float,
    ) -> Gradients:  # fmt: skip
        """Return dq, dk, dv of one call of the package; see TileKernel.call_backward."""
        sides, causal = self._said(patch)
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        made = self._backward(
            sides, self.unbounded, causal, dout=dout, q=q, k=k, v=v, out=out, lse=lse, softmax_lse=lse,
            dq=dq, dk=dk, dv=dv, softmax_scale=scale, deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._cap,
        )  # fmt: skip
        if not self._backward.takes("dq"):  # it makes them itself
            dq, dk, dv = made[:3]
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def _said(self, patch: Patch) -> tuple[Window | None, bool]:
        """Return the window, or None where "causal" alone says it; and True if it is causal."""
        found = self.window(patch)
        assert found is not None  # `says` said so
        return (None, True) if found.causal else (found, False)


class FlashAttn2(FlashPackage):
    """A kernel of flash_attn 2: Ampere and later."""

    name = "flash-attn"
    modules = ("flash_attn.flash_attn_interface",)
    install = "pip install flash-attn, built for this torch"

    def window(self, patch: Patch) -> Window | None:
        """Return the window as version 2 means it; None: the patch has to be cut."""
        return second_version(patch)


class FlashAttn3(FlashPackage):
    """A kernel of flash_attn's version 3: Hopper."""

    name = "flash-attn-3"
    modules = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
    install = "build it from the folder hopper/ of flash-attention"

    def given_widths(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """Return the widths as they are for those pairs that its kernels are built for; see TileKernel.given_widths."""
        width, value_width = own = self.own_widths(head_dim, value_dim)
        fits = 128 < width <= 192 and 96 < value_width <= 128
        return own if width == value_width or fits else super().given_widths(head_dim, value_dim)


class FlashAttn4(FlashPackage):
    """A kernel of flash_attn's version 4, in CuTe DSL: Hopper and Blackwell. It makes dq, dk and dv itself."""

    name = "flash-attn-4"
    modules = ("flash_attn.cute.interface",)
    functions = ("_flash_attn_fwd", "_flash_attn_bwd")
    install = "pip install flash-attn-4"
    caps = False  # forward only
    unbounded = None
    given_widths = FlashPackage.own_widths
