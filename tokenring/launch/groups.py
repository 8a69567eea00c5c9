"""Process groups as users give them, and as tokenring holds them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast
from weakref import ref

import torch.distributed as dist

from tokenring.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Group = ProcessGroup | DeviceMesh | Literal["self"] | None  # "self": this rank alone; None: the world
    Held: TypeAlias = "ProcessGroup | HeldGroup"

NOT_A_MEMBER = "this rank is not a member of the group; only members make a context of it"

DESTROYED = (
    "the group of this context was destroyed: make a new ContextParallel or TensorParallel, of a group that is there"
)


class HeldGroup:
    """A process group that torch can destroy: what holds this keeps no group alive.

    With the last reference to a group go its threads, which torch waits for. Threads of a group that is kept free their
    last tensors while the interpreter ends, need it for that, and abort the process. So nothing of ours has a group
    itself: no object, and no frame, which an error that somebody keeps would hold. Raises ConfigurationError for one
    that is destroyed.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._ref = ref(group)
        del group
        self.rank, self.world_size = dist.get_rank(self()), dist.get_world_size(self())

    @property
    def lives(self) -> bool:
        """True if torch.distributed still has it; somebody else may hold what it has destroyed."""
        return self._ref() in dist.distributed_c10d._world.pg_map

    def check(self) -> None:
        """Raise ConfigurationError once the group is destroyed."""
        if not self.lives:
            raise ConfigurationError(DESTROYED)

    def __call__(self) -> ProcessGroup:
        """Return the group itself, for a call of torch and not to be kept. Raises ConfigurationError."""
        self.check()
        return cast("ProcessGroup", self._ref())

    def store(self) -> Any:
        """Return the group's store. Raises ConfigurationError."""
        return dist.distributed_c10d._get_process_group_store(self())

    def global_ranks(self) -> list[int]:
        """Return the rank in the world of each of its ranks. Raises ConfigurationError."""
        return dist.get_process_group_ranks(self())

    def holds(self, group: object) -> bool:
        """Return whether it is this group, which may be destroyed."""
        return self._ref() is group

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeldGroup) and self._ref == other._ref

    def __hash__(self) -> int:
        return hash(self._ref)


def held(group: Held) -> HeldGroup:
    """Return the group held so that torch can destroy it."""
    return group if isinstance(group, HeldGroup) else HeldGroup(group)


def hold(group: Group | HeldGroup) -> HeldGroup | None:
    """Return the group that a user gives, held so that torch can destroy it; None for a single process."""
    if isinstance(group, HeldGroup):
        return group
    found = process_group(group)
    return None if found is None else HeldGroup(found)


def _check_one_process(environment: Mapping[str, str]) -> None:
    """Raise ConfigurationError if a launcher, such as torchrun, says that this is one process of several."""
    size = environment.get("WORLD_SIZE", "")
    numbered = next((name for name in ("RANK", "LOCAL_RANK") if name in environment), None)
    if size.isdecimal() and int(size) > 1 and numbered is not None:
        raise ConfigurationError(
            f"group=None is the world, and torch.distributed is not initialised: the launcher says that this is one of "
            f"{size} processes (WORLD_SIZE={size}, {numbered}={environment[numbered]}), and each would compute the "
            f"whole alone. Call torch.distributed.init_process_group(...) first, or give group='self' if that is meant"
        )


def newer_collective(name: str) -> Callable[..., Any]:
    """Return torch's collective of one tensor by its name since 2.13, else by the one that it had before."""
    older = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}[name]
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, older)
    return found


def process_group(group: Group) -> ProcessGroup | None:
    """Return the process group that a user means; None for a single process.

    Raises ConfigurationError for what is no group, for a mesh of several dimensions, and on a rank that is no
    member.
    """
    if isinstance(group, str):
        if group != "self":
            raise ConfigurationError(f"group is {group!r}; of names there is 'self' only, for this rank alone")
        return None
    if group is None:
        if dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        _check_one_process(os.environ)
        return None
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigurationError(NOT_A_MEMBER)
    if not hasattr(group, "get_group"):
        raise ConfigurationError(
            f"group is of type {type(group).__name__}; give a ProcessGroup, a one-dimensional DeviceMesh or None"
        )
    if group.ndim != 1:
        raise ConfigurationError(
            f"a DeviceMesh of {group.ndim} dimensions was given; name one of them, as mesh['cp']"
        )
    if group.get_coordinate() is None:
        raise ConfigurationError(NOT_A_MEMBER)
    return group.get_group()
