"""MC2 on the emulated NPU: npu_all_gather_base_mm and npu_mm_reduce_scatter_base, over the emulated HCCL.

`install()` registers them beside what `operators.register` has. Signatures are those of the wheels 2.7.1.post11, 2.9.1,
2.13.0 and 2.14.0 (which agree, read in libtorch_npu.so) and of op-plugin up to 7.1.0, which has no quantization.

What is refused, with its source: the first four by Ascend/op-plugin 517f2e7d, op_plugin/ops/opapi/
AllGatherBaseMatmulKernelNpuOpApi.cpp:53-72 and MatmulReduceScatterBaseKernelNpuOpApi.cpp:33-54; "aclnn" is CheckParams
and CheckShape in hicann/ops-transformer 3c9ce38e, mc2/*/op_api/; "page" is op-plugin's page of each operator. Products
are made in float64 and rounded to the operands' dtype, as are a row's parts before HCCL adds them, and each sum of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ascend import device, module
from ascend.device import NpuTensor, wrap
from ascend.hccl_ledger import HcclError, ledger
from ascend.hccl_names import named
from ascend.operators import Called, by_name
from ascend.refusals import check_device, refuse

_QUANTIZED = "Tensor? x1_scale=None, Tensor? x2_scale=None, "
_MODES = ", ScalarType? output_dtype=None, str? comm_mode=None"
_OPERANDS = "Tensor input, Tensor x2, str hcom, int world_size, *, "
_GATHER = f"bias=None, {_QUANTIZED}int gather_index=0, bool gather_output=True, int comm_turn=0{_MODES}"
_SCATTER = f"bias=None, {_QUANTIZED}int comm_turn=0{_MODES}"
GATHER, SCATTER = "npu_all_gather_base_mm", "npu_mm_reduce_scatter_base"
WHEELS = {
    GATHER: f"{GATHER}({_OPERANDS}Tensor? {_GATHER}) -> (Tensor, Tensor)",
    SCATTER: f"{SCATTER}({_OPERANDS}str reduce_op='sum', Tensor? {_SCATTER}) -> Tensor",
}
OFFERS = {
    "wheels": WHEELS,
    "op-plugin 7.1.0": {name: text.replace(_QUANTIZED, "").replace(_MODES, "") for name, text in WHEELS.items()},
}
DTYPES = (torch.float16, torch.bfloat16)
RANKS = {"Ascend910B": (2, 4, 8), "Ascend910_93": (2, 4, 8, 16, 32)}  # VALID_RANK of the tiling; page

calls: list[Called] = []
domains: dict[str, Any] = {}  # communicators that fused operators had, with their groups
_libraries: list[torch.library.Library] = []


def install(offer: str = "wheels") -> None:
    """The two operators as these builds have them; none of them: "nothing"."""
    calls.clear()
    domains.clear()
    while _libraries:
        _libraries.pop()._destroy()  # type: ignore[no-untyped-call]
    for name in WHEELS:
        device.operators.pop(f"npu::{name}", None)
    if offer == "nothing":
        return
    library = torch.library.Library("npu", "FRAGMENT")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    for name, text in OFFERS[offer].items():
        library.define(text)  # type: ignore[no-untyped-call]
        library.impl(name, _on_cpu, "CPU")  # type: ignore[no-untyped-call]
        device.operators[f"npu::{name}"] = _noted(name, torch._C.parse_schema(f"npu::{text}"))


def _on_cpu(*args: Any, **_: Any) -> Any:
    check_device(args[:2])


def _noted(name: str, schema: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        passed = by_name(schema, args, kwargs)
        calls.append(Called(name, passed))
        given = {each.name: each.default_value for each in schema.arguments} | passed
        check_device([given["input"], given["x2"]])
        _check(given)
        group = _group(given["hcom"], given["world_size"])
        on = given["input"]._index
        refuse(on != group.named_on, f"tensors on npu:{on}, and {given['hcom']!r} is of npu:{group.named_on}")
        return _gathered(given, group) if name == GATHER else _scattered(given, group)

    return call


def _check(given: dict[str, Any]) -> None:
    x1, x2, ranks = given["input"], given["x2"], given["world_size"]
    refuse(ranks not in (2, 4, 8, 16, 32), f"world_size should be in [2, 4, 8, 16, 32], but is {ranks}.")
    refuse(x1.dim() != 2 or x2.dim() != 2, f"Both inputs of mm are required to be 2D, got {x1.dim()}D and {x2.dim()}D.")
    refuse(x1.shape[1] != x2.shape[0], f"The K-axis in the two inputs of Matmul must be equal: {x1.shape}, {x2.shape}")
    scatters = "reduce_op" in given
    refuse(scatters and x1.shape[0] % ranks != 0, "The M-axis in input of Matmul should be be divisible by world_size.")
    name = module.get_device_name()
    fits = next((some for prefix, some in RANKS.items() if name.startswith(prefix)), None)
    refuse(fits is None, f"{name}: the page lists Atlas A2 and A3")
    refuse(fits is not None and ranks not in fits, f"{name} takes {fits} ranks, not {ranks}")
    for each in (x1, x2):  # aclnn CheckDtypeValid
        refuse(each.dtype not in DTYPES, f"{each.dtype}: DT_FLOAT16 and DT_BFLOAT16 are supported")
        refuse(each.dtype != x1.dtype, f"x1 is {x1.dtype}, x2 {each.dtype}")
    refuse(not x1.is_contiguous(), "x1 must not be transposed, nor otherwise not contiguous")  # aclnn CheckShape; page
    refuse(not (x2.is_contiguous() or x2.t().is_contiguous()), "x2 must be contiguous when not transposed")
    refuse(not 256 <= x1.shape[1] < 65535, f"k-axis {x1.shape[1]}: expected [256, 65535)")  # aclnn CheckShape
    refuse(min(*x1.shape, *x2.shape) < 1, "the emulation computes no empty tensors")
    refuse(given.get("bias") is not None, "bias that is not 0 is not supported")  # page
    refuse(given["comm_turn"] != 0, "comm_turn: only 0 is supported")  # page
    refuse(given.get("gather_index", 0) != 0, "gather_index: only 0 is supported")  # page
    refuse(given.get("reduce_op", "sum") != "sum", "reduce_op: only 'sum' is supported")  # page
    for each in ("x1_scale", "x2_scale", "output_dtype"):
        refuse(given.get(each) is not None, f"{each}: the emulation computes no quantized products")
    refuse(given.get("comm_mode") not in (None, "ai_cpu"), "comm_mode: the emulation has 'ai_cpu' alone")


def _group(hcom: str, ranks: int) -> Any:
    """The group of a communicator's name: of one size with what is given, and the only one of its kind on A2."""
    found = named.get(hcom)
    if found is None:
        raise HcclError(f"no communicator is called {hcom!r}")
    refuse(found.size() != ranks, f"world_size is {ranks}, communicator {hcom!r} has {found.size()} ranks")
    domains[hcom] = found
    several = module.get_device_name().startswith("Ascend910B") and len(domains) > 1
    refuse(several, f"fused operators of one model in several communication domains: {sorted(domains)}")  # page
    under_way = [each.name for each in ledger.in_use if f"group {found.group_id})" in each.name]
    if under_way:  # operations of one communicator follow each other: on the device two streams would share its buffers
        raise HcclError(f"a fused operator begins in communicator {hcom!r} beside {under_way[0]}")
    return found


def _shapes(given: dict[str, Any]) -> str:
    return f"{list(given['input'].shape)} x {list(given['x2'].shape)}"


def _others(gloo: Any, mine: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks; Gloo moves their bytes."""
    parts = [torch.empty_like(mine) for _ in range(gloo.size())]
    gloo.allgather([[each.view(torch.uint8) for each in parts]], [mine.view(torch.uint8)]).wait()
    return parts


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).to(a.dtype)


class _Done:
    def wait(self) -> None: ...


def _gathered(given: dict[str, Any], group: Any) -> tuple[NpuTensor, NpuTensor]:
    x1, x2, keeps = given["input"], given["x2"]._raw, given["gather_output"]
    rows = x1.shape[0] * group.size()
    made = wrap(x1._raw.new_empty(rows, x2.shape[1]), x1._index)
    whole = wrap(x1._raw.new_empty((rows, x1.shape[1]) if keeps else 0), x1._index)

    def run(gloo: Any, inputs: list[torch.Tensor], into: list[torch.Tensor]) -> Any:
        every = torch.cat(_others(gloo, inputs[0]))
        for target, value in zip(into, (_product(every, x2), every), strict=False):
            target.copy_(value)
        return _Done()

    what = f"{GATHER} of {_shapes(given)}, kept {keeps}"
    group._collective(what, [x1], [made, whole] if keeps else [made], run).wait()
    return made, whole


def _scattered(given: dict[str, Any], group: Any) -> NpuTensor:
    x1, x2 = given["input"], given["x2"]._raw
    made = wrap(x1._raw.new_empty(x1.shape[0] // group.size(), x2.shape[1]), x1._index)

    def run(gloo: Any, inputs: list[torch.Tensor], into: list[torch.Tensor]) -> Any:
        first, *others = [each.chunk(gloo.size())[gloo.rank()] for each in _others(gloo, _product(inputs[0], x2))]
        total = first.clone()
        for each in others:
            total += each
        into[0].copy_(total)
        return _Done()

    group._collective(f"{SCATTER} of {_shapes(given)}", [x1], [made], run).wait()
    return made
