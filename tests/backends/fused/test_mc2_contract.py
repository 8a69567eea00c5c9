"""Check what MC2 takes, by device, ranks, dtype and length of sums; its signatures; what its stand-in refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ascend import fused_linears
from ascend.device import NpuTensor
from ascend.hccl_ranks import fresh
from ascend.ranks import NpuPools
from ranks import Here
from test_mc2 import BF16, group_of

import tokenring as tr
from tokenring.backends.fused.contract import generation, refusal, sums
from tokenring.sequence.workload import LinearRequest

RECORDED = Path(__file__).resolve().parents[2] / "data" / "mc2_signatures.txt"
NAMES = {
    "Ascend910B1": "A2", "Ascend910B2C": "A2", "Ascend910B4-1": "A2", "Ascend910_9391": "A3", "Ascend910_9362": "A3",
    "Ascend910A": None, "Ascend910ProB": None, "Ascend910B": None, "Ascend310P3": None, "Ascend950PR_9579": None,
    "NVIDIA H100": None, "": None,
}  # fmt: skip


class Place:
    """A device of a type, as a request names it."""

    def __init__(self, kind: str) -> None:
        self.type = kind


def request(operator: str = "column", features: int = 4096, width: int = 512, **others: Any) -> LinearRequest:
    given: dict[str, Any] = {"dtype": BF16, "device": Place("npu"), **others}
    return LinearRequest(operator, "direct-q", 64, features, width, given["dtype"], given["device"])


@pytest.mark.parametrize("name", NAMES)
def test_generations_by_torch_npus_names(name: str) -> None:
    assert generation(name) == NAMES[name]


def test_ranks_by_generation() -> None:
    names = {"Ascend910B3": [2, 4, 8], "Ascend910_9392": [2, 4, 8, 16, 32], "Ascend910A": []}
    assert names == {name: [n for n in range(70) if refusal(request(), "forward", n, name) is None] for name in names}


SUMS = {
    ("column", "forward"): 512, ("column-x", "forward"): 512, ("row", "forward"): 1024,
    ("column", "backward"): 1024, ("column-dx", "backward"): 1024, ("column-dw", "backward"): None,
    ("row", "backward"): 512, ("row-dc", "backward"): 512, ("row-dw", "backward"): None,
}  # fmt: skip


@pytest.mark.parametrize(("operator", "direction"), SUMS)
def test_what_a_fused_product_sums_over(operator: str, direction: Any) -> None:
    found = sums(request(operator), direction, 4)
    assert (found and found[1]) == SUMS[operator, direction]


@pytest.mark.parametrize(("width", "takes"), [(255, False), (256, True), (65534, True), (65535, False)])
def test_how_long_sums_are(width: int, takes: bool) -> None:
    assert (refusal(request(width=width), "forward", 4, "Ascend910B3") is None) is takes


@pytest.mark.parametrize(("dtype", "takes"), [(BF16, True), (torch.float16, True), (torch.float32, False)])
def test_dtypes(dtype: torch.dtype, takes: bool) -> None:
    assert (refusal(request(dtype=dtype), "forward", 4, "Ascend910B3") is None) is takes


def test_the_emulation_registers_what_was_recorded() -> None:
    lines = [line for line in RECORDED.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    ours = [text for offer in fused_linears.OFFERS.values() for text in offer.values()]

    def canonical(texts: list[str]) -> list[str]:
        return [str(torch._C.parse_schema(f"npu::{text}")) for text in texts]

    assert canonical(ours) == canonical(lines)
    assert canonical([ours[0].replace("gather_output=True", "gather_output=False")]) != canonical(lines[:1])


# ---------- options of a TensorParallel

OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "another kernel": ({"kernel": "mc3"}, "unknown kernel 'mc3'; choose one of auto, mc2; did you mean mc2?"),
    "no name": ({"kernel": 2}, "kernel is of type int"),
    "a schedule": ({"schedule": "direct-q"}, "leave out schedule='direct-q', or the kernel"),
    "tokens that stay": ({"stays": "tokens"}, "leave out stays='tokens', or the kernel"),
    "parts in fp32": ({"partials": torch.float32}, "leave out partials=torch.float32, or the kernel"),
    "a wire format": ({"wire": "mxfp8"}, "leave out wire='mxfp8', or the kernel"),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_options_that_do_not_go_together(what: str) -> None:
    options, says = OPTIONS[what]
    with pytest.raises(tr.ConfigurationError) as caught:
        tr.TensorParallel("self", **{"kernel": "mc2", **options})
    assert says in str(caught.value)


def test_one_rank_and_plans() -> None:
    with tr.TensorParallel("self", kernel="mc2") as tp:
        assert repr(tp) == "TensorParallel(kernel mc2, rank 0 of 1)"
        with pytest.raises(tr.UnsupportedError, match="kernel 'mc2' has no plan"):
            tp.plan("column", 8, 8, 256, BF16)
        assert tp.plan("reduce", 8, 1, 8, BF16).world_size == 1


# ---------- the stand-in

GOOD: dict[str, Any] = {"x1": (4, 256), "x2": (256, 8), "ranks": 2}
# What differs from a good call, and what the stand-in says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "three ranks": ({"ranks": 3}, "world_size should be in"),
    "other ranks": ({"ranks": 4}, "world_size is 4, communicator"),
    "uneven rows": ({"x1": (3, 256), "operator": fused_linears.SCATTER}, "divisible by world_size"),
    "other k": ({"x2": (512, 8)}, "The K-axis in the two inputs of Matmul must be equal"),
    "a short k": ({"x1": (4, 128), "x2": (128, 8)}, "k-axis 128"),
    "fp32": ({"dtype": torch.float32}, "DT_FLOAT16 and DT_BFLOAT16"),
    "another domain": ({"hcom": "nobody"}, "no communicator is called 'nobody'"),
    "another NPU": ({"device": "npu:5"}, "tensors on npu:5, and "),
    "gathered x2": ({"more": {"gather_index": 1}}, "gather_index"),
    "a maximum": ({"operator": fused_linears.SCATTER, "more": {"reduce_op": "max"}}, "reduce_op"),
    "a bias": ({"more": {"bias": (8,)}}, "bias"),
}


def asked(here: Here, what: str | None) -> tuple[list[list[int]], str]:
    """Shapes of what a call returns, or what is said of it."""
    fresh()
    fused_linears.install()
    given = GOOD | (REFUSED[what][0] if what else {})
    group = group_of(here)
    hcom = given.get("hcom") or group._get_backend(torch.device("npu")).get_hccl_comm_name(here.rank)
    place = {"dtype": given.get("dtype", BF16), "device": given.get("device", "npu")}
    x1, x2 = (torch.ones(given[name], **place) for name in ("x1", "x2"))
    more = {name: torch.ones(x, dtype=BF16, device="npu") if isinstance(x, tuple) else x
            for name, x in given.get("more", {}).items()}  # fmt: skip
    operator = getattr(torch.ops.npu, given.get("operator", fused_linears.GATHER)).default
    try:
        made = operator(x1, x2, hcom, given["ranks"], **more)
    except RuntimeError as error:
        return [], str(error)
    return [list(each.shape) for each in (made if isinstance(made, tuple) else (made,))], ""


def test_what_the_stand_in_takes(npus: NpuPools) -> None:
    assert npus(2)(asked, None) == [([[8, 8], [8, 256]], "")] * 2


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_stand_in_refuses(npus: NpuPools, what: str) -> None:
    for shapes, text in npus(2)(asked, what):
        assert not shapes and REFUSED[what][1] in text, text


def test_this_process_has_none() -> None:
    assert not isinstance(torch.ones(1), NpuTensor) and not hasattr(torch.ops.npu, fused_linears.GATHER)
