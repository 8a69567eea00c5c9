"""Groups of ranks that hold a sequence together, as each version of Megatron-core gives them.

0.12 has groups in parallel_state only; 0.13 and 0.14 hand layers a `model_comm_pgs`, later ones a `pg_collection`.
A call may bring a group of its own (hybrid context parallelism). A group that is missing is an error: None would
mean the world, which under tensor parallelism gives wrong results without an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from tokenring.errors import ConfigurationError
from tokenring.launch.groups import held

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tokenring.launch.groups import HeldGroup

    LayerGroup = ProcessGroup | Literal["self"]
    KeptGroup = HeldGroup | Literal["self"]

SELF: Literal["self"] = "self"  # this rank alone


def kept(group: LayerGroup | KeptGroup) -> KeptGroup:
    """Return the group of a layer as what outlives calls may hold it: so that torch can destroy it."""
    return group if isinstance(group, str) else held(group)


def group_of_layer(config: Any, pg_collection: Any, model_comm_pgs: Any) -> LayerGroup:
    """Return the context-parallel group of a layer. Raises ConfigurationError if none of the configured size exists."""
    wanted: int = config.context_parallel_size
    if wanted == 1:  # also where another part of the model has a group
        return SELF
    collection = model_comm_pgs if pg_collection is None else pg_collection
    group: ProcessGroup | None
    if collection is None:
        group, place = _of_parallel_state(), "parallel_state"
        remedy = f"call initialize_model_parallel(context_parallel_size={wanted}) before the model is made"
    else:
        group, place = getattr(collection, "cp", None), f"{type(collection).__name__}.cp"
        remedy = f"give the model a {type(collection).__name__} whose cp is the context-parallel group"
    if group is None:
        raise ConfigurationError(f"context_parallel_size is {wanted}, but {place} has no group for it: {remedy}")
    found = dist.get_world_size(group)
    if found != wanted:
        raise ConfigurationError(
            f"context_parallel_size is {wanted}, but the group of {place} has {found} ranks: make them agree"
        )
    return group


def tensor_group_of_layer(config: Any, given: ProcessGroup | None) -> LayerGroup:
    """Return the tensor-parallel group of a layer: `given`, as 0.14 and later hand it over, or parallel_state's.

    Raises ConfigurationError if there is none of the configured size.
    """
    wanted: int = config.tensor_model_parallel_size
    if wanted == 1:
        return SELF
    if given is None:
        from megatron.core import parallel_state

        given = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if given is None or dist.get_world_size(given) != wanted:
        found = "there is no group for it" if given is None else f"its group has {dist.get_world_size(given)} ranks"
        raise ConfigurationError(
            f"tensor_model_parallel_size is {wanted}, but {found}: call initialize_model_parallel("
            f"tensor_model_parallel_size={wanted}) before the model is made, or hand over a group of that size"
        )
    return given


def group_of_call(own: LayerGroup | KeptGroup, packed_seq_params: Any) -> LayerGroup | KeptGroup:
    """Return the group that a call brings in its packed_seq_params, else the layer's own.

    Raises ConfigurationError if local_cp_size is larger than 1 and cp_group is None.
    """
    group: ProcessGroup | None = getattr(packed_seq_params, "cp_group", None)
    if group is not None:
        return SELF if dist.get_world_size(group) == 1 else group
    size = getattr(packed_seq_params, "local_cp_size", None)
    if size is None:
        return own
    if size == 1:
        return SELF
    raise ConfigurationError(
        f"packed_seq_params.local_cp_size is {size}, but its cp_group is None: give the group of these ranks there"
    )


def _of_parallel_state() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group(check_initialized=False)
