"""A torch-native model over ranks by parallelize_module: both passes, FSDP2, heads sharded as DTensors, refusals."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_errors import finite
from ranks import Here, RankPools
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import tokenring as tr
from tokenring.errors import ConfigurationError, TokenRingError, UnsupportedError
from tokenring.integrations.torch_parallel_style import ContextParallelAttention

WIDTH, HEADS, KV_HEADS, LENGTH, VOCABULARY = 32, 4, 2, 48, 40
ENDS = (0, 5, 30, 48)
PLAN = "layers.*.attention"


class Attention(nn.Module):
    """As torch-native models write it: it knows of no ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * WIDTH // HEADS) for _ in range(2))
        self.options: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        given = {"is_causal": True, "enable_gqa": True, **self.options}
        out: torch.Tensor = self.o(F.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        out: torch.Tensor = x + self.mlp(x).tanh()
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).clone()  # type: ignore[no-any-return]  # FSDP warns of views


def make_model() -> Model:
    torch.manual_seed(7)
    return Model()


def make_tokens(rows: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def loss_of(logits: torch.Tensor, labels: torch.Tensor, tokens: int) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens


def in_one_process(rows: int, ends: tuple[int, ...] | None) -> dict[str, torch.Tensor]:
    """Gradients in float64, with the mask written out."""
    model, text = make_model().double(), make_tokens(rows)
    of = torch.zeros(LENGTH, dtype=torch.int64)
    for end in ends or ():
        of[end:] += 1
    seen = (of[:, None] == of) & torch.ones(LENGTH, LENGTH).tril().bool()
    for layer in model.layers:
        layer.attention.options = {"is_causal": False, "attn_mask": seen}  # type: ignore[union-attr]
    torch.autograd.backward(loss_of(model(text[:, :-1], torch.arange(LENGTH)), text[:, 1:], rows * LENGTH))
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def worst(model: nn.Module, wanted: dict[str, torch.Tensor]) -> float:
    errors = []
    for name, x in model.named_parameters():
        grad = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
        want = wanted[name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")]
        assert grad is not None
        errors.append(finite((grad - want).norm() / max(want.norm(), 1e-3)))
    assert len(errors) == len(wanted)
    return max(errors)


def test_a_gradient_that_is_no_number_is_seen() -> None:
    model = make_model()
    wanted = {name: torch.ones_like(x) for name, x in model.named_parameters()}
    for name, x in model.named_parameters():
        x.grad = torch.ones_like(x) * (float("nan") if name.endswith("head.bias") else 1.0)
    assert worst(model, wanted) == float("inf")


# ---------- both passes


def trained(
    here: Here, cp_size: int, change: str, ends: tuple[int, ...] | None, compiled: bool, layout: str = "auto"
) -> float:
    """The largest relative error of a gradient; data parallel × context parallel ranks. change: one of CHANGES."""
    dp = here.world_size // cp_size
    mesh = init_device_mesh("cpu", (dp, cp_size), mesh_dim_names=("dp", "cp"))
    cp = tr.ContextParallel(mesh["cp"], layout=layout)
    mask = tr.Causal() if ends is None else tr.Causal() & tr.Documents(ends)
    style = ContextParallelAttention(cp, mask)
    model: Any = make_model()
    CHANGES[change](model, mesh, style)
    if compiled:
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    first, text = here.rank // cp_size, make_tokens(dp)[here.rank // cp_size :][:1]
    assert first < dp
    part, labels = (tr.shard(x, cp, mask=mask) for x in (text[:, :-1], text[:, 1:]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it compiles what FSDP has wrapped
        torch.autograd.backward(loss_of(model(part, tr.positions(cp, LENGTH, mask=mask)), labels, dp * LENGTH))
    if not isinstance(model, FSDPModule):
        for x in model.parameters():
            torch.distributed.all_reduce(x.grad)
    return worst(model, in_one_process(dp, ends))


def plainly(model: Any, mesh: DeviceMesh, style: ContextParallelAttention) -> None:
    parallelize_module(model, mesh["cp"], {PLAN: style})


def under_fsdp(model: Any, mesh: DeviceMesh, style: ContextParallelAttention) -> None:
    plainly(model, mesh, style)
    flat = mesh._flatten("fsdp")
    for each in (*model.layers, model):
        fully_shard(each, mesh=flat)
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)


def checkpointed(model: Any, mesh: DeviceMesh, style: ContextParallelAttention) -> None:
    plainly(model, mesh, style)
    for at, layer in enumerate(model.layers):
        model.layers[at] = checkpoint_wrapper(layer)


def reentrant(model: Any, mesh: DeviceMesh, style: ContextParallelAttention) -> None:
    plainly(model, mesh, style)
    for layer in model.layers:
        layer.forward = again(layer.forward)


def again(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: checkpoint(forward, x, use_reentrant=True)


CHANGES = {"plain": plainly, "fsdp": under_fsdp, "checkpoint": checkpointed, "reentrant": reentrant}


@pytest.mark.parametrize(("change", "ends", "compiled"), [
    ("fsdp", ENDS, False), ("plain", None, False), ("checkpoint", ENDS, False), ("reentrant", ENDS, False),
    ("fsdp", ENDS, True),
])  # fmt: skip
def test_gradients_are_those_of_one_process(
    change: str, ends: tuple[int, ...] | None, compiled: bool, ranks: RankPools
) -> None:
    ranks_, cp = (4, 2) if change == "fsdp" else (2, 2)
    assert max(ranks(ranks_)(trained, cp, change, ends, compiled)) < 1e-5


def with_sharded_heads(here: Here) -> float:
    """Tensor parallel × context parallel, q, k and v as DTensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    cp = tr.ContextParallel(mesh["cp"], layout="zigzag", tensor_parallel=2)
    style, model = ContextParallelAttention(cp), make_model()
    columns = ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh["cp"], {PLAN: style})
    for layer in model.layers:
        rows = RowwiseParallel(use_local_output=True)
        plan = {"q": columns, "k": columns, "v": columns, "o": rows}
        parallelize_module(layer.attention, mesh["tp"], plan)  # type: ignore[arg-type]
    text = make_tokens(1)
    part, labels = (tr.shard(x, cp) for x in (text[:, :-1], text[:, 1:]))
    torch.autograd.backward(loss_of(model(part, tr.positions(cp, LENGTH)), labels, LENGTH))
    for x in model.parameters():
        assert x.grad is not None
        torch.distributed.all_reduce(x.grad.to_local() if isinstance(x.grad, DTensor) else x.grad, group=cp.group)
    return worst(model, in_one_process(1, None))


def test_heads_as_dtensors(ranks: RankPools) -> None:
    assert max(ranks(4)(with_sharded_heads)) < 1e-5


def with_uneven_rows(here: Here) -> float:
    """Three rows on two ranks, as DTensors; values of another width than keys."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    made = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3, 2, 10, width, generator=made) for width in (8, 8, 6))
    split = [distribute_tensor(x, mesh, [Shard(0)]) for x in (q, k, v)]
    found: Any = alone()(*split, is_causal=True)
    assert found.shape == v.shape and found.to_local().shape[0] == 2 - here.rank
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    return finite((found.full_tensor() - wanted).norm() / wanted.norm())


def test_rows_as_dtensors_of_uneven_parts(ranks: RankPools) -> None:
    assert max(ranks(2)(with_uneven_rows)) < 1e-5


# ---------- refusals


def refused(here: Here, change: str) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    cp, model = tr.ContextParallel(mesh["cp"], layout="auto" if change == "auto" else "zigzag"), make_model()
    plan: dict[str, Any] = {PLAN: ContextParallelAttention(cp)}
    attention: Any = model.layers[0].attention
    try:
        if change == "no call":
            plan = {"layers.*.mlp": plan[PLAN]}
        parallelize_module(model, mesh, plan)
        if change == "mask" and here.rank == 1:
            attention.options = {"is_causal": False, "attn_mask": torch.ones(24, 24).tril().bool()}
        if change == "dropout":
            attention.options = {"dropout_p": 0.1}
        if change == "checkpoint inside":
            called = F.scaled_dot_product_attention
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **more: checkpoint(
                    lambda q, k, v: called(q, k, v, **more), q, k, v, use_reentrant=True))  # fmt: skip
                model(make_tokens(1)[:, :24], torch.arange(24))
        model(make_tokens(1)[:, :24], torch.arange(24))
    except TokenRingError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(("change", "said"), [
    ("mask", "gave scaled_dot_product_attention an attn_mask"), ("dropout", "dropout_p=0.1"),
    ("no call", "made no call of scaled_dot_product_attention"), ("checkpoint inside", "inside of the checkpoint"),
    ("auto", 'layout "auto" follows from a mask, and style.mask is None'),
])  # fmt: skip
def test_what_would_be_wrong_is_refused_on_all_ranks(change: str, said: str, ranks: RankPools) -> None:
    for text in ranks(2)(refused, change):
        assert said in text


def alone(**options: Any) -> Callable[..., torch.Tensor]:
    module = nn.Module()
    module.forward = F.scaled_dot_product_attention
    style = ContextParallelAttention(tr.ContextParallel("self"), **options)
    style._apply(module, None)  # type: ignore[arg-type]
    return module


def on_another_mesh(here: Here) -> str:
    mesh, alone_here = init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "own")), make_model()
    with pytest.raises(ConfigurationError) as caught:
        parallelize_module(alone_here, mesh["own"], {PLAN: ContextParallelAttention(tr.ContextParallel(mesh["cp"]))})
    return str(caught.value)


def test_a_mesh_of_other_ranks_is_refused(ranks: RankPools) -> None:
    assert ranks(2)(on_another_mesh)[1] == (
        "parallelize_module got a mesh of ranks [1], and the ContextParallel has [0, 1]: give "
        "tr.ContextParallel(mesh['cp']) and parallelize_module(model, mesh['cp'], ...) the same"
    )


def test_one_rank_computes_what_torch_does() -> None:
    q, k = torch.randn(1, 4, 10, 8), torch.randn(1, 4, 10, 8)
    for is_causal in (False, True):
        found = alone()(q, k, k, is_causal=is_causal, scale=0.3)
        assert torch.allclose(found, F.scaled_dot_product_attention(q, k, k, is_causal=is_causal, scale=0.3), atol=1e-5)
    apart = alone(mask=tr.Documents([0, 4, 10]))(q, k, k, is_causal=True)
    q, k = q[:, :, 4:], k[:, :, 4:]
    assert torch.allclose(apart[:, :, 4:], F.scaled_dot_product_attention(q, k, k, is_causal=True), atol=1e-5)


def test_keys_of_another_length_and_other_shapes_are_refused() -> None:
    q = torch.randn(1, 4, 10, 8)
    with pytest.raises(UnsupportedError, match="from 10 tokens here to 7"):
        alone()(q, q[:, :, :7], q[:, :, :7])
    with pytest.raises(UnsupportedError, match=r"give scaled_dot_product_attention \[B, H, T, D\]"):
        alone()(q[0], q[0], q[0])


def test_modules_that_attend_otherwise_are_refused() -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    ContextParallelAttention(tr.ContextParallel("self"))._apply(module, None)  # type: ignore[arg-type]
    x = torch.randn(1, 6, 8)
    with pytest.raises(UnsupportedError, match="multi_head_attention_forward is not supported"):
        module(x, x, x, need_weights=False)


@pytest.mark.parametrize("operator", [
    torch.ops.aten.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, torch._scaled_dot_product_attention_math,
])  # fmt: skip
def test_operators_behind_a_call_are_refused_beside_one(operator: Any) -> None:
    module = nn.Module()
    module.forward = lambda q: (F.scaled_dot_product_attention(q, q, q), operator(q, q, q))
    ContextParallelAttention(tr.ContextParallel("self"))._apply(module, None)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"scaled_dot_product.* is not supported: call"):
        module(torch.randn(1, 2, 6, 8))


def test_a_checkpoint_inside_and_a_second_style_are_refused() -> None:
    style = ContextParallelAttention(tr.ContextParallel("self"))
    layer = Layer()
    layer.attention = checkpoint_wrapper(layer.attention)  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="name the modules inside of the checkpoint"):
        style._apply(layer, None)  # type: ignore[arg-type]
    plain = copy.deepcopy(Layer())
    style._apply(plain.attention, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="has a style of tokenring's already"):
        style._apply(plain, None)  # type: ignore[arg-type]


def test_a_copy_of_a_model_calls_its_own_weights() -> None:
    cp = tr.ContextParallel("self", layout="auto")
    style, model, text = ContextParallelAttention(cp, tr.Causal()), make_model(), make_tokens(1)[:, :-1]
    for layer in model.layers:
        style._apply(layer.attention, None)  # type: ignore[arg-type]
    copied = copy.deepcopy(model)
    found = model(text, torch.arange(LENGTH))
    assert torch.equal(copied(text, torch.arange(LENGTH)), found)
    with torch.no_grad():
        for layer in copied.layers:
            for x in layer.attention.parameters():  # type: ignore[union-attr]
                x.zero_()
    plain = make_model()
    for layer in plain.layers:
        layer.attention = nn.Identity()
        layer.attention.forward = torch.zeros_like  # type: ignore[method-assign]
    changed = copied(text, torch.arange(LENGTH))
    assert torch.equal(changed, plain(text, torch.arange(LENGTH))) and not torch.equal(changed, found)
    assert torch.equal(model(text, torch.arange(LENGTH)), found)
    style.mask = tr.Causal() & tr.Documents(ENDS)  # for the copy, too
    assert copied.layers[0].attention._tokenring_style is style  # type: ignore[union-attr]
    assert isinstance(model.layers[0].attention, Attention)


def test_what_stood_in_the_place_of_attention_stands_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as another library's function, after a compiled call."""
    own = F.scaled_dot_product_attention

    def other(*args: Any, **given: Any) -> torch.Tensor:
        return own(*args, **given)

    monkeypatch.setattr(F, "scaled_dot_product_attention", other)
    module, x = Attention(), torch.randn(1, 6, WIDTH)
    ContextParallelAttention(tr.ContextParallel("self"))._apply(module, None)  # type: ignore[arg-type]
    wanted = module(x)
    found = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    assert F.scaled_dot_product_attention is other
    assert torch.allclose(found, wanted, atol=1e-6)
    torch._dynamo.reset()
