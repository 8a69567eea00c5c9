"""npu_fusion_attention and its relatives on the emulated NPU, with the signatures of a chosen wheel.

`register("2.9.1")` makes torch.ops.npu hold what that wheel holds, and nothing else. Every call is noted in `calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ascend import device, golden, layouts, refusals, updates
from ascend.device import NpuTensor, wrap
from ascend.schemas import OFFERS
from ascend.sparse import Band, check_mask, hidden_pairs, mode_of_sequence, treats_empty_rows


class Called(NamedTuple):
    """One call: the operator, and the arguments that were not left at their defaults."""

    name: str
    arguments: dict[str, Any]


calls: list[Called] = []
_registered: list[torch.library.Library] = []
_offer: list[str] = []  # what is registered now
_names: list[str] = []  # of its operators
lacking: set[str] = set()  # aclnn kernels that the CANN beneath lacks: refusals.check_kernels
Given = dict[str, Any]


def register(offer: str) -> None:
    """The operators of a wheel or a branch (schemas.OFFERS), in place of those that were there."""
    calls.clear()
    if _offer == [offer]:
        return
    _offer[:] = [offer]
    while _registered:
        _registered.pop()._destroy()  # type: ignore[no-untyped-call]
    for name in _names:
        del device.operators[name]
    _names[:] = [f"npu::{name}" for name in OFFERS[offer]]
    library = torch.library.Library("npu", "DEF")  # type: ignore[no-untyped-call]
    _registered.append(library)
    for name, text in OFFERS[offer].items():
        library.define(text)  # type: ignore[no-untyped-call]
        library.impl(name, _on_cpu, "CPU")  # type: ignore[no-untyped-call]
        schema = torch._C.parse_schema(f"npu::{text}")
        device.operators[f"npu::{name}"] = _noted(name, schema)


def fresh(offer: str) -> None:
    """The same registered anew, so that nothing is known of them any more."""
    register(next(each for each in OFFERS if each != offer))
    register(offer)


def _on_cpu(*args: Any, **_: Any) -> Any:
    refusals.check_device([args[0][0] if isinstance(args[0], list) else args[0]])


def _noted(name: str, schema: Any) -> Callable[..., Any]:
    """The operator on NPU tensors."""
    compute = on_cpu_tensors(schema)

    def call(*args: Any, **kwargs: Any) -> Any:
        passed = by_name(schema, args, kwargs)
        calls.append(Called(name, passed))
        tensors = [x for value in passed.values() for x in (value if isinstance(value, list) else [value])]
        tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
        refusals.check_device(tensors)
        made = compute(**{each: _inner(value) for each, value in passed.items()})
        return tuple(wrap(x, tensors[0]._index) if isinstance(x, torch.Tensor) else x for x in made)

    return call


def on_cpu_tensors(schema: Any) -> Callable[..., tuple[Any, ...]]:
    """What computes the operator of this schema, given CPU tensors in the way of the dispatcher."""
    compute = IMPLEMENTED[schema.name.removeprefix("npu::")]

    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = {each.name: each.default_value for each in schema.arguments} | by_name(schema, args, kwargs)
        return tuple(compute(_first_spelling(given)))

    return call


def by_name(schema: Any, args: tuple[Any, ...], kwargs: Given) -> Given:
    """The arguments of a call by name."""
    return dict(zip([each.name for each in schema.arguments], args, strict=False)) | kwargs


def _inner(value: Any) -> Any:
    """The CPU memory of NPU tensors; everything else as it is."""
    if isinstance(value, list):
        return [_inner(each) for each in value]
    return value._raw if isinstance(value, NpuTensor) else value


def _first_spelling(given: Given) -> Given:
    """The names of the first version's forward."""
    others = {"pre_tokens": "pre_tockens", "next_tokens": "next_tockens", "scale_value": "scale"}
    return {others.get(name, name): value for name, value in given.items()}


def _band(given: Given) -> Band:
    prefix = given["prefix"]
    return Band(
        given["sparse_mode"], given["pre_tockens"], given["next_tockens"], given["inner_precise"],
        None if prefix is None else tuple(prefix),
    )  # fmt: skip


# ---------- padded layouts


class Padded(NamedTuple):
    """[B, N, S, D] operands on the CPU, and what of the scores is hidden."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    hidden: torch.Tensor | None
    treat: bool


def _padded(given: Given) -> Padded:
    layout, heads = given["input_layout"], given["head_num"]
    refusals.refuse(heads <= 0, f"head_num must be greater than 0, got {heads}")
    fewer = layouts.kv_heads(given["key"], layout, given["query"], heads)
    q = layouts.heads_first(given["query"], layout, heads)
    k, v = (layouts.heads_first(given[name], layout, fewer) for name in ("key", "value"))
    refusals.check_heads(q, k, v, heads)
    if given["atten_mask"] is None:  # then everything is visible, whatever the sparse mode says
        return Padded(q, k, v, None, False)
    band, mask = _band(given), given["atten_mask"]
    batch, rows, cols = q.shape[0], q.shape[2], k.shape[2]
    check_mask(mask, band.mode, [(batch, heads, rows, cols), (batch, 1, rows, cols), (1, 1, rows, cols), (rows, cols)])
    if band.prefix is not None:
        refusals.refuse(len(band.prefix) != batch, f"{len(band.prefix)} prefixes for a batch of {batch}")
        each = [hidden_pairs(band, mask, rows, cols, band.mode, number) for number in range(batch)]
        hidden = torch.stack(each)[:, None]
    else:
        hidden = hidden_pairs(band, mask, rows, cols, band.mode)
    return Padded(q, k, v, hidden, treats_empty_rows(band, band.mode, rows, cols))


def _forward(given: Given) -> tuple[Any, ...]:
    refusals.check_operands(given)
    refusals.check_modes(given)
    refusals.check_kernels(given, "aclnnFlashAttentionVarLenScoreV4", lacking)
    if given["input_layout"] == "TND":
        out, largest, total = _packed_forward(given)
    else:
        held = _padded(given)
        made = golden.forward(held.q, held.k, held.v, held.hidden, given["scale"], held.treat)
        out = layouts.in_layout(made.out.to(held.q.dtype), given["input_layout"])
        largest, total = layouts.copies(made.largest), layouts.copies(made.total)
    return out, largest, total, torch.empty(0), 0, 0, 0


def _gradients(given: Given) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    refusals.check_operands(given)
    refusals.check_modes(given)
    refusals.check_kernels(given, "aclnnFlashAttentionUnpaddingScoreGradV4", lacking)
    layout, q = given["input_layout"], given["query"]
    if layout == "TND":
        refusals.check_statistics(given, (q.shape[0], given["head_num"]))
        return _packed_gradients(given)
    held = _padded(given)
    refusals.check_statistics(given, (held.q.shape[0], given["head_num"], held.q.shape[2]))
    dy, out = (layouts.heads_first(given[name], layout, given["head_num"]) for name in ("dy", "attention_in"))
    statistics = (given["softmax_max"][..., 0], given["softmax_sum"][..., 0])
    made = golden.backward(dy, held.q, held.k, held.v, out, statistics, held.hidden, given["scale"])
    dq, dk, dv = (layouts.in_layout(x.to(held.q.dtype), layout) for x in made)
    return dq, dk, dv


def _backward(count: int) -> Callable[[Given], tuple[Any, ...]]:
    """The gradient with so many results: dq, dk, dv, and empty ones for what was not given."""

    def compute(given: Given) -> tuple[Any, ...]:
        returned = count if "sink" in given else count - 1
        return (*_gradients(given), *(torch.empty(0) for _ in range(returned - 3)))

    return compute


# ---------- packed sequences


class Document(NamedTuple):
    """One packed sequence: its rows of q and of k, what is hidden, and whether empty rows are found."""

    q: slice
    kv: slice
    hidden: torch.Tensor | None


def _sequences(given: Given) -> list[Document]:
    q_lengths = refusals.lengths_of(given["actual_seq_qlen"], given["query"].shape[0], "actual_seq_qlen")
    kv_lengths = refusals.lengths_of(given["actual_seq_kvlen"], given["key"].shape[0], "actual_seq_kvlen")
    lengths = list(zip(q_lengths, kv_lengths, strict=True))
    for q, kv in lengths:
        refusals.refuse(bool(q) and not kv, f"a sequence of {q} queries and no keys is not supported")
    return [
        Document(q, kv, _hidden_in_sequence(given, lengths, number))
        for number, (q, kv) in enumerate(zip(_slices(q_lengths), _slices(kv_lengths), strict=True))
    ]


def _slices(lengths: Sequence[int]) -> list[slice]:
    ends = list(accumulate(lengths))
    return [slice(end - length, end) for length, end in zip(lengths, ends, strict=True)]


def _hidden_in_sequence(given: Given, lengths: list[tuple[int, int]], number: int) -> torch.Tensor | None:
    rows, cols = lengths[number]
    if given["atten_mask"] is None or rows == 0 or cols == 0:
        return None
    band, mask = _band(given), given["atten_mask"]
    check_mask(mask, band.mode, [(max(q for q, _ in lengths), max(kv for _, kv in lengths))])
    mode = mode_of_sequence(band.mode, number, lengths)
    refusals.refuse(mode == 3 and rows > cols, f"mode {band.mode} in TND: a sequence of {rows} queries, {cols} keys")
    hidden = hidden_pairs(band, mask[:rows, :cols] if band.mode in (0, 1) else mask, rows, cols, mode, number)
    refusals.refuse(bool(hidden.all(dim=-1).any()), "TND: a row of a sequence sees no key")
    return hidden


def _check_packed(given: Given) -> None:
    q, k, v = (given[name].transpose(0, 1)[None] for name in ("query", "key", "value"))
    refusals.check_heads(q, k, v, given["head_num"])


def _part(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """[1, N, S_i, D]"""
    return x[rows].transpose(0, 1)[None]


def _packed_forward(given: Given) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of skipped sequences come back poisoned: nobody may rely on them."""
    _check_packed(given)
    q, k, v = given["query"], given["key"], given["value"]
    out = torch.full((*q.shape[:2], v.shape[2]), float("nan"), dtype=torch.float64)
    largest, total = [], []
    for each in _sequences(given):
        empty = torch.empty(1, q.shape[1], 0, v.shape[2])
        made = golden.Forward(empty, empty[..., 0], empty[..., 0])
        if each.q.stop > each.q.start:
            parts = (_part(q, each.q), _part(k, each.kv), _part(v, each.kv))
            made = golden.forward(*parts, each.hidden, given["scale"], False)
            out[each.q] = made.out[0].transpose(0, 1)
        largest.append(made.largest[0])
        total.append(made.total[0])
    layout = given.get("softmax_layout", "")
    packed = (layouts.pack_statistics(x, q.shape[0], layout) for x in (largest, total))
    return out.to(q.dtype), *packed  # type: ignore[return-value]


def _packed_gradients(given: Given) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_packed(given)
    q, k, v, layout = given["query"], given["key"], given["value"], given.get("softmax_layout", "")
    dq, dk, dv = (torch.full(x.shape, float("nan"), dtype=torch.float64) for x in (q, k, v))
    sequences = _sequences(given)
    lengths = [each.q.stop - each.q.start for each in sequences]
    statistics = zip(
        *(layouts.unpack_statistics(given[name], lengths, layout) for name in ("softmax_max", "softmax_sum")),
        strict=True,
    )
    for each, (largest, total) in zip(sequences, statistics, strict=True):
        dk[each.kv], dv[each.kv] = 0.0, 0.0
        if each.q.stop == each.q.start:
            continue
        parts = (_part(q, each.q), _part(k, each.kv), _part(v, each.kv))
        dy, out = _part(given["dy"], each.q), _part(given["attention_in"], each.q)
        made = golden.backward(dy, *parts, out, (largest[None], total[None]), each.hidden, given["scale"])
        dq[each.q], dk[each.kv], dv[each.kv] = (x[0].transpose(0, 1) for x in made)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


IMPLEMENTED: dict[str, Callable[[Given], Any]] = {
    "npu_fusion_attention": _forward,
    "npu_fusion_attention_v2": _forward,
    "npu_fusion_attention_grad": _backward(5),
    "npu_fusion_attention_grad_v2": _backward(7),
    "npu_attention_update": updates.attention_update,
    "npu_ring_attention_update": updates.ring_attention_update,
}
