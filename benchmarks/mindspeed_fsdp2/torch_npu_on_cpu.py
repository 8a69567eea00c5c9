"""torch_npu as far as the FSDP2 trainers' attention asks for it, on CPU tensors; and what imports ask for besides.

The operators are those of tests/fakes/ascend, in float64, with the signatures of a wheel. Where gradients are on, as
around MindSpeed-LLM's Ulysses, they are differentiable, as the real ones are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from ascend.operators import on_cpu_tensors
from ascend.schemas import OFFERS
from llm_step import ELSEWHERE, _Elsewhere
from mindspeed_npu import WHERE_MISSING

WHEEL = next(iter(OFFERS))
MOCKED = ("torchair", "psutil", "triton", "megatron", "jsonargparse", "torchdata", "pandas", "av")


def operator(name: str) -> Callable[..., Any]:
    """An operator of the wheel; its operands may be views, which the real one copies."""
    compute = on_cpu_tensors(torch._C.parse_schema(f"npu::{OFFERS[WHEEL][name]}"))

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, (args, kwargs))
        for ends in ("actual_seq_qlen", "actual_seq_kvlen"):
            if kwargs.get(ends) is not None:  # an empty document in front is none
                kwargs[ends] = [int(end) for end in kwargs[ends] if end]
        kwargs.pop("pse_type", None)
        return compute(*args, **kwargs)

    return call


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *rest: Any,
    **more: Any,
) -> Any:
    """Its own gradient where gradients are on; else with the statistics that rings use."""
    if not torch.is_grad_enabled():
        return _forward(query, key, value, head_num, input_layout, *rest, **more)
    return (_differentiable(query, key, value, input_layout, more),)


def npu_fusion_attention_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *rest: Any,
    **more: Any,
) -> Any:
    """With sinks, for BNSD."""
    return (_differentiable(query, key, value, input_layout, more),)


def _differentiable(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, said: dict[str, Any]
) -> torch.Tensor:
    """Attention in plain torch, in float64, for modes without a mask of the caller's own."""
    given = {"TND": lambda x: x.transpose(0, 1)[None], "BSND": lambda x: x.transpose(1, 2), "BNSD": lambda x: x}[layout]
    dtype = q.dtype
    q, k, v = (given(x).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    at, of = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    mode = said.get("sparse_mode", 0)
    hidden = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool) if mode == 0 else of > at
    if mode == 4:
        hidden = (of < at - said["pre_tokens"]) | (of > at + said["next_tokens"])
    if said.get("actual_seq_qlen") is not None:
        ends = [end for end in said["actual_seq_qlen"] if end]  # an empty document in front is none
        document = torch.bucketize(torch.arange(q.shape[2]), torch.as_tensor(ends), right=True)
        hidden = hidden | (document[:, None] != document)
    scores = (q @ k.transpose(-1, -2) * said["scale"]).masked_fill(hidden, -math.inf)
    if said.get("sink") is not None:
        scores = torch.cat([scores, said["sink"].double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    out = (scores.softmax(-1)[..., : k.shape[2]] @ v).to(dtype)
    return {"TND": lambda x: x[0].transpose(0, 1), "BSND": lambda x: x.transpose(1, 2), "BNSD": lambda x: x}[layout](
        out
    )


def ring_update(*given: Any) -> Any:
    """MindSpeed's fused update of a ring's results: the caller's own without fusion."""
    return sys._getframe(1).f_globals["forward_update_without_fused"](*given)


_forward, _gradients = operator("npu_fusion_attention"), operator("npu_fusion_attention_grad")


def _gradients_of_mindspeed(*args: Any, scale: float = 1.0, **more: Any) -> Any:
    return _gradients(*args, scale_value=scale, **more)


def install() -> None:
    """Put them into sys.modules, once in a process."""
    if "torch_npu" in sys.modules:
        return
    made = ModuleType("torch_npu")
    made.__spec__, made.__version__ = ModuleSpec("torch_npu", None), "2.7.1"  # type: ignore[attr-defined]
    made.npu_fusion_attention, made.npu_fusion_attention_v2 = npu_fusion_attention, npu_fusion_attention_v2  # type: ignore[attr-defined]
    made.npu_fusion_attention_grad = _gradients  # type: ignore[attr-defined]
    made.npu = SimpleNamespace()  # type: ignore[attr-defined]
    sys.modules["torch_npu"] = made
    torch.npu = SimpleNamespace(  # type: ignore[attr-defined]
        current_device=lambda: torch.device("cpu"), config=SimpleNamespace(allow_internal_format=True),
        is_available=lambda: False, device_count=lambda: 0,
    )  # fmt: skip
    torch.accelerator.current_accelerator = lambda *_: torch.device("cpu")  # type: ignore[assignment]
    torch.accelerator.current_device = lambda: torch.device("cpu")  # type: ignore[attr-defined]
    fusion, update = (
        ModuleType("mindspeed.ops.fusion_attention_v2"),
        ModuleType("mindspeed.ops.npu_ring_attention_update"),
    )
    fusion.npu_fusion_attention = npu_fusion_attention  # type: ignore[attr-defined]
    fusion.npu_fusion_attention_grad = _gradients_of_mindspeed  # type: ignore[attr-defined]
    update.npu_ring_attention_update = ring_update  # type: ignore[attr-defined]
    shards = ModuleType("mindspeed_mm.fsdp.ops.fully_shard.fully_shard")  # a patch of torch 2.7's FSDP, used by no call
    shards.apply_fully_shard_patch = lambda: None  # type: ignore[attr-defined]
    sys.modules[shards.__name__] = shards
    sys.modules |= {each.__name__: each for each in (fusion, update)}
    sys.meta_path.append(_Elsewhere(*ELSEWHERE, *WHERE_MISSING, *MOCKED))  # the last: what is installed is taken
