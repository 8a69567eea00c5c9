"""Gradients of a model whose sequences are split over ranks: each rank has a share, which something must join.

Either `add_up_gradients` adds them up, or DDP or FSDP over the same ranks takes their mean. Where they do otherwise
than the model was told, it would train on wrong gradients in silence: `check_joined` finds that out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tokenring.api.context import ContextParallel
from tokenring.api.sharding import add_up
from tokenring.errors import ConfigurationError

GradientReduction = Literal["sum", "mean"]
JOINING = "adding up gradients"


def check_reduction(gradients: object) -> None:
    """Raise ConfigurationError for what is no GradientReduction."""
    if gradients not in ("sum", "mean"):
        raise ConfigurationError(f"gradients={gradients!r}: say 'sum' for add_up_gradients, 'mean' for DDP and FSDP")


def add_up_gradients(model: torch.nn.Module, cp: ContextParallel) -> None:
    """Add up the gradients of all parameters over the ranks of cp, in place; where no DDP or FSDP joins them.

    Call it once, after the last backward pass before a step. FSDP may shard parameters over ranks that have other
    sequences. Raises ConfigurationError where it shards them over ranks of cp: it has joined these gradients then;
    PeerLost for a rank that does not come, within the time limit of cp on CPUs.
    """
    if cp.world_size == 1:
        return
    check_joined(model, cp, "sum")
    given = [each for each in model.parameters() if each.requires_grad]
    if not given:
        return
    there = torch.tensor([each.grad is not None for each in given], dtype=torch.int32, device=given[0].device)
    add_up(there, cp, JOINING)  # experts that saw no token here may have seen some elsewhere
    for each, ranks in zip(given, there.tolist(), strict=True):
        if ranks:
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
            add_up(_local_part(each.grad), cp, JOINING)


def check_joined(
    model: torch.nn.Module, cp: ContextParallel, gradients: GradientReduction, every: Sequence[int] | None = None
) -> None:
    """Raise ConfigurationError where FSDP2, or DDP, does not join the gradients of model as `gradients` says.

    "mean": what FSDP2 shards must lie, or have copies, on all ranks of cp, or on all of `every`, for a trainer that
    wants their mean, and DDP must span these; "sum": no two of those of cp. DDP is seen in its forward pass. Where
    FSDP2 shards some of a model, "mean" wants all of its parameters sharded.
    """
    if cp.world_size == 1:
        return
    wanted = set(dist.get_process_group_ranks(cp.group))
    for how, held in _joining(model):
        if gradients == "mean" and every is not None and not set(every) <= held:
            raise ConfigurationError(
                f"{how} over ranks {sorted(held)}, which are not all of the ranks {sorted(every)}: gradients of the "
                f"others would never be joined. Let the trainer wrap the model, with fsdp=True where it is to shard "
                f"parameters, or shard over all ranks"
            )
        if gradients == "mean" and not wanted <= held:
            raise ConfigurationError(
                f"gradients='mean', and {how} over ranks {sorted(held)}, which are not all of the ranks "
                f"{sorted(wanted)} of cp: their gradients would never be joined. Shard or wrap over both, as "
                f'fully_shard(model, mesh=mesh["dp", "cp"]._flatten("dp_cp")), or say gradients=\'sum\' and call '
                f"add_up_gradients(model, cp) before each step"
            )
        if gradients == "sum" and len(wanted & held) > 1:
            raise ConfigurationError(
                f"gradients='sum', and {how} over ranks {sorted(held)}, which holds ranks of cp "
                f"{sorted(wanted & held)}: it takes the mean of their gradients. Say gradients='mean' when you call "
                f"use_tokenring, and do not call add_up_gradients"
            )
    if gradients == "mean":
        _check_all_sharded(model)


def check_wrapped(model: torch.nn.Module) -> None:
    """Raise ConfigurationError unless DDP or FSDP wraps a model that a trainer trains over several ranks."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    joining = (DistributedDataParallel, *_kinds(fsdp, "FSDPModule", "FullyShardedDataParallel"))
    if not any(isinstance(module, joining) for module in model.modules()):
        raise ConfigurationError(
            f"neither DDP nor FSDP wraps the {type(model).__name__} that trains, so nothing would join its gradients: "
            f"accelerate leaves a model so that evaluate() or predict() had before train(); train first, evaluate by "
            f"another trainer, or say eval_on_start=True"
        )


def _joining(model: torch.nn.Module) -> Iterator[tuple[str, set[int]]]:
    """Yield what joins gradients of a model, and the ranks over which it does."""
    for mesh in _meshes_of_fsdp(model):
        yield "FSDP shards parameters", set(mesh.mesh.flatten().tolist())
    running: Any = getattr(DistributedDataParallel, "_get_active_ddp_module", lambda: None)()  # private
    ddp = model if isinstance(model, DistributedDataParallel) else running
    if ddp is not None and any(each is model for each in ddp.modules()):
        yield "DDP joins gradients", set(dist.get_process_group_ranks(ddp.process_group))


def _check_all_sharded(model: torch.nn.Module) -> None:
    """Raise ConfigurationError for parameters that FSDP2 leaves alone, where it shards others."""
    held = set(_places_in_fsdp(model))
    left = [
        f"{title}.{name}".lstrip(".")
        for title, module in model.named_modules()
        for name, each in module.named_parameters(recurse=False)
        if each.requires_grad and not _is_dtensor(each) and (id(module), name) not in held
    ]
    if held and left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ConfigurationError(
            f"gradients='mean', and FSDP shards a part of the model, which leaves {', '.join(left[:3])}{more} alone: "
            f"nothing would join their gradients. Shard the whole model, too, after its layers: fully_shard(model, "
            f"mesh=...); or freeze these (requires_grad=False)"
        )


def _places_in_fsdp(model: torch.nn.Module) -> Iterator[tuple[int, str]]:
    """Yield what FSDP2 shards where it shards a part of this model: ids of modules, with names of their parameters.

    It says so itself, in private; none where this version of torch says it otherwise.
    """
    fsdp_module = _kinds(sys.modules.get("torch.distributed.fsdp"), "FSDPModule")
    states: dict[int, Any] = {}
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if isinstance(module, fsdp_module) and hasattr(module, "_get_fsdp_state"):
            own = module._get_fsdp_state()
            if id(own) not in states:  # else those of its context are there, too: of what is around the model
                beside = getattr(getattr(own, "_state_ctx", None), "all_states", ())
                states |= {id(each): each for each in (own, *beside)}
    for info in (each for state in states.values() for group in _groups_of(state) for each in _shards_of(group)):
        yield id(info.module), info.param_name
        yield from zip(map(id, info.shared_modules), info.shared_param_names, strict=True)


def _shards_of(group: Any) -> Iterator[Any]:
    """Yield where each parameter of a group stands, as FSDP2 notes it."""
    found = (getattr(each, "_module_info", None) for each in getattr(group, "fsdp_params", ()))
    return (each for each in found if each is not None)


def _groups_of(state: Any) -> list[Any]:
    return getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]


def _meshes_of_fsdp(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the meshes over which FSDP2 joins gradients, each once."""
    fsdp_module = _kinds(sys.modules.get("torch.distributed.fsdp"), "FSDPModule")
    seen: list[Any] = []
    for module in model.modules():
        for mesh in _meshes_of(module) if isinstance(module, fsdp_module) else ():
            if mesh not in seen:
                seen.append(mesh)
                yield mesh


def _meshes_of(module: Any) -> list[Any]:
    """Return the meshes of one module that FSDP2 wraps.

    Its parameters show them, except in its own forward pass, in which they are whole. Its state always does, which is
    private, and has other names in other versions of torch.
    """
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    found = [getattr(getattr(group, "mesh_info", None), "mesh", None) for group in _groups_of(state)]
    return [mesh for mesh in found if mesh is not None] or [
        each.device_mesh for each in module.parameters() if _is_dtensor(each)
    ]


def _is_dtensor(x: torch.Tensor) -> bool:
    return isinstance(x, _kinds(sys.modules.get("torch.distributed.tensor"), "DTensor"))


def _kinds(module: Any, *names: str) -> tuple[type, ...]:
    """Return classes of a module of torch's, without importing it: nothing is of them where nobody has."""
    return tuple(kind for name in names if (kind := getattr(module, name, None)) is not None)


def _local_part(x: Any) -> torch.Tensor:
    """Return the part of x that this rank holds: x itself, unless it is a DTensor."""
    part: torch.Tensor = x.to_local() if _is_dtensor(x) else x
    return part
