"""Gradients of ranks that share sequences, beside FSDP2 and DDP: joined once, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Here, RankPools
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tokenring as tr
from tokenring.errors import ConfigurationError
from tokenring.integrations.gradient_joins import GradientReduction, add_up_gradients, check_joined, check_wrapped

DP, CP = 2, 2


def made() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3), torch.nn.Linear(3, 3))


def grid(here: Here) -> tuple[dict[str, DeviceMesh], tr.ContextParallel]:
    if "grid" not in here.memory:
        mesh = init_device_mesh("cpu", (DP, CP), mesh_dim_names=("dp", "cp"))
        meshes = {"dp": mesh["dp"], "cp": mesh["cp"], "dp cp": mesh, "all": init_device_mesh("cpu", (here.world_size,))}
        here.memory["grid"] = meshes, tr.ContextParallel(mesh["cp"])
    found: tuple[dict[str, DeviceMesh], tr.ContextParallel] = here.memory["grid"]
    return found


def sharded(mesh: DeviceMesh | None, *, layers: bool) -> torch.nn.Sequential:
    """The model under FSDP2; layers: each by itself, too."""
    model = made()
    if mesh is not None:
        for layer in model if layers else ():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def loss(model: torch.nn.Module, rank: int) -> torch.Tensor:
    """A rank's share."""
    share: torch.Tensor = model(torch.arange(6.0)[None] + rank).square().sum()
    return share


def joined(here: Here, over: str, gradients: GradientReduction) -> list[torch.Tensor]:
    """Gradients of the loss, whole: the mean over dp of the sum over cp of shares."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meshes, cp = grid(here)
        model = sharded(meshes.get(over), layers=True)
        factor = cp.world_size if gradients == "mean" else 1
        torch.autograd.backward(loss(model, here.rank) * factor)
        if gradients == "sum":
            add_up_gradients(model, cp)
        found: list[Any] = [each.grad for each in model.parameters()]
        return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]


@pytest.mark.parametrize(("over", "gradients"), [("dp", "sum"), ("all", "mean"), ("dp cp", "mean")])
def test_gradients_beside_fsdp_are_those_of_one_process(
    over: str, gradients: GradientReduction, ranks: RankPools
) -> None:
    model = made()
    torch.autograd.backward([loss(model, rank) / DP for rank in range(DP * CP)])
    for found in ranks(DP * CP)(joined, over, gradients):
        for each, parameter in zip(found, model.parameters(), strict=True):
            assert torch.allclose(each, parameter.grad, rtol=1e-5)  # type: ignore[arg-type]


def answer(check: Callable[..., None], *given: Any) -> str:
    """Return what a check refuses, or "fine"."""
    try:
        check(*given)
    except ConfigurationError as error:
        return str(error)
    return "fine"


def told(here: Here, over: str, gradients: GradientReduction, layers: bool, every: Any = None) -> list[str]:
    """What check_joined says of a model before, within and after a forward pass."""
    meshes, cp = grid(here)
    model, said = sharded(meshes.get(over), layers=layers), []

    def ask(*_: Any) -> None:
        said.append(answer(check_joined, model, cp, gradients, every))

    ask()
    model.register_forward_pre_hook(ask)
    torch.autograd.backward(loss(model, here.rank))
    ask()
    return said


@pytest.mark.parametrize("layers", [True, False])
@pytest.mark.parametrize(
    ("over", "gradients", "text"),
    [
        ("", "sum", ""),
        ("", "mean", ""),
        ("dp", "sum", ""),
        ("dp", "mean", "which are not all of the ranks [0, 1] of cp: their gradients would never be joined"),
        ("cp", "mean", ""),
        ("all", "mean", ""),
        ("dp cp", "mean", ""),
        ("cp", "sum", "over ranks [0, 1], which holds ranks of cp [0, 1]: it takes the mean"),
        ("all", "sum", "over ranks [0, 1, 2, 3], which holds ranks of cp [0, 1]: it takes the mean"),
        ("dp cp", "sum", "over ranks [0, 1, 2, 3], which holds ranks of cp [0, 1]: it takes the mean"),
    ],
)
def test_fsdp_that_does_not_join_them_so_is_refused(
    over: str, gradients: GradientReduction, text: str, layers: bool, ranks: RankPools
) -> None:
    for said in ranks(DP * CP)(told, over, gradients, layers)[0]:
        assert text in said if text else said == "fine"


@pytest.mark.parametrize(("over", "fine"), [("", True), ("all", True), ("dp cp", True), ("cp", False), ("dp", False)])
def test_a_trainer_wants_the_mean_of_all_ranks(over: str, fine: bool, ranks: RankPools) -> None:
    """FSDP over cp alone would leave the data-parallel groups with weights of their own."""
    for said in ranks(DP * CP)(told, over, "mean", True, range(DP * CP))[0]:
        assert said == "fine" if fine else "which are not all of the ranks [0, 1, 2, 3]" in said


def told_of_a_part(here: Here, gradients: GradientReduction, change: str) -> list[str]:
    """Return what check_joined says within and after a pass of a model of whose layers FSDP2 shards the first two."""
    meshes, cp = grid(here)
    model, said = made(), []
    if change == "tied":
        model[1], model[2] = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        model[2].weight = model[1].weight  # one parameter of two modules
    outer = torch.nn.Sequential(model)

    def ask(*_: Any) -> None:
        said.append(answer(check_joined, model, cp, gradients))

    model.register_forward_pre_hook(ask)
    if change != "tied":
        for layer in (model[0], model[1]):
            fully_shard(layer, mesh=meshes["all"])
    if change == "frozen":
        model[2].requires_grad_(False)
    if change in ("around", "tied"):
        fully_shard(outer if change == "around" else model, mesh=meshes["all"])
    torch.autograd.backward(loss(outer, here.rank))
    ask()
    return said


PART = "which leaves 2.weight, 2.bias alone: nothing would join their gradients. Shard the whole model, too"


@pytest.mark.parametrize(("gradients", "change", "within"), [
    ("mean", "", PART), ("sum", "", "gradients='sum', and FSDP"), ("mean", "frozen", "fine"),
    ("mean", "around", "fine"), ("mean", "tied", "fine"),
])  # fmt: skip
def test_what_fsdp_leaves_alone_is_refused(
    gradients: GradientReduction, change: str, within: str, ranks: RankPools
) -> None:
    """Within a forward pass sharded parameters are whole; FSDP2 around the model may shard what is left."""
    for said in ranks(DP * CP)(told_of_a_part, gradients, change):
        assert len(said) == 2 and all(within in each for each in said)


def told_in_ddp(here: Here, over: str, gradients: GradientReduction, every: Any = None) -> list[str]:
    """Return what check_joined says of a model in the forward pass of DDP over some ranks, and after it."""
    meshes, cp = grid(here)
    model, said = made(), []

    def ask(*_: Any) -> None:
        said.append(answer(check_joined, model, cp, gradients, every))

    model.register_forward_pre_hook(ask)
    loss(DistributedDataParallel(model, process_group=meshes[over].get_group()), here.rank)
    loss(DistributedDataParallel(torch.nn.Sequential(made())), here.rank)  # of another model
    ask()
    return said


@pytest.mark.parametrize(
    ("over", "gradients", "every", "text"),
    [
        ("all", "mean", None, ""),
        ("cp", "mean", None, ""),
        ("dp", "sum", None, ""),
        ("dp", "mean", None, "'mean', and DDP joins gradients over ranks [0, 2], which are not all of the ranks"),
        ("cp", "sum", None, "'sum', and DDP joins gradients over ranks [0, 1], which holds ranks of cp [0, 1]"),
        ("all", "sum", None, "'sum', and DDP joins gradients over ranks [0, 1, 2, 3]"),
        ("cp", "mean", range(DP * CP), "DDP joins gradients over ranks [0, 1], which are not all of the ranks"),
    ],
)
def test_ddp_that_does_not_join_them_so_is_refused(
    over: str, gradients: GradientReduction, every: Any, text: str, ranks: RankPools
) -> None:
    within, after = ranks(DP * CP)(told_in_ddp, over, gradients, every)[0]
    assert after == "fine" and (text in within if text else within == "fine")


def added_up(here: Here) -> str:
    meshes, cp = grid(here)
    model = sharded(meshes["all"], layers=True)
    torch.autograd.backward(loss(model, here.rank))
    return answer(add_up_gradients, model, cp)


def test_gradients_are_not_joined_twice(ranks: RankPools) -> None:
    assert all("do not call add_up_gradients" in said for said in ranks(DP * CP)(added_up))


def wrapped(here: Here) -> list[str]:
    """Return what check_wrapped says of a model with and without what joins its gradients."""
    meshes, _ = grid(here)
    said = []
    for model in (made(), DistributedDataParallel(made()), sharded(meshes["all"], layers=False)):
        for each in (model, torch.nn.Sequential(model)):  # as torch.compile wraps it once more
            said.append(answer(check_wrapped, each))
    return said


def test_a_model_that_nothing_wraps_is_refused(ranks: RankPools) -> None:
    for alone, alone_again, *joined_ones in ranks(DP * CP)(wrapped):
        assert "neither DDP nor FSDP wraps the Sequential that trains" in alone and "train first" in alone_again
        assert joined_ones == ["fine"] * 4


def test_one_rank_joins_nothing() -> None:
    model = made()
    torch.autograd.backward(loss(model, 0))
    wanted = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    add_up_gradients(model, tr.ContextParallel("self"))
    check_joined(model, tr.ContextParallel("self"), "mean")
    assert all(torch.equal(x.grad, y) for x, y in zip(model.parameters(), wanted, strict=True))  # type: ignore[arg-type]
