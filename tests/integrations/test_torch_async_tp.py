"""torch.compile's tensor parallel layers by our schedules: bytes on the wire, gradients, and what is refused."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import relative_error
from ranks import Here, RankPools
from sampling import FULL_GRID

import tokenring as tr
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations import torch_async_tp
from tokenring.integrations.torch_async_tp import async_tensor_parallel

WIDTH, FEATURES, TOKENS = 16, 32, 8  # tokens of a rank
CALL_SECONDS = 110.0  # with the import of the compiler
KNOWN = str(torch.__version__).startswith(tuple(f"{each}." for each in torch_async_tp.KNOWN))
pytestmark = pytest.mark.skipif(not KNOWN, reason="torch's pass is known for other releases")


class FeedForward(torch.nn.Module):
    """As torchtitan's, or without its gate w3."""

    def __init__(self, is_gated: bool) -> None:
        super().__init__()
        self.w1 = torch.nn.Linear(WIDTH, FEATURES, bias=False)
        self.w2 = torch.nn.Linear(FEATURES, WIDTH, bias=False)
        self.w3 = torch.nn.Linear(WIDTH, FEATURES, bias=False) if is_gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.silu(self.w1(x))
        made: torch.Tensor = self.w2(hidden if self.w3 is None else hidden * self.w3(x))
        return made


class Block(torch.nn.Module):
    def __init__(self, is_gated: bool) -> None:
        super().__init__()
        self.feed_forward = FeedForward(is_gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.feed_forward(x)
        return made


def parallelized(model: torch.nn.Module, mesh: Any) -> None:
    """Cut a model as torchtitan cuts its feed-forward layers, with sequence parallelism."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        "feed_forward": gathered, "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    if model.feed_forward.w3 is not None:  # type: ignore[union-attr]
        plan["feed_forward.w3"] = ColwiseParallel()
    parallelize_module(model, mesh, plan)


def passes_alone(graph: Any, inputs: Any) -> Any:
    """Compile as inductor does, up to the passes over both graphs; these are run as they are: no C++ compiler."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.virtualized import V

    def inner(graph: Any, inputs: Any, **options: Any) -> Any:
        post_grad.view_to_reshape(graph)  # type: ignore[no-untyped-call]
        with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
            post_grad.post_grad_passes(graph, is_inference=False)
        return make_boxed_func(graph.forward)

    return compile_fx(graph, inputs, inner_compile=inner)


def step(call: Any, model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The result and all gradients of this rank, whole weights'."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = call(x)
    y.square().sum().backward()
    assert x.grad is not None
    whole: Any = [each.grad for each in model.parameters()]
    return [y.detach(), x.grad, *(each.full_tensor() if hasattr(each, "full_tensor") else each for each in whole)]


def trained(here: Here, folder: str, is_gated: bool, inductor: bool) -> tuple[list[float], dict[str, int]]:
    """Errors of a compiled block against float64, and bytes that went by our schedules: inside, and outside."""
    from torch.distributed.device_mesh import DeviceMesh

    os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=folder)
    ranks = here.world_size
    torch.manual_seed(0)
    model, x = Block(is_gated), torch.randn(2, TOKENS * ranks, WIDTH)
    reference = Block(is_gated).double()
    reference.load_state_dict(model.state_dict())
    wanted = step(reference, reference, x.double())
    group = dist.group.WORLD
    assert group is not None and here.base.transport is not None
    parallelized(model, DeviceMesh.from_group(group, "cpu"))
    counter, sent = here.base.transport.sent_bytes, {}
    own = x.chunk(ranks, 1)[here.rank].contiguous()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of its own parts
        torch._dynamo.reset()
        with tr.TensorParallel(transport=here.base.transport) as tp, torch._inductor.config.patch(compile_threads=1):
            call = torch.compile(model, backend="inductor" if inductor else passes_alone, fullgraph=True)
            counter.clear()
            with async_tensor_parallel(tp):
                made = step(call, model, own)
                sent["inside"] = sum(counter.values())
            counter.clear()
            again = step(call, model, own)
            sent["outside"] = sum(counter.values())
        torch._dynamo.reset()
    parts = [each.chunk(ranks, 1)[here.rank] for each in wanted[:2]] + wanted[2:]
    return [relative_error(a, b) for some in (made, again) for a, b in zip(some, parts, strict=True)], sent


def check_trained(found: list[tuple[list[float], dict[str, int]]], ranks: int, is_gated: bool) -> None:
    """Each pass gathers one shard of every other rank, and brings one part home to each.

    With a gate dx is the sum of two products, which torch's own reduce-scatter takes home.
    """
    shard = 2 * TOKENS * WIDTH * 4
    for errors, sent in found:
        assert max(errors) <= 1e-5
        assert sent == {"inside": (3 if is_gated else 4) * (ranks - 1) * shard, "outside": 0}


@pytest.mark.parametrize("is_gated", (False, True), ids=("plain", "gated"))
def test_a_compiled_mlp_runs_our_schedules(ranks: RankPools, tmp_path: Path, is_gated: bool) -> None:
    check_trained(ranks(2).within(CALL_SECONDS, trained, str(tmp_path), is_gated, False), 2, is_gated)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor wants a C++ compiler")
@pytest.mark.skipif(not FULL_GRID, reason="takes half a minute: TOKENRING_FULL_GRID=1")
def test_a_compiled_mlp_with_inductor(ranks: RankPools, tmp_path: Path) -> None:
    check_trained(ranks(2).within(280.0, trained, str(tmp_path), True, True), 2, True)


def behind(here: Here, folder: str) -> tuple[float, int]:
    """The error of a product whose weight is made behind the all-gather in the graph, and the bytes that we sent."""
    from torch.distributed._functional_collectives import all_gather_tensor

    os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=folder)
    group, transport = dist.group.WORLD, here.base.transport
    assert group is not None and transport is not None
    torch.manual_seed(0)
    x, w = torch.randn(TOKENS * here.world_size, WIDTH), torch.randn(WIDTH, FEATURES)

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        whole = all_gather_tensor(x, 0, group)
        made: torch.Tensor = whole @ torch.relu(w).mul(2.0)
        return made

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # what torch says of its own parts
        torch._dynamo.reset()
        with tr.TensorParallel(transport=transport) as tp, async_tensor_parallel(tp):
            transport.sent_bytes.clear()
            made = torch.compile(layer, backend=passes_alone, fullgraph=True)(x.chunk(here.world_size)[here.rank], w)
            sent = sum(transport.sent_bytes.values())
        torch._dynamo.reset()
    return relative_error(made, x.double() @ torch.relu(w).double().mul(2.0)), sent


def test_what_a_product_needs_may_come_behind_the_rows(ranks: RankPools, tmp_path: Path) -> None:
    for error, sent in ranks(2).within(CALL_SECONDS, behind, str(tmp_path)):
        assert error <= 1e-6 and sent == TOKENS * WIDTH * 4


# ---------- the operators


def operators(here: Here, dtype: torch.dtype) -> list[float]:
    """Errors of both operators against torch's own collectives, each way to call them."""
    group = dist.group.WORLD
    assert group is not None
    name, random = group.group_name, torch.Generator().manual_seed(here.rank)
    errors: list[float] = []

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    symm = torch.ops.symm_mem
    options: dict[str, Any] = {"transport": here.base.transport}
    with tr.TensorParallel(partials=torch.float32, **options) as tp:
        for dim, shape in ((0, (6, 8)), (0, (6, 3, 8)), (1, (3, 6, 8))):
            for weights in ([drawn(8, 5)], [drawn(5, 8).t(), drawn(8, 3)]):
                for keep in (True, False):
                    x = drawn(*shape)
                    with async_tensor_parallel(tp):
                        made = symm.fused_all_gather_matmul(x, weights, dim, name, return_A=keep)
                    plain = symm.fused_all_gather_matmul(x, weights, dim, name, return_A=keep)
                    assert (made[0] is None) == (not keep)
                    pairs = [*zip(made[1], plain[1], strict=True), *([(made[0], plain[0])] if keep else [])]
                    assert all(a.stride() == b.stride() for a, b in pairs)
                    errors += [relative_error(a, b.double()) for a, b in pairs]
            c = drawn(*(each * here.world_size if at == dim else each for at, each in enumerate(shape)))
            for how in ("sum", "avg"):
                weight = drawn(7, 8).t()
                with async_tensor_parallel(tp):
                    mine = symm.fused_matmul_reduce_scatter(c, weight, how, dim, name)
                theirs = symm.fused_matmul_reduce_scatter(c.double(), weight.double(), how, dim, name)
                assert mine.stride() == theirs.stride() and mine.dtype == dtype
                errors.append(relative_error(mine, theirs))
    return errors


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=("fp32", "bf16"))
@pytest.mark.parametrize("world", (2, 3))
def test_operators_give_what_collectives_do(ranks: RankPools, world: int, dtype: torch.dtype, limit: float) -> None:
    for found in ranks(world).within(CALL_SECONDS, operators, dtype):
        assert max(found) <= limit


def refusals(here: Here) -> list[str]:
    """What is said of contexts that do not fit, on this rank."""
    options: dict[str, Any] = {"transport": here.base.transport}
    said = []
    with (
        tr.TensorParallel(**options) as tp,
        tr.TensorParallel(stays="tokens", **options) as tokens,
        tr.TensorParallel(schedule="ring", **options) as ring,
    ):
        for given in ((tp, tp), (tokens,)):
            with pytest.raises(ConfigurationError) as raised, async_tensor_parallel(*given):
                pass
            said.append(str(raised.value))
        with async_tensor_parallel(tp), pytest.raises(ConfigurationError) as raised, async_tensor_parallel(tp):
            pass
        said.append(str(raised.value))
        group = dist.group.WORLD
        assert group is not None
        with async_tensor_parallel(ring), pytest.raises(ConfigurationError) as raised:
            torch.ops.symm_mem.fused_all_gather_matmul(torch.ones(4, 4), [torch.ones(4, 4)], 0, group.group_name)
        said.append(str(raised.value))
        rows = 4 + here.rank
        with async_tensor_parallel(tp), pytest.raises(ConfigurationError) as raised:
            torch.ops.symm_mem.fused_all_gather_matmul(torch.ones(rows, 4), [torch.ones(4, 4)], 0, group.group_name)
        said.append(str(raised.value))
    return said


def test_contexts_that_do_not_fit_are_refused(ranks: RankPools) -> None:
    for two, tokens, again, ring, differs in ranks(2).within(CALL_SECONDS, refusals):
        assert "one for each group" in two and "one for each group" in again
        assert "lets tokens stay" in tokens
        assert "'ring' leaves" in ring and "direct-q" in ring
        assert "x: rank 0: [4, 4]; rank 1: [5, 4]" in differs


@pytest.mark.parametrize("version", ("2.6.0", "2.12.1+cpu", "2.14.0"))
def test_other_releases_of_torch_are_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", version)
        with pytest.raises(UnsupportedError, match=f"torch {version.split('+')[0]}.*use torch 2.13"):
            torch_async_tp._pass()
    assert torch_async_tp._pass()


def test_nothing_and_one_rank_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="was given nothing"), async_tensor_parallel():
        pass
    alone = pytest.raises(ConfigurationError, match="has one rank")
    with tr.TensorParallel("self") as tp, alone, async_tensor_parallel(tp):
        pass


def test_kernels_of_others_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_async_tp, "_libraries", [])
    monkeypatch.setattr(torch_async_tp, "DEVICES", ("Meta",))
    with pytest.raises(UnsupportedError, match="has a kernel for Meta"):
        torch_async_tp._register()
