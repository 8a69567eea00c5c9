"""A ParallelStyle for torch-native models: attention by scaled_dot_product_attention, over the ranks of a mesh.

    cp = tr.ContextParallel(mesh["cp"])
    style = ContextParallelAttention(cp)
    parallelize_module(model, mesh["cp"], {"layers.*.attention": style})      # before fully_shard and torch.compile
    loss = model(tr.shard(tokens, cp), tr.positions(cp, length))              # this rank's tokens, with their positions

Modules need no change: their calls of torch.nn.functional.scaled_dot_product_attention become tr.attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode

from tokenring.api.attention import attend
from tokenring.api.compiled import with_number
from tokenring.api.context import ContextParallel
from tokenring.api.inputs import check_context
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.raising import raise_on_all_ranks
from tokenring.sequence.layout import AUTO
from tokenring.sequence.mask import Causal, Full, Mask
from tokenring.sequence.mask_words import MaskLike, mask_of

SEQUENCE = 2  # the dimension of tokens in q, k and v [B, H, T, D]
STYLED = "_tokenring_style"  # attribute of a module whose calls go over ranks
FORWARD = "_tokenring_forward"  # attribute of such a module that had a forward of its own, not of its class
ATTENTION = F.scaled_dot_product_attention  # itself, whatever somebody puts into its place later
# Functions that attend without a call that could be taken over.
INNER = "scaled_dot_product"  # in names of torch's operators and kernels behind it
WHOLE = {F.multi_head_attention_forward, torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd}


class ContextParallelAttention(ParallelStyle):
    """Make the attention of a module one over all ranks of a ContextParallel, for `parallelize_module`.

    cp: of the ranks of the mesh that parallelize_module gets. mask: what hides tokens besides what calls say
    (is_causal): None, or such as Documents(ends), over the whole sequence. `style.mask = ...` changes it for the calls
    that follow; leave it until the backward pass has ended where layers are checkpointed.

    The modules are those that call scaled_dot_product_attention, on [B, H, T, D] of this rank's T tokens, which are
    cut as `tr.shard` cuts them; with layout "auto", by `style.mask`, whatever is_causal says. Name modules inside of
    what a checkpoint wraps, not around it. q, k and v may be DTensors that are sharded over heads or batch.

    Raises ConfigurationError for a mesh of other ranks; in calls UnsupportedError, on all ranks, for masks of the
    model's own, dropout, keys of another number of tokens, and modules that make no such call.
    """

    def __init__(self, cp: ContextParallel, mask: MaskLike = None) -> None:
        """Make a style; one serves many modules."""
        check_context(cp)
        super().__init__()
        self.cp = cp
        self.mask = mask

    @property
    def mask(self) -> Mask | None:
        """Return what hides tokens besides what calls say; None: nothing."""
        return self._mask

    @mask.setter
    def mask(self, mask: MaskLike) -> None:
        self._mask = None if mask is None else mask_of(mask)
        hiding = Full() if self._mask is None else self._mask
        self._joined = tuple(with_number(each, cut_by=hiding) for each in (hiding, Causal() & hiding))  # by is_causal

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        """Take over the calls of a module, which parallelize_module names. Raises ConfigurationError."""
        self._check_mesh(device_mesh)
        for name, each in module.named_modules():
            if type(each).__name__ == "CheckpointWrapper":
                raise ConfigurationError(
                    f"{type(module).__name__} has a checkpoint inside ({name or 'itself'}), which calls its part again "
                    f"in the backward pass, without the module around it: name the modules inside of the checkpoint"
                )
            if hasattr(each, STYLED):
                raise ConfigurationError(f"{name or type(each).__name__} has a style of tokenring's already: name one")
        module.__class__ = _over_ranks(type(module))  # type: ignore[arg-type]  # classes have hashes
        if "forward" in vars(module):  # of this one module, in front of that of its class
            setattr(module, FORWARD, vars(module).pop("forward"))
        setattr(module, STYLED, self)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallelAttention:
        """Return itself: a copy of a module follows the same `style.mask`."""
        return self

    def _check_mesh(self, mesh: DeviceMesh) -> None:
        if self.cp.group is None:
            return  # one rank, which attends alone
        own, given = dist.get_process_group_ranks(self.cp.group), mesh.mesh.flatten().tolist()
        if mesh.ndim != 1 or sorted(given) != sorted(own):
            raise ConfigurationError(
                f"parallelize_module got a mesh of ranks {given}, and the ContextParallel has {own}: give "
                f"tr.ContextParallel(mesh['cp']) and parallelize_module(model, mesh['cp'], ...) the same"
            )

    def forward(self, module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """Return what forward(*args, **given) of a module returns, with its calls taken over."""
        if torch.compiler.is_compiling():
            found, made = self._traced(forward, *args, **given)
        else:
            calls = _Calls(self)
            with calls:
                found = forward(*args, **given)
            made = calls.made
        if not made:
            self._refuse(
                f"{type(module).__name__} made no call of scaled_dot_product_attention, so it saw this rank's tokens "
                f"alone: name modules that call it; of FlexAttention, kernels or MultiheadAttention nothing is taken "
                f"over",
                *args,
            )
        return found

    def _traced(self, forward: Callable[..., Any], *args: Any, **given: Any) -> tuple[Any, int]:
        """Return what a module returns, for torch.compile to trace, and how many calls were taken over.

        The compiler does not trace methods of tensors under a mode; it follows what stands in torch.nn.functional.
        """
        made: list[torch.Tensor] = []

        def called(*args: Any, **given: Any) -> torch.Tensor:
            made.append(self.attend(*args, **given))
            return made[-1]

        before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, called
        try:
            return forward(*args, **given), len(made)
        finally:
            F.scaled_dot_product_attention = before

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Return what scaled_dot_product_attention would over whole sequences: [B, H, T, Dv] of this rank's tokens."""
        wrong = _wrong(attn_mask, dropout_p, query, key, value) or self._misplaced(query, key, value)
        if wrong is None and self._mask is None and self.cp.layout == AUTO:
            wrong = (
                'layout "auto" follows from a mask, and style.mask is None: set style.mask to that by which tokens are '
                "cut, tr.Causal() for plain text, or give the ContextParallel a layout by name"
            )
        if wrong is not None:
            self._refuse(wrong, query)
        q, k, v = (x.to_local() if isinstance(x, DTensor) else x for x in (query, key, value))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = self._joined[bool(is_causal)]
        out, _ = attend(q, k, v, self.cp, mask, scale, torch.is_grad_enabled(), wants_lse=False)
        out = out.transpose(1, 2)
        if not isinstance(query, DTensor):
            return out
        batch, heads, tokens, width = *query.shape[:3], value.shape[3]  # of all ranks, whose parts may differ in size
        return DTensor.from_local(
            out, query.device_mesh, query.placements, shape=torch.Size((batch, heads, tokens, width)),
            stride=(tokens * heads * width, width, heads * width, 1),
        )  # fmt: skip

    def _misplaced(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
        """Return what is wrong with DTensors; None: nothing, or there are none."""
        found = [x for x in (query, key, value) if isinstance(x, DTensor)]
        if not found:
            return None
        if len(found) < 3 or any(x.placements != found[0].placements for x in found):
            return "q, k and v are not DTensors alike: give all three the same placements, or tensors of this rank"
        mesh = found[0].device_mesh
        for dim, placed in enumerate(found[0].placements):
            over_tokens = isinstance(placed, Shard) and placed.dim == SEQUENCE
            ours = self.cp.group is not None and mesh.get_group(dim) == self.cp.group
            if isinstance(placed, Partial) or (isinstance(placed, Shard) and placed.dim > SEQUENCE):
                return f"q, k and v are DTensors with {placed}: shard them over batch or heads"
            if over_tokens and not ours:
                return "q, k and v are DTensors sharded over tokens on other ranks than those of the ContextParallel"
        return None

    def _refuse(self, reason: str, *given: object) -> NoReturn:
        raise_on_all_ranks(self.cp, UnsupportedError(reason), *given)


@cache
def _over_ranks(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return the class of modules of a kind whose calls go over ranks; so a copy of a module calls its own weights."""

    @wraps(kind.forward)
    def forward(self: torch.nn.Module, *args: Any, **given: Any) -> Any:
        own = vars(self).get(FORWARD)
        return getattr(self, STYLED).forward(self, partial(kind.forward, self) if own is None else own, *args, **given)

    return type(f"ContextParallel{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__})


class _Calls(TorchFunctionMode):
    """The calls of torch's functions that a module makes, while it runs."""

    def __init__(self, style: ContextParallelAttention) -> None:
        super().__init__()
        self.style, self.made, self.with_gradients = style, 0, torch.is_grad_enabled()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), given: dict[str, Any] | None = None
    ) -> Any:
        if function is ATTENTION:
            self.made += 1
            if self.with_gradients and not torch.is_grad_enabled():
                self.style._refuse(
                    "a named module calls scaled_dot_product_attention without gradients, inside a forward pass with "
                    "them: a checkpoint inside of it would call it again without the module around it; name modules "
                    "inside of the checkpoint",
                    *args,
                )
            return self.style.attend(*args, **(given or {}))
        name = getattr(function, "__name__", "")
        if function in WHOLE or INNER in name:
            self.style._refuse(
                f"{name} is not supported: call scaled_dot_product_attention of torch.nn.functional", *args
            )
        return function(*args, **(given or {}))


def _wrong(attn_mask: object, dropout_p: float, query: Any, key: Any, value: Any) -> str | None:
    """Return what is wrong with a call; None: nothing."""
    if attn_mask is not None:
        return (
            "a model gave scaled_dot_product_attention an attn_mask, which holds this rank's tokens alone: give "
            "is_causal, and documents as `style.mask = tr.Documents(ends)`"
        )
    if dropout_p:
        return f"attention with dropout_p={dropout_p} is not supported: its mask cannot be the same under every split"
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return f"q is {list(query.shape)}: give scaled_dot_product_attention [B, H, T, D]"
    if query.shape[SEQUENCE] != key.shape[SEQUENCE]:
        return (
            f"a layer attends from {query.shape[SEQUENCE]} tokens here to {key.shape[SEQUENCE]}: keys that every rank "
            f"holds whole, as in cross-attention and caches, are not supported; do not name such modules"
        )
    return None
