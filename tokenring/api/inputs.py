"""Inputs of a call: the order of their axes, their checks, and the request that they make.

Tensors that cannot be computed with here are refused before anything of theirs is looked at. Axes are [B, T, H, D], or
[B, H, T, D] where the caller says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch.autograd import forward_ad

from tokenring.api.context import ContextParallel
from tokenring.errors import ConfigurationError, TokenRingWarning, UnsupportedError, one_line
from tokenring.runtime.agreement import OtherLengths
from tokenring.runtime.bound_kernel import checked_scale, checked_softcap
from tokenring.sequence.layout import AUTO, Layout
from tokenring.sequence.mask import Full, Mask
from tokenring.sequence.mask_words import MaskLike, mask_of
from tokenring.sequence.workload import DTYPES, TAKEN, Held, Request, Workload

Order = Literal["bthd", "bhtd"]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
T = TypeVar("T")

# Models have up to 128 heads, and a rank has some hundred tokens at least. So where the third axis of q and of k is as
# long as that, and longer than the second, the second is rather heads. That misses a rank's part of fewer than 128
# tokens, or of fewer than heads. It is a false alarm where 128 heads, of k too (no grouped ones), meet fewer tokens.
MANY = 128

PLAIN = (torch.Tensor, torch.nn.Parameter)  # by their very type: whatever is derived from them is looked at
NO_PLACEMENT = "it has a placement on a mesh, which says nothing of a layout; give this rank's part, x.to_local()"
PADDED = "pad it to one length, or lay its sequences end to end and give mask=Documents(cu_seqlens)"
NO_DATA = "it has no data; give tensors on the device that is to compute"
NO_TRANSFORMS = "torch.func cannot look into a call of several ranks: "
BY_NAME = {"DTensor": NO_PLACEMENT, "NestedTensor": PADDED, "FakeTensor": NO_DATA}
CUT_BY = "_cut_by"  # attribute of a mask: another one, by which tensors of its calls are cut
WAITS_BY_ITSELF = "AsyncCollectiveTensor"  # what functional collectives give, and to_local() may


def make_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    mask: MaskLike,
    scale: float | None,
    training: bool | None = None,
    is_causal: bool | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    layout: Layout | None = None,
    wants_lse: bool = True,
) -> Request:
    """Return a call's request, after checks that everything fits together. training None: if gradients are on.

    wants_lse: the caller does; sinks and a backward pass do, too.
    """
    training = torch.is_grad_enabled() if training is None else training
    check_sinks(sinks, q)
    differentiable = any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    wants_lse = wants_lse or training or differentiable or sinks is not None
    return request_of(
        q, k, v, cp, mask_of(mask, is_causal), scale, training, differentiable, softcap, layout, wants_lse
    )


def request_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    mask: Mask | None,
    scale: float | None,
    training: bool,
    differentiable: bool,
    softcap: float | None = None,
    layout: Layout | None = None,
    wants_lse: bool = True,
    again: bool = False,
) -> Request:
    """Return a call's request where autograd's mode was another one when the call was made, as in a compiled graph.

    again: the request of a call that was made before, for its backward pass.
    """
    mask = Full() if mask is None else mask
    workload = _workload(q, k, v, cp, mask, layout)
    if layout is None and cp.layout == AUTO:
        layout = _auto_layout(Held(q.shape[1], k.shape[1]), (workload.q_length, workload.kv_length), cp, mask, again)
    scale, softcap = checked_scale(scale, q.shape[-1]), checked_softcap(softcap)
    return Request(workload, mask, scale, training, q.device, differentiable, softcap, layout, wants_lse)


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


def wrong_type(sinks: object) -> str | None:
    """Say that sinks are no tensor, which no operator can be given; None: they are, or there are none."""
    if sinks is None or isinstance(sinks, torch.Tensor):
        return None
    return f"sinks are of type {type(sinks).__name__}; give a tensor with a logit for each query head, or None"


def check_sinks(sinks: object, q: torch.Tensor) -> None:
    """Raise ConfigurationError or UnsupportedError unless these are None, or sinks for q [B, T, H, D]."""
    if (wrong := wrong_type(sinks)) is not None:
        raise ConfigurationError(wrong)
    if not isinstance(sinks, torch.Tensor):
        return
    check_tensors(sinks)
    if q.dim() == 4 and sinks.shape != q.shape[2:3]:
        raise ConfigurationError(
            f"sinks are {list(sinks.shape)}, and q has {q.shape[2]} heads here: give a logit for each, [{q.shape[2]}]"
        )
    if sinks.dtype not in DTYPES:
        raise UnsupportedError(f"sinks in {sinks.dtype} are not supported; give them in float32, or as q is")
    if sinks.device != q.device:
        raise ConfigurationError(f"sinks are on {sinks.device}, and q on {q.device}: move them there")


def under_autocast(x: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype to which scaled_dot_product_attention casts it under autocast."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _workload(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: Mask, layout: Layout | None
) -> Workload:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ConfigurationError(f"attention expects q, k and v as [B, T, H, D]; got {shapes}")
    if q.shape[3] != k.shape[3]:
        raise UnsupportedError(f"q and k must have one head dimension (only that of v may differ); got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ConfigurationError(
            f"k and v must have one shape but for their head dimensions, and q the same batch; got {shapes}"
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ConfigurationError(
            f"q, k and v must share dtype and device; got {q.dtype}/{k.dtype}/{v.dtype} "
            f"on {q.device}/{k.device}/{v.device}"
        )
    held = Held(q.shape[1], k.shape[1])
    q_length, kv_length = _lengths(held, cp, mask) if layout is None else _lengths_in(layout, held, cp, mask)
    return Workload(q.shape[0], q_length, kv_length, q.shape[2], k.shape[2], q.shape[3], q.dtype, v.shape[3])


def _lengths(held: Held, cp: ContextParallel, mask: Mask) -> tuple[int, int]:
    """Return the lengths of q and kv over all ranks, after checks that they fit what this rank holds, and the mask."""
    q_length, kv_length = lengths = cp.lengths.of(held)
    try:
        cp.lengths.check(held, lengths)
        _check_mask(mask, q_length, kv_length)
    except (ConfigurationError, UnsupportedError) as error:
        setattr(error, TAKEN, (held, lengths))  # these may be wrong: the ranks then find the right ones together
        raise
    return lengths


def _auto_layout(held: Held, lengths: tuple[int, int], cp: ContextParallel, mask: Mask, again: bool) -> Layout:
    """Return the layout "auto" of a call, after a check, unless it is made again, that its tensors were cut by it."""
    mask = getattr(mask, CUT_BY, mask)
    if again:
        return cp.cuts.of(lengths[0], mask)
    try:
        return cp.cuts.for_call(lengths, mask)
    except ConfigurationError as error:
        setattr(error, TAKEN, (held, lengths))
        raise


def _lengths_in(layout: Layout, held: Held, cp: ContextParallel, mask: Mask) -> tuple[int, int]:
    """Return the lengths of q and kv in a layout that the call gives, after checks that this rank holds its parts."""
    own = cp.cuts.checked(layout).local_lengths[cp.rank]
    if held != (own, own):
        raise ConfigurationError(
            f"layout {layout.name!r} gives rank {cp.rank} {own} of {layout.length} positions, but it holds "
            f"{held.q} tokens of q and {held.kv} of k and v"
        )
    _check_mask(mask, layout.length, layout.length)
    return layout.length, layout.length


def _check_mask(mask: Mask, q_length: int, kv_length: int) -> None:
    if q_length != kv_length and mask.needs_equal_lengths:
        raise UnsupportedError(
            f"mask {mask} numbers one sequence, but q has {q_length} positions and kv {kv_length}: only Full takes both"
            f", or say where q begins among kv, as Causal(q_start=...) does behind a cache"
        )
    mask.check_lengths(q_length, kv_length)


def with_lengths(cp: ContextParallel, call: Callable[[], T]) -> T:
    """Make a call, and once more where ranks found only while they agreed on it how long its sequences are."""
    try:
        return call()
    except OtherLengths as other:
        cp.lengths.learn(other.held, other.lengths)
    return call()


# ---------- tensors


def check_tensor(what: str, x: torch.Tensor) -> None:
    """Raise UnsupportedError for a tensor whose data are not at hand. what: what is done with the tensor."""
    try:
        found = unusable(x)
    except Exception as error:  # of a kind that refuses to be asked
        raise UnsupportedError(f"{what} of a {type(x).__name__} is not supported: {one_line(error)}") from error
    if found is not None:
        raise UnsupportedError(f"{what} of {found}")


def unusable(x: torch.Tensor) -> str | None:
    """Return why a tensor cannot be computed with, and what to do; None: it can be."""
    if type(x) not in PLAIN and (found := _unusable_type(x)) is not None:
        return found
    if x.is_nested:
        return f"a nested tensor is not supported: {PADDED}"
    if x.is_meta:
        return f"a meta tensor is not supported: {NO_DATA}"
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return f"a tensor under vmap is not supported: {NO_TRANSFORMS}make its dimension a part of the batch"
        return f"a tensor under torch.func is not supported: {NO_TRANSFORMS}use torch.autograd"
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        return "a tensor with a tangent is not supported: forward mode is not computed here; use torch.autograd.grad"
    return None


def unsharded(x: torch.Tensor) -> str | None:
    """Return why a tensor cannot even be indexed, for which it needs no data; None: it can be."""
    for each in type(x).__mro__ if type(x) not in PLAIN else ():
        if each.__name__ in ("DTensor", "NestedTensor"):
            return _named(each.__name__)
    return f"a nested tensor is not supported: {PADDED}" if x.is_nested else None


def _unusable_type(x: torch.Tensor) -> str | None:
    """Return why a tensor of its type cannot be computed with; None: it can.

    Types go by their names, so that nothing is imported to compare: whoever has such a tensor has imported its type.
    """
    names = [each.__name__ for each in type(x).__mro__]
    for name in BY_NAME:
        if name in names:
            return _named(name)
    acts_itself = type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if acts_itself and WAITS_BY_ITSELF not in names and not _holds_data(x):
        return f"a {type(x).__name__} is not supported: it stands for other tensors; give a plain one"
    return None


def _named(name: str) -> str:
    return f"a {name} is not supported: {BY_NAME[name]}"


def _holds_data(x: torch.Tensor) -> bool:
    try:
        return x.untyped_storage().data_ptr() != 0
    except RuntimeError:
        return False


# ---------- the order of axes


class Once:
    """A warning that a process hears once, whatever its text; again if it was raised as an error."""

    def __init__(self) -> None:
        self.said = False

    def __call__(self, text: str, stacklevel: int) -> None:
        """Warn, unless this was called before and did not raise."""
        if not self.said:
            warnings.warn(text, TokenRingWarning, stacklevel=stacklevel + 1)
            self.said = True


SWAPPED = Once()


def in_order(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, order: Order | None) -> Inputs:
    """Return q, k and v as [B, T, H, D]: views, where they have another order. Raises ConfigurationError."""
    if order == "bhtd":
        return _swapped(q), _swapped(k), _swapped(v)
    if order is not None and order != "bthd":
        raise ConfigurationError(
            f"order={order!r}: write 'bthd' for q, k and v as [B, T, H, D], or 'bhtd' for [B, H, T, D]"
        )
    return q, k, v


def out_in_order(out: torch.Tensor, order: Order | None) -> torch.Tensor:
    """Return out [B, T, H, D] in the order of the call, a view if that is another."""
    return out.transpose(1, 2) if order == "bhtd" else out


def warn_if_swapped(q: torch.Tensor, k: torch.Tensor, order: Order | None) -> None:
    """Warn, once in a process, where no order was said and the shapes look like another.

    Called by what users call, at its end: where warnings are errors, the ranks are in step, and calls that were refused
    have said so.
    """
    if order is not None or not q.dim() == k.dim() == 4:
        return
    if q.shape[2] >= MANY and k.shape[2] >= MANY and q.shape[1] < q.shape[2]:
        _tell("" if torch.compiler.is_compiling() else f" {list(q.shape)}")  # sizes of a graph may be variables


def _swapped(x: torch.Tensor) -> torch.Tensor:
    """Return x with its axes 1 and 2 swapped; what is no such tensor as it is, for the checks of the call to say."""
    return x.transpose(1, 2) if isinstance(x, torch.Tensor) and x.dim() == 4 else x


def _tell(shape: str) -> None:
    SWAPPED(
        f"q{shape} is read as [B, T, H, D], this rank's tokens before heads, and looks like [B, H, T, D], the order "
        f"of scaled_dot_product_attention: say order='bhtd' if it is that, or order='bthd' if it is not",
        stacklevel=4,
    )


# What torch.compiler.assume_constant_result sets, without its import of the compiler: it runs when a graph is traced.
_tell._dynamo_marked_constant = True  # type: ignore[attr-defined]
