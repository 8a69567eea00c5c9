"""Checks for tensors that cannot be computed with here: refused before anything of theirs is looked at."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from tokenring.errors import UnsupportedError, one_line

PLAIN = (torch.Tensor, torch.nn.Parameter)  # by their very type: whatever is derived from them is looked at
NO_PLACEMENT = "it has a placement on a mesh, which says nothing of a layout; give this rank's part, x.to_local()"
PADDED = "pad it to one length, or lay its sequences end to end and give mask=Documents(cu_seqlens)"
NO_DATA = "it has no data; give tensors on the device that is to compute"
NO_TRANSFORMS = "torch.func cannot look into a call of several ranks: "
BY_NAME = {"DTensor": NO_PLACEMENT, "NestedTensor": PADDED, "FakeTensor": NO_DATA}
WAITS_BY_ITSELF = "AsyncCollectiveTensor"  # what functional collectives give, and to_local() may


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
