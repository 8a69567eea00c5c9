"""The kernel npu-fusion over a real torch_npu wheel and stub libraries of CANN, where TOKENRING_TORCH_NPU names them.

docs/ascend-emulation.md has the two commands that make such a folder, and what a run of this gave.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend import fused_linears, real
from ascend.layer_calls import check_layers
from ascend.real import Made, RealPools, Seen, kernel_of, on_meta, operator, seen
from ascend.schemas import CURRENT, WHEELS
from conformance import TILES, check, operands
from patience import patient
from ranks import Here
from test_ascend_kernel import BY_NAME, tried
from test_ascend_packed import CASES, Checked, tile_of
from test_ascend_schemas import BAD_CALLS, canonical

from tokenring.backends.kernels import npu_call, npu_masks, npu_trials
from tokenring.backends.kernels.npu_fusion import NpuFusion
from tokenring.backends.transports.hccl import HcclTransport
from tokenring.sequence.region import Patch

FOLDER = os.environ.get("TOKENRING_TORCH_NPU")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="TOKENRING_TORCH_NPU names no folder with a real torch_npu")
VERSIONS = pytest.mark.parametrize("version", [1, 2])
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {}, "token-major": {"token_major": True}, "batch 1": {"batch": 1}, "bf16": {"dtype": torch.bfloat16},
    "narrower values": {"value_dim": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def npu_wheel() -> Iterator[RealPools]:
    assert FOLDER is not None
    pools = RealPools(Path(FOLDER).resolve())
    try:
        yield pools
    finally:
        pools.close()


def wheel() -> str:
    import torch_npu  # type: ignore[import-not-found, unused-ignore]

    return str(torch_npu.__version__)


# ---------- signatures


def test_signatures(npu_wheel: RealPools) -> None:
    npu_wheel(1)(signatures)


def signatures(here: Here) -> None:
    """The signatures that the emulation registers are those that this torch_npu registered."""
    assert differing(WHEELS[wheel()]) == []
    assert differing(CURRENT | {"npu_fusion_attention": CURRENT["npu_fusion_attention"].replace("ckens", "kens")}) == [
        "npu_fusion_attention"
    ]


def differing(texts: dict[str, str]) -> list[str]:
    return [name for name in CURRENT if real_text(name) != (canonical(texts[name]) if name in texts else None)]


def real_text(name: str) -> str | None:
    found = getattr(torch.ops.npu, name, None)
    return None if found is None else str(found.default._schema)


# ---------- whole linear layers: the real signatures, and shapes on "meta"


def test_mc2(npu_wheel: RealPools) -> None:
    npu_wheel(1)(whole_layers)


def whole_layers(here: Here) -> None:
    """Every call of kernel "mc2" is one that this torch_npu takes, and gives what the kernel reads."""
    for name, text in fused_linears.WHEELS.items():
        assert real_text(name) == canonical(text)
    check_layers()


# ---------- the kernel on CPU tensors: real argument checking, results of our goldens


@VERSIONS
@pytest.mark.parametrize("tile", BY_NAME)
def test_conformance(npu_wheel: RealPools, tile: str, version: int) -> None:
    npu_wheel(1)(conforms, tile, version)


def conforms(here: Here, name: str, version: int) -> None:
    seen.clear()
    check(kernel_of(version), BY_NAME[name])
    assert seen and {call.name.endswith("_v2") for call in seen} == {version == 2}
    check_shapes()


@VERSIONS
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_packed(npu_wheel: RealPools, name: str, options: str, version: int) -> None:
    npu_wheel(1)(packed, name, OPTIONS[options], version)


def packed(here: Here, name: str, options: dict[str, Any], version: int) -> None:
    kernel = kernel_of(version)
    assert tried(kernel, torch.device("cpu"))
    seen.clear()
    Checked(kernel, CASES[name], tile_of(CASES[name], **options), "cpu").check()
    assert len(seen) == 3
    assert {call.arguments["input_layout"] for call in seen} == {"TND"}
    assert {call.arguments.get("softmax_layout") for call in seen} == {"TND"}
    check_shapes()


@VERSIONS
def test_trials(npu_wheel: RealPools, version: int) -> None:
    npu_wheel(1)(trials, version)


def trials(here: Here, version: int) -> None:
    """Before its first packed call each direction is tried in both orders of statistics, and never again."""
    npu_trials._refused.cache_clear()
    seen.clear()
    kernel = kernel_of(version)
    assert tried(kernel, torch.device("cpu"))
    suffix = "_v2" if version == 2 else ""
    assert [(call.name, call.arguments.get("softmax_layout", "")) for call in seen] == [
        (f"{name}{suffix}", layout) for name in real.USED[:2] for layout in ("TND", "")
    ]
    check_shapes()
    seen.clear()
    assert tried(kernel, torch.device("cpu"))
    assert seen == []


def check_shapes() -> None:
    """Of every call, the real operator says the shapes and dtypes that our golden gave, as far as it can."""
    for call in seen:
        if call.name == "npu_fusion_attention_grad_v2":
            # Its kernel for "meta" asks torch.empty_like for the like of a list, once the call is accepted.
            with pytest.raises(TypeError, match=r"empty_like.*must be Tensor, not list"):
                on_meta(call)
        else:
            assert on_meta(call) == on_paper(call), call.name


def on_paper(call: Seen) -> tuple[Made, ...]:
    """What the real operator should say: what the golden gave.

    The second version's kernel for "meta" makes out as wide as q, whatever v is (on the device op-plugin makes it as
    wide as v: FlashAttentionV2KernelNpuOpApi.cpp of 517f2e7d, lines 731-790), and knows no layout but BNSD, where it
    comes to the statistics.
    """
    if call.name != "npu_fusion_attention_v2":
        return call.made
    q, v = call.arguments["query"], call.arguments["value"]
    assert call.made[0] == ((*q.shape[:-1], v.shape[-1]), q.dtype)
    statistic = ((q.shape[0], call.arguments["head_num"], q.shape[2], 8), torch.float32)
    if call.arguments["input_layout"] == "BNSD":
        assert call.made[1:] == (statistic, statistic)
    return (tuple(q.shape), q.dtype), statistic, statistic


def test_every_layout_mode_and_dtype(npu_wheel: RealPools) -> None:
    npu_wheel(1)(all_reached)


def all_reached(here: Here) -> None:
    seen.clear()
    for tile in TILES:
        check(kernel_of(1), tile)
    Checked(kernel_of(1), CASES["windows"], tile_of(CASES["windows"]), "cpu").check()
    for name in real.USED[:2]:
        calls = [call.arguments for call in seen if call.name == name]
        assert {call["input_layout"] for call in calls} == {"BNSD", "BSND", "TND"}
        assert {call.get("sparse_mode", 0) for call in calls} == {0, 1, 2, 3, 4}
        assert {call["query"].dtype for call in calls} == {torch.float32, torch.float16, torch.bfloat16}


# ---------- the kernel on tensors of the device "meta": the real operators' own shapes


@VERSIONS
def test_on_meta(npu_wheel: RealPools, version: int) -> None:
    npu_wheel(1)(whole_on_meta, version)


def whole_on_meta(here: Here, version: int) -> None:
    """With the second version only what its kernels for "meta" can: see check_shapes."""
    kernel = kernel_of(version)
    for tile in TILES:
        given = operands(tile, torch.device("meta"))
        if version == 2 and tile.token_major:
            continue
        out, lse = kernel.forward(given.q, *given.tile, patch=tile.patch, scale=0.1)
        assert (out.shape, out.dtype) == (given.dout.shape, tile.dtype), tile
        assert (lse.shape, lse.dtype) == (given.q.shape[:3], torch.float32), tile
        if version == 1:
            made = kernel.backward(given.dout, given.q, *given.tile, lse, lse, patch=tile.patch, scale=0.1)
            assert [x.shape for x in made] == [x.shape for x in (given.q, *given.tile)], tile
            assert {x.dtype for x in made} == {tile.dtype}, tile
    for parts in CASES.values() if version == 1 else ():
        packed_on_meta(kernel, parts)


def packed_on_meta(kernel: NpuFusion, parts: tuple[Patch, ...]) -> None:
    given = operands(tile_of(parts), torch.device("meta"))
    (batch, heads, _, head_dim), kv_heads = given.q.shape, given.tile[0].shape[1]
    made = kernel.forward_packed(given.q, *given.tile, patches=parts, scale=0.1)
    lse = torch.zeros(given.q.shape[:3], device="meta")
    gradients = kernel.backward_packed(given.dout, given.q, *given.tile, lse, lse, patches=parts, scale=0.1)
    for part, (out, lse), (dq, dk, dv) in zip(parts, made, gradients, strict=True):
        assert out.shape == dq.shape == (batch, heads, part.rows, head_dim)
        assert lse.shape == (batch, heads, part.rows)
        assert dk.shape == dv.shape == (batch, kv_heads, part.cols, head_dim)


# ---------- around the operators


def test_hccl_groups(npu_wheel: RealPools) -> None:
    npu_wheel(2)(hccl_groups)


def hccl_groups(here: Here) -> None:
    """torch_npu makes the groups of the transport in the way in which it asks for them. No message can go."""
    transport = here.transport("hccl")
    assert isinstance(transport, HcclTransport)
    assert len(transport._groups) == 4
    for group in transport._groups.values():
        assert type(group).__name__ == "ProcessGroupHCCL"
        assert "(self: " in str(group.get_hccl_comm_name.__doc__)  # asked for its name, it would ask for a device
        for message in (group.send, group.recv):
            with pytest.raises(RuntimeError, match="Tensors must be NPU and dense"):
                message([torch.zeros(3)], 1 - here.rank, 0)


def process(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, with the wheel installed as a user's would be."""
    paths = [*sys.path, str(FOLDER)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables
    return subprocess.run(
        [sys.executable, *arguments, code], env=environment, capture_output=True, text=True, timeout=patient(100)
    )


def with_stubs() -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(Path(str(FOLDER), "stubs").resolve())}


def test_doctor() -> None:
    """Of the real package, with stubs for CANN and without."""
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    found = process("doctor", "-m", "tokenring", **off, **with_stubs())
    assert found.returncode == 0, found.stderr
    assert re.search(r"^torch_npu \S+, imports; autoload is off$", found.stdout, re.MULTILINE)
    assert "torch_npu imports, and sees no NPU" in found.stdout
    names = re.findall(r"^  (npu_\w+)\(query, key, value, dy, .*softmax_layout", found.stdout, re.MULTILINE)
    assert names == ["npu_fusion_attention_grad", "npu_fusion_attention_grad_v2"]
    broken = process("doctor", "-m", "tokenring", **off)
    assert "torch_npu cannot be imported: libhccl.so, a library of CANN, is not found" in broken.stdout


ON_CPU = """
import sys
import torch, torch.distributed as dist
import tokenring as tr
assert "torch_npu" in sys.modules and not torch.npu.is_available()
if TRANSFER:
    from torch_npu.contrib import transfer_to_npu
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
q, k, v = (torch.randn(1, 64, heads, 32).requires_grad_() for heads in (4, 2, 2))
out = tr.attention(q, k, v, tr.ContextParallel(), mask=tr.Causal())
heads_first = (x.transpose(1, 2) for x in (q, k, v))
right = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
torch.testing.assert_close(out, right)
out.sum().backward()
print("exact", flush=True)
"""


@pytest.mark.parametrize("transfer", [False, True])
def test_the_cpu_is_not_affected(transfer: bool) -> None:
    """torch loads torch_npu by itself, and with transfer_to_npu it takes torch.cuda for torch.npu."""
    found = process(f"TRANSFER = {transfer}\n{ON_CPU}", "-c", TORCH_DEVICE_BACKEND_AUTOLOAD="1", **with_stubs())
    assert (found.returncode, found.stdout[-6:]) == (0, "exact\n"), found.stderr[-2000:]


# ---------- mutants: what the real operators refuse


def misspelt_scale(kernel: NpuFusion, patched: pytest.MonkeyPatch) -> None:
    """The gradient called as the forward is."""
    kernel._gradient._names |= {"scale": "scale"}


def misspelt_band(kernel: NpuFusion, patched: pytest.MonkeyPatch) -> None:
    """The first version called as the second is."""
    kernel._forward._names |= {"before": "pre_tokens"}


def without_layout(kernel: NpuFusion, patched: pytest.MonkeyPatch) -> None:
    """One argument too few by position."""
    inner = kernel._forward._call
    kernel._forward._call = lambda *operands, **options: inner(*operands[:-1], **options)


def without_statistics(kernel: NpuFusion, patched: pytest.MonkeyPatch) -> None:
    """The signature lets them be missing, the golden does not."""
    patched.setattr(npu_call, "statistics", lambda lse: {})


def mask_as_list(kernel: NpuFusion, patched: pytest.MonkeyPatch) -> None:
    """A mask that is no tensor."""
    patched.setattr(npu_masks, "compressed_mask", lambda device: [[True]])


MUTANTS: dict[str, tuple[Callable[[NpuFusion, pytest.MonkeyPatch], None], str]] = {
    "misspelt scale": (misspelt_scale, "Unknown keyword argument 'scale'"),
    "misspelt band": (misspelt_band, "Unknown keyword argument 'pre_tokens'"),
    "no layout": (without_layout, "missing value for argument 'input_layout'"),
    "no statistics": (without_statistics, "softmax_max is missing"),
    "a mask that is a list": (mask_as_list, r"Expected a value of type 'Optional\[Tensor\]' for argument 'atten_mask'"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(npu_wheel: RealPools, name: str) -> None:
    npu_wheel(1)(mutated, name)


def mutated(here: Here, name: str) -> None:
    spoil, says = MUTANTS[name]
    kernel = kernel_of(1)
    check(kernel, BY_NAME["band"])
    with pytest.MonkeyPatch.context() as patched:
        spoil(kernel, patched)
        with pytest.raises(RuntimeError, match=says):
            check(kernel, BY_NAME["band"])


def test_wrong_shapes_are_found(npu_wheel: RealPools) -> None:
    npu_wheel(1)(wrong_shapes)


def wrong_shapes(here: Here) -> None:
    """The comparison with the real operator's shapes tells shapes, dtypes and order."""
    seen.clear()
    check(kernel_of(1), BY_NAME["token-major"])
    (first, *_) = seen
    out, largest, total = first.made
    assert on_meta(first) == first.made
    for spoilt in (
        ((out[0], torch.float64), largest, total),
        (out, (largest[0][:-1], largest[1]), total),
        (largest, out, total),
    ):
        assert on_meta(Seen(first.name, first.arguments, spoilt)) != spoilt


def test_bad_calls(npu_wheel: RealPools) -> None:
    npu_wheel(1)(bad_calls)


def bad_calls(here: Here) -> None:
    """The dispatcher takes a bool for an int and a tensor for a float; else it refuses what our binding refuses."""
    x, accepted = torch.zeros(1, 2, 4, 8, device="meta"), list[str]()
    for positional, named, _ in BAD_CALLS:
        operands = [x if isinstance(value, torch.Tensor) else value for value in positional]
        try:
            operator("npu_fusion_attention")(*operands, **named)
            accepted.append(*named)
        except RuntimeError:
            pass
    assert accepted == ["sparse_mode", "scale"]
