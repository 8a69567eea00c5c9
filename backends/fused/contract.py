"""The contract of MC2, as torch_npu and CANN state it: devices, ranks, dtypes and the length of sums.

Read in Ascend/op-plugin 517f2e7d: the pages docs/zh/custom_APIs/torch_npu/torch_npu-npu_all_gather_base_mm.md and
torch_npu-npu_mm_reduce_scatter_base.md; the checks in op_plugin/ops/opapi/AllGatherBaseMatmulKernelNpuOpApi.cpp:53-72
and MatmulReduceScatterBaseKernelNpuOpApi.cpp:33-54. And what CANN checks beneath, in hicann/ops-transformer 3c9ce38e:
CheckDtypeValid and CheckShape of mc2/all_gather_matmul/op_api/aclnn_all_gather_matmul.cpp and
mc2/matmul_reduce_scatter/op_api/aclnn_matmul_reduce_scatter.cpp; VALID_RANK in
mc2/all_gather_matmul/op_host/op_tiling/all_gather_matmul_tiling_base.cpp of 60239e6d.

The pages list Atlas A2 and A3. CANN's own page has the 950 too, with limits of bytes; torch_npu's has not, so it is
refused. MindSpeed 028de58c does not offer --use-ascend-mc2 on Atlas 900 A3 (docs/zh/features/mc2.md), though the
operators' pages do.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tokenring.ir.schedule_data import Pass
    from tokenring.sequence.workload import LinearRequest

GATHER, SCATTER = "npu_all_gather_base_mm", "npu_mm_reduce_scatter_base"
RANKS = {"A2": (2, 4, 8), "A3": (2, 4, 8, 16, 32)}
DTYPES = (torch.bfloat16, torch.float16)
SHORTEST, TOO_LONG = 256, 65535  # of the sums of a product: the page's [256, 65535)
ONE_DOMAIN = "A2"  # where all fused operators of a model have to be in one communication domain, on one mesh of HCCS

# Which operator a pass of a layer is; what is not here has an all-gather and a product of its own.
OPERATORS: dict[tuple[str, Pass], str] = {
    ("column", "forward"): GATHER, ("column-x", "forward"): GATHER, ("row", "forward"): SCATTER,
    ("column", "backward"): SCATTER, ("column-dx", "backward"): SCATTER,
    ("row", "backward"): GATHER, ("row-dc", "backward"): GATHER,
}  # fmt: skip


def generation(device_name: str) -> str | None:
    """Return "A2" or "A3" for the name of an NPU that has these operators, None for any other.

    Names are those of torch_npu (Ascend/pytorch 9e73e708, torch_npu/csrc/core/npu/NpuVariables.cpp): "Ascend910B3" is
    an A2, "Ascend910_9392" an A3. "Ascend910B" alone is an older device.
    """
    if re.match(r"Ascend910B\d", device_name):
        return "A2"
    return "A3" if device_name.startswith("Ascend910_93") else None


def sums(request: LinearRequest, direction: Pass, ranks: int) -> tuple[str, int] | None:
    """Return over what the fused product of a pass sums, in words, and over how many elements; None: it has none."""
    operator = OPERATORS.get((request.operator, direction))
    if operator is None:
        return None
    if operator == GATHER:
        return "the width", request.width
    return "a rank's features", request.features // ranks


def refusal(request: LinearRequest, direction: Pass, ranks: int, device_name: str) -> str | None:
    """Return why MC2 cannot take a pass of a layer over so many ranks on this device, None if it can."""
    if request.device.type != "npu":
        return f"its operators are those of NPUs, and these tensors are on {request.device.type}"
    kind = generation(device_name)
    if kind is None:
        return f"{device_name} has no such operators: Atlas A2 and A3 have"
    if ranks not in RANKS[kind]:
        return f"it takes {_listed(RANKS[kind])} ranks on {device_name}, and here are {ranks}"
    if request.dtype not in DTYPES:
        return f"it takes bfloat16, and these tensors are {str(request.dtype).removeprefix('torch.')}"
    found = sums(request, direction, ranks)
    if found is not None and not SHORTEST <= found[1] < TOO_LONG:
        return f"its {direction} product sums over {found[0]}, {found[1]}, and it takes {SHORTEST} to {TOO_LONG - 1}"
    return None


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
