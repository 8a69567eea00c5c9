"""Calls of attention as layers of MindSpeed-LLM's and -MM's FSDP2 trainers make them, with gradients in float64.

Every rank makes the whole tensors, cuts them as the trainers do, calls the function that stands where theirs was, and
compares its part of out and of the gradients with attention over the whole.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ascend import operators
from ascend.hccl_ranks import fresh
from ascend.schemas import OFFERS
from gradient_errors import finite
from mindspeed_fsdp2_like import (
    MM,
    build,
    like_llm,
    like_mm,
    packed_part_with_cp,
    part_with_cp,
    ring_part,
    split_lengths,
    ulysses_part,
)
from ranks import Here

import tokenring as tr
from tokenring.integrations.mindspeed_fsdp2 import stop_tokenring, use_tokenring


@dataclass(frozen=True)
class Case:
    """A call. cut: cp_type, or ring × ulysses.

    ends: of documents; the last is that of all tokens. kv: keys of another length.
    """

    cut: str | tuple[int, int]
    tokens: int = 48
    causal: bool = True
    ends: tuple[int, ...] | None = None
    window: int | None = None
    sinks: bool = False
    kv: int | None = None
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (8, 8)
    batch: int = 1
    schedule: str = "auto"
    layout: str = "1NTD"
    each_document: bool = False  # cut by itself, as vision encoders do
    told: bool = True  # the layer says the length of the whole
    total: int | None = None  # another length that it says, as encoders that compute a layer again
    lengths: bool = True  # of documents that are cut by themselves, as Qwen3-VL's encoder gives and others do not
    of_dataset: bool = False  # documents as the dataset packs them, which the model passes on

    @property
    def documents(self) -> tuple[int, ...]:
        """Lengths."""
        return tuple(b - a for a, b in pairwise((0, *(self.ends or (self.tokens,)))))


class Layer(torch.nn.Module):
    """A layer that calls its attention; in training."""

    is_causal = True
    config: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.dtype_of_model = torch.nn.Linear(1, 1)  # MindSpeed-MM asks the first linear layer


def whole(case: Case) -> list[torch.Tensor]:
    """q, k, v, the gradient of out, and sinks, of all ranks."""
    made = torch.Generator().manual_seed(len(str(case)))
    kv = case.kv or case.tokens
    (heads, kv_heads), (dim, value_dim) = case.heads, case.dims
    shapes = [
        (case.tokens, heads, dim),
        (kv, kv_heads, dim),
        (kv, kv_heads, value_dim),
        (case.tokens, heads, value_dim),
    ]
    return [*(torch.randn(case.batch, *each, generator=made) for each in shapes), torch.randn(heads, generator=made)]


def visible(case: Case, before: int | None) -> torch.Tensor:
    """Booleans [q, kv]. before: how many tokens before its own one sees."""
    q, kv = torch.arange(case.tokens)[:, None], torch.arange(case.kv or case.tokens)[None]
    if case.kv is not None:
        return torch.ones(case.tokens, case.kv, dtype=torch.bool)
    seen = (kv <= q) if case.causal else torch.ones_like(kv <= q)
    if before is not None:
        seen = seen & (q - kv <= before)
    of = torch.bucketize(torch.arange(case.tokens), torch.tensor(case.ends or (case.tokens,)), right=True)
    return seen & (of[:, None] == of)


def wanted(case: Case, before: int | None = None) -> list[torch.Tensor]:
    """out, dq, dk, dv and the gradient of sinks in float64, of one process."""
    q, k, v, sinks = (x.double().requires_grad_() for x in (*whole(case)[:3], whole(case)[4]))
    keys, values = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible(case, before), -math.inf)
    if case.sinks:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., : keys.shape[1]], values)
    torch.autograd.backward(out, whole(case)[3].double())
    return [out.detach(), *(x.grad if x.grad is not None else torch.zeros_like(x) for x in (q, k, v, sinks))]


def part(case: Case, x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's tokens of x [B, S, ...], by the stand-ins of what the trainers do."""
    if isinstance(case.cut, str):
        return (ring_part if case.cut == "ring" else ulysses_part)(x, rank, ranks)
    if case.each_document:
        return packed_part_with_cp(x, rank, *case.cut, list(case.documents))
    return part_with_cp(x, rank, *case.cut)


def gradient(x: torch.Tensor) -> torch.Tensor:
    """The gradient that it got."""
    assert x.grad is not None
    return x.grad


def errors(found: list[torch.Tensor], case: Case, rank: int, ranks: int, before: int | None) -> float:
    """The largest relative error of out and the gradients on this rank; of sinks' over all of them."""
    right = wanted(case, before)
    parts = [part(case, x, rank, ranks) for x in right[:4]]
    worst = 0.0
    for mine, its, all_of_it in zip(found[:4], parts, right[:4], strict=True):
        assert mine.shape == its.shape, (mine.shape, its.shape)
        worst = max(worst, finite((mine.double().cpu() - its).norm() / all_of_it.norm()))
    if case.sinks:
        total = found[4].double().cpu()
        dist.all_reduce(total)
        worst = max(worst, finite((total - right[4]).norm() / right[4].norm()))
    return worst


def options(here: Here, case: Case, device: str) -> dict[str, Any]:
    """For `use_tokenring`: a transport that there is already."""
    return {"schedule": case.schedule} | ({"transport": here.base.transport} if device == "cpu" else {})


def group_of(here: Here, device: str) -> Any:
    """The group of all ranks, for tensors of a device; of HCCL made once."""
    if device == "cpu":
        return dist.group.WORLD
    if "hccl" not in here.memory:
        fresh(60.0)
        operators.register(next(iter(OFFERS)))
        here.memory["hccl"] = dist.new_group(backend="hccl")
    return here.memory["hccl"]


def llm_error(here: Here, case: Case, device: str = "cpu") -> float:
    """As a layer of MindSpeed-LLM: its manager has put a function into the model's module."""
    with like_llm(group_of(here, device), str(case.cut)) as model:
        use_tokenring("mindspeed_llm", **options(here, case, device))
        try:
            build("qwen3")
            return llm_layer_error(here, case, device, model)
        finally:
            stop_tokenring()


def llm_layer_error(here: Here, case: Case, device: str, model: Any) -> float:
    """The error of a layer of a model whose module holds its attention."""
    *qkv, dout, sinks = whole(case)
    Layer.config = SimpleNamespace(num_attention_heads=case.heads[0], num_key_value_heads=case.heads[1])
    q, k, v = (part(case, x, here.rank, here.world_size).transpose(1, 2).to(device).requires_grad_() for x in qkv)
    layer, more = Layer(), {}
    layer.sliding_window = case.window  # type: ignore[assignment]
    if case.ends is not None:
        more["actual_seq_len"] = torch.tensor(case.ends)
    if case.sinks:
        layer.sinks = learned = torch.nn.Parameter(sinks.to(device))
    tokens = q.shape[2]
    mask = torch.zeros(case.batch, 1, tokens, tokens) if case.causal else None  # the model's, of its own tokens
    out, weights = model.eager_attention_forward(
        layer, q, k, v, mask, dropout=0.0, scaling=case.dims[0] ** -0.5, sliding_window=case.window,
        is_causal=case.causal, position_ids=torch.arange(tokens)[None], **more,
    )  # fmt: skip
    assert weights is None
    torch.autograd.backward(out, part(case, dout, here.rank, here.world_size).to(device))
    found = [out.detach(), *(gradient(x).transpose(1, 2) for x in (q, k, v))]
    if case.sinks:
        found.append(gradient(learned))
    before = None if case.window is None else case.window - (not case.sinks)
    return errors(found, case, here.rank, here.world_size, before)


def mm_error(here: Here, case: Case, device: str = "cpu") -> float:
    """As a layer of MindSpeed-MM, which looks its attention up in transformers."""
    assert isinstance(case.cut, tuple)
    with like_mm(group_of(here, device), *case.cut) as registry:
        use_tokenring("mindspeed_mm", **options(here, case, device))
        try:
            return mm_layer_error(here, case, device, registry)
        finally:
            stop_tokenring()


def mm_layer_error(here: Here, case: Case, device: str, registry: Any) -> float:
    """The error of a layer that finds its attention in a registry."""
    *qkv, dout, _ = whole(case)
    Layer.config = SimpleNamespace(_attn_implementation="flash_attention_2")
    first = case.layout in ("BSND", "1TND")
    given = [part(case, x, here.rank, here.world_size).to(device) for x in qkv]
    q, k, v = ((x if first else x.transpose(1, 2)).requires_grad_() for x in given)
    more: dict[str, Any] = {"is_causal": case.causal, "input_layout": case.layout}
    if case.told and case.kv is None:
        more["total_seq_len"] = case.total or case.tokens
    ring = int(case.cut[0])
    by_lengths = case.each_document and case.lengths
    if case.of_dataset:
        more["cu_seqlens"] = torch.tensor([(0, *(case.ends or ()))])
    elif case.ends is not None and not (by_lengths and ring > 1):
        more["cu_seq_lens_q"] = more["cu_seq_lens_k"] = torch.tensor((0, *case.ends))
    if by_lengths:
        lengths = split_lengths(list(case.documents), ring)
        more["seq_split_lens"] = lengths if case.ends is not None else lengths[:, 0]
    out, _ = registry["flash_attention_2"](
        Layer(), q, k, v, None, scaling=case.dims[0] ** -0.5, sliding_window=case.window, **more
    )
    torch.autograd.backward(out, part(case, dout, here.rank, here.world_size).to(device))
    found = [out.detach(), *(gradient(x) if first else gradient(x).transpose(1, 2) for x in (q, k, v))]
    return errors(found, case, here.rank, here.world_size, None if case.window is None else case.window - 1)


def npu_errors(here: Here, cases: list[tuple[str, Case]]) -> list[float]:
    """The errors of layers whose tensors are on an emulated NPU."""
    return [(llm_error if kind == "llm" else mm_error)(here, case, "npu") for kind, case in cases]


def refused_by_rank_1(here: Here) -> list[str]:
    """Return what each rank hears where rank 1 asks for what is not supported; afterwards all go on."""
    heard = []
    with like_llm(dist.group.WORLD) as model:
        use_tokenring("mindspeed_llm", transport=here.base.transport, schedule="ring")
        build("qwen3")
        q = torch.randn(1, 2, 24, 8)
        for dropout, whole_mask in ((0.5, False), (0.0, True), (0.0, False)):
            mine = dropout if here.rank == 1 else 0.0
            mask = torch.zeros(1, 1, 48, 48) if whole_mask and here.rank == 1 else None
            try:
                model.eager_attention_forward(Layer(), q, q, q, mask, dropout=mine)
            except tr.TokenRingError as error:
                heard.append(str(error))
        stop_tokenring()
    return heard


# ---------- Wan: whole on every rank

WIDTH, HEADS = 24, 3


def wan_error(here: Here, ring: int, ulysses: int, tokens: int, real: int) -> float:
    """Outputs and gradients of Wan's self-attention with context parallelism, and without in float64."""
    with like_mm(dist.group.WORLD, ring, ulysses):
        kind = sys.modules[f"{MM}.models.wan2_2.modeling_wan2_2"].WanSelfAttention
        torch.manual_seed(3)
        layer = kind(WIDTH, HEADS)
        right = kind(WIDTH, HEADS).double()
        right.load_state_dict(layer.state_dict())
        x, freqs = torch.randn(2, tokens, WIDTH), torch.rand(2, tokens, 1, WIDTH // HEADS)
        seen = torch.sin(torch.arange(2 * real * WIDTH)).view(2, real, WIDTH)
        wanted = _wan_step(right, x.double(), freqs.double(), seen.double(), real)
        use_tokenring("mindspeed_mm", transport=here.base.transport)
        try:
            found = _wan_step(layer, x, freqs, seen, real)
        finally:
            stop_tokenring()
    return max(finite((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def _wan_step(layer: Any, x: torch.Tensor, freqs: torch.Tensor, seen: torch.Tensor, real: int) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x, torch.tensor([real, real]), None, freqs)[:, :real]
    (out * seen).sum().backward()
    parameters = [each for name, each in layer.named_parameters() if name != "k.bias"]
    return [out.detach(), gradient(x), *map(gradient, parameters)]
