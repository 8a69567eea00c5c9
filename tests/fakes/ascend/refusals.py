"""What the attention operators refuse. Stricter than the hardware in places; docs/ascend-emulation.md lists them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ascend.device import NpuTensor
from ascend.golden import COPIES
from ascend.sparse import MODES, TND_MODES

LAYOUTS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD_DIM = 768
MOST_HEADS = 256
MOST_TOKENS = 1 << 20
MOST_SEQUENCES = 1024
NOT_COMPUTED = ("pse", "padding_mask", "sink", "dropout_mask", "query_rope", "key_rope", "q_start_idx", "kv_start_idx")


def refuse(condition: bool, text: str) -> None:
    if condition:
        raise RuntimeError(text)


def check_device(tensors: Sequence[torch.Tensor]) -> None:
    """All on one NPU."""
    for x in tensors:
        refuse(
            not isinstance(x, NpuTensor),
            f"Expected all tensors to be on the same device. Expected NPU tensor, please check whether the input "
            f"tensor device is correct: found {x.device}.",
        )
    devices = {str(x.device) for x in tensors}
    refuse(len(devices) > 1, f"Expected all tensors to be on the same device, but found {sorted(devices)}")


def check_operands(given: dict[str, Any]) -> None:
    """q, k, v: layout, dimensions, dtypes, and what is not computed here."""
    q, k, v, layout = given["query"], given["key"], given["value"], given["input_layout"]
    refuse(layout not in LAYOUTS, f"The input_layout should be one of {', '.join(LAYOUTS)}, but got {layout!r}")
    for name in ("query", "key", "value"):
        x = given[name]
        refuse(x.dim() != LAYOUTS[layout], f"{name} of layout {layout} has {LAYOUTS[layout]} dimensions, not {x.dim()}")
        refuse(x.dtype not in DTYPES, f"{name} is {x.dtype}; fp16, bf16 and fp32 are supported")
        refuse(x.dtype != q.dtype, f"{name} is {x.dtype}, query {q.dtype}")
        refuse(not x.is_contiguous(), f"{name} is not contiguous (the emulation wants to see every copy)")
    refuse(k.shape[:-1] != v.shape[:-1], f"key {list(k.shape)} and value {list(v.shape)} differ in more than D")
    refuse(not 0 < given["keep_prob"] <= 1, f"The keep_prob value must be in range of (0, 1], got {given['keep_prob']}")
    refuse(given["keep_prob"] < 1, "the emulation computes no dropout")
    for name in NOT_COMPUTED:
        refuse(given.get(name) is not None, f"the emulation does not compute {name}")
    refuse(given["inner_precise"] not in (0, 1, 2), f"inner_precise {given['inner_precise']} is none of 0, 1, 2")


def check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head_num: int) -> None:
    """[B, N, S, D] each."""
    refuse(head_num <= 0, f"head_num must be greater than 0, got {head_num}")
    refuse(q.shape[1] != head_num, f"head_num is {head_num}, query has {q.shape[1]} heads")
    refuse(not 1 <= q.shape[1] <= MOST_HEADS, f"{q.shape[1]} heads; 1 to {MOST_HEADS} are supported")
    refuse(q.shape[1] % k.shape[1] != 0, f"{q.shape[1]} query heads are no multiple of {k.shape[1]} kv heads")
    refuse(not 1 <= q.shape[3] <= LARGEST_HEAD_DIM, f"head dim {q.shape[3]}; 1 to {LARGEST_HEAD_DIM} are supported")
    refuse(not q.shape[3] == k.shape[3] >= v.shape[3], f"head dims {q.shape[3]}, {k.shape[3]}, {v.shape[3]} do not fit")
    refuse(q.shape[0] != k.shape[0], f"batch {q.shape[0]} of query, {k.shape[0]} of key")
    refuse(min(q.shape[2], k.shape[2]) < 1, "a sequence of no tokens")
    refuse(max(q.shape[2], k.shape[2]) > MOST_TOKENS, f"more than {MOST_TOKENS} tokens")


def check_modes(given: dict[str, Any]) -> None:
    """The sparse mode, and what goes with TND only."""
    mode, packed = given["sparse_mode"], given["input_layout"] == "TND"
    layout = given.get("softmax_layout", "")
    refuse(mode not in (TND_MODES if packed else MODES), f"sparse_mode {mode} does not go with {given['input_layout']}")
    refuse(layout not in ("", "TND"), f"softmax_layout should be '' or 'TND', got {layout!r}")
    refuse(layout == "TND" and not packed, "softmax_layout 'TND' goes with input_layout TND only")
    refuse((mode in (5, 6)) != (given["prefix"] is not None), f"prefix goes with sparse modes 5 and 6, not {mode}")
    lists = [given["actual_seq_qlen"], given["actual_seq_kvlen"]]
    if not packed:
        refuse(any(x is not None for x in lists), "actual_seq_qlen and actual_seq_kvlen go with TND only")
        return
    refuse(any(not x for x in lists), "TND needs actual_seq_qlen and actual_seq_kvlen")
    refuse(len(lists[0]) != len(lists[1]), f"{len(lists[0])} sequences of queries, {len(lists[1])} of keys")
    refuse(len(lists[0]) > MOST_SEQUENCES, f"more than {MOST_SEQUENCES} sequences")


def check_kernels(given: dict[str, Any], kernel: str, lacking: Collection[str]) -> None:
    """What the CANN beneath lacks: op-plugin asks check_aclnn_kernel_available(kernel) when it is called.

    For each direction by itself (op_plugin/ops/opapi/FlashAttentionKernelNpuOpApi.cpp of 517f2e7d, lines 575-589 and
    1175-1189 of the gradients, 899-914 of forward): without the kernel TORCH_CHECK(softmax_layout_str == "", ...).
    """
    packed = given["input_layout"] == "TND"
    refuse(
        packed and kernel in lacking and given.get("softmax_layout", "") != "",
        "The param softmax_layout is not supported\n[ERROR] (PID:1, Device:0) ERR01001 OPS invalid parameter",
    )


def lengths_of(ends: Sequence[int], tokens: int, name: str) -> list[int]:
    """Lengths of the sequences from their ends; zeros at the end skip sequences, and only then tokens may be left."""
    refuse(ends[0] == 0, f"{name} {list(ends)} begins with 0: it holds the end of each sequence, without a leading 0")
    used = list(ends)
    while used and used[-1] == 0:
        used.pop()
    lengths = [end - start for start, end in zip([0, *used], used, strict=False)]
    refuse(any(length < 0 for length in lengths), f"{name} {list(ends)} decreases")
    skipped = len(ends) - len(used)
    fits = used[-1] <= tokens if skipped else used[-1] == tokens
    refuse(not fits, f"{name} {list(ends)} ends at {used[-1]}, and there are {tokens} tokens")
    return lengths + [0] * skipped


def check_statistics(given: dict[str, Any], shape: tuple[int, ...]) -> None:
    """What the gradient is given: dy and attention_in as the output, and eight equal copies of each statistic.

    What belongs to skipped sequences may hold anything: it lies at the end, in either order.
    """
    q, dy, out = given["query"], given["dy"], given["attention_in"]
    refuse(out is None, "attention_in is missing: delta is worked out from it")
    refuse(given["softmax_in"] is not None and given["softmax_in"].numel() > 0, "softmax_in is reserved: pass None")
    for name, x in (("dy", dy), ("attention_in", out)):
        refuse(x.dtype != q.dtype, f"{name} is {x.dtype}, query {q.dtype}")
        refuse(x.shape != (*q.shape[:-1], x.shape[-1]), f"{name} {list(x.shape)} does not fit query {list(q.shape)}")
        refuse(not x.is_contiguous(), f"{name} is not contiguous (the emulation wants to see every copy)")
    for name in ("softmax_max", "softmax_sum"):
        x = given[name]
        refuse(x is None, f"{name} is missing")
        refuse(x.dtype != torch.float32, f"{name} must be float32, not {x.dtype}")
        refuse(tuple(x.shape) != (*shape, COPIES), f"{name} is {list(x.shape)}, not {[*shape, COPIES]}")
        refuse(not x.is_contiguous(), f"{name} is not contiguous")
        inner = x.view(-1, COPIES)
        if given["input_layout"] == "TND":
            inner = inner[: max(given["actual_seq_qlen"]) * shape[1]]
        refuse(not torch.equal(inner, inner[..., :1].expand_as(inner)), f"{name}: its {COPIES} copies differ")
        refuse(bool(inner.isnan().any() | inner.isinf().any()), f"{name} holds inf or nan")
