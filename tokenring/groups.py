"""What users give as a group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from tokenring.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Group = ProcessGroup | DeviceMesh | Literal["self"] | None  # "self": this rank alone; None: the world

NOT_A_MEMBER = "this rank is not a member of the group; only members make a ContextParallel"


def _check_one_process(environment: Mapping[str, str]) -> None:
    """Raises ConfigurationError where a launcher, such as torchrun, says that this is one process of several."""
    size = environment.get("WORLD_SIZE", "")
    numbered = next((name for name in ("RANK", "LOCAL_RANK") if name in environment), None)
    if size.isdecimal() and int(size) > 1 and numbered is not None:
        raise ConfigurationError(
            f"group=None is the world, and torch.distributed is not initialised: the launcher says that this is one of "
            f"{size} processes (WORLD_SIZE={size}, {numbered}={environment[numbered]}), and each would compute the "
            f"whole alone. Call torch.distributed.init_process_group(...) first, or give group='self' if that is meant"
        )


def process_group(group: Group) -> ProcessGroup | None:
    """What a user gives as a group, as the group itself; None where there is one process only."""
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
    if isinstance(group, int) and not isinstance(group, bool):  # dist.GroupMember.NON_GROUP_MEMBER
        raise ConfigurationError(NOT_A_MEMBER)
    if not hasattr(group, "get_group"):
        raise ConfigurationError(
            f"group is of type {type(group).__name__}; give a ProcessGroup, a one-dimensional DeviceMesh or None"
        )
    if group.ndim != 1:
        raise ConfigurationError(
            f"a DeviceMesh of {group.ndim} dimensions was given; name the one for context parallelism, as mesh['cp']"
        )
    if group.get_coordinate() is None:
        raise ConfigurationError(NOT_A_MEMBER)
    return group.get_group()
