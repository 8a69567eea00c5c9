"""Kernels are tried before they are taken: what is wrong with them, who computes then, and what is remembered."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_ops import aten
from cuda_ops.aten import calls, operators
from cuda_ops.packages import RELEASES, installed
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools
from test_cuda_kernels import PACKAGES

from tokenring import Causal, attention
from tokenring.backends import registry
from tokenring.backends.base import AttentionKernel, Tiles
from tokenring.backends.kernels import choosing, trial
from tokenring.backends.kernels.choosing import Choosing
from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.backends.kernels.reference import Reference
from tokenring.backends.kernels.torch_cuda import TorchCudnn, TorchEfficient, TorchFlash
from tokenring.backends.kernels.trial import TILES, Kind, fault
from tokenring.backends.verdicts import Verdicts
from tokenring.doctor.probes import _kernels
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.region import Patch
from tokenring.schedule.ir import PASSES, Pass

LENGTH, CPU, HALF = 256, torch.device("cpu"), torch.bfloat16
SQUARE = Patch(0, 128, 0, 128, None, 0)
Broken = dict[str, Callable[..., Any]]


# ---------- operators that are broken


def base_2(*given: Any, **named: Any) -> Any:
    out, lse, *rest = aten.cudnn_forward(*given, **named)
    return out, lse / math.log(2), *rest


def top_left(*given: Any, **named: Any) -> Any:
    """Causal at the other corner, where that makes a difference; windows as they are."""
    q, k, v, *rest = given
    if named.get("window_size_left", -1) == -1 and rest[5] and q.shape[1] < k.shape[1]:
        k, v = k[:, : q.shape[1]].clone(), v[:, : q.shape[1]].clone()
    return aten.flash_forward(q, k, v, *rest, **named)


def spoiled(function: Callable[..., Any], at: int, value: float) -> Callable[..., Any]:
    """One number of one result."""

    def changed(*given: Any, **named: Any) -> Any:
        made = list(function(*given, **named))
        made[at][..., -1, 0] = value
        return tuple(made)

    return changed


def without_delta(grad_out: Any, q: Any, k: Any, v: Any, out: Any, *given: Any, **named: Any) -> Any:
    return aten.cudnn_backward(grad_out, q, k, v, torch.zeros_like(out), *given, **named)


def own_lse(grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *given: Any, **named: Any) -> Any:
    """Normalises by its tile alone."""
    _, own, *_ = aten.cudnn_forward(q, k, v, None, True, 0.0, given[-1], False, scale=named["scale"])
    return aten.cudnn_backward(grad_out, q, k, v, out, own, *given, **named)


def raising(error: Exception) -> Callable[..., Any]:
    def fails(*given: Any, **named: Any) -> Any:
        raise error

    return fails


FORWARD, BACKWARD = (f"_scaled_dot_product_cudnn_attention{end}" for end in ("", "_backward"))
BREAKS: dict[str, tuple[Broken, Pass, str]] = {  # of cuDNN: the operator, the pass that is wrong, what is said
    "base 2": ({FORWARD: base_2}, "forward", "its lse is off by"),
    "not a number": ({FORWARD: spoiled(aten.cudnn_forward, 0, math.nan)}, "forward", "its out has numbers that"),
    "one number": ({FORWARD: spoiled(aten.cudnn_forward, 0, 3.0)}, "forward", "its out is off by"),
    "infinite": ({BACKWARD: spoiled(aten.cudnn_backward, 1, math.inf)}, "backward", "its dk has numbers that"),
    "no delta": ({BACKWARD: without_delta}, "backward", "its dq is off by"),
    "own lse": ({BACKWARD: own_lse}, "backward", "its dq is off by"),
    "other type": ({FORWARD: raising(TypeError("takes 8 arguments"))}, "forward", "it raised TypeError: takes 8"),
    "no plan": (
        {BACKWARD: raising(RuntimeError("cuDNN Frontend error: No execution plans support the graph."))},
        "backward", "it raised RuntimeError: cuDNN Frontend error: No execution plans",
    ),
    "no memory": ({FORWARD: raising(torch.OutOfMemoryError("CUDA out of memory"))}, "forward", "out of memory"),
}  # fmt: skip
WRONG = [name for name in BREAKS if name != "no memory"]


def kind(direction: Pass, dtype: torch.dtype = HALF, head_dim: int = 40) -> Kind:
    return Kind(direction, head_dim, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [TorchCudnn, TorchFlash, TorchEfficient])
def test_right_kernels_pass(make: type[Any], dtype: torch.dtype) -> None:
    with operators():
        for direction in PASSES:
            assert fault(make(), kind(direction, dtype), TILES, Verdicts(None)) == ""


@pytest.mark.parametrize("release", RELEASES)
def test_right_packages_pass(release: str) -> None:
    with installed(release):
        for direction in PASSES:
            assert fault(PACKAGES[RELEASES[release][0]](), kind(direction), TILES, Verdicts(None)) == ""


def test_fp32_and_large_heads_pass() -> None:
    with operators():
        for dtype, head_dim in ((torch.float32, 64), (torch.bfloat16, 640), (torch.float16, 1)):
            for direction in PASSES:
                assert fault(TorchEfficient(), kind(direction, dtype, head_dim), TILES, Verdicts(None)) == ""


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_fail(name: str) -> None:
    broken, direction, says = BREAKS[name]
    with operators(**broken):
        found = fault(TorchCudnn(), kind(direction), TILES, Verdicts(None))
        assert found is not None and says in found
        assert found.startswith(f"tried on a causal tile of 128 × 128 {direction}, it")
        if direction == "backward":
            assert fault(TorchCudnn(), kind("forward"), TILES, Verdicts(None)) == "", "the other pass is right"


def test_what_only_an_irregular_tile_shows() -> None:
    with operators(_flash_attention_forward=top_left):
        assert fault(TorchFlash(), kind("forward"), TILES[:1], Verdicts(None)) == ""
        found = fault(TorchFlash(), kind("forward"), TILES, Verdicts(None))
    assert found is not None and found.startswith("tried on an irregular tile of 70 × 105 forward, its")


# ---------- what is remembered


def test_tried_once(tmp_path: Path) -> None:
    """By this process and by later ones; also what was wrong."""
    with operators(**BREAKS["no delta"][0]):
        kept = Verdicts(tmp_path)
        first = [fault(TorchCudnn(), kind(each), TILES, kept) for each in PASSES]
        assert calls and first[0] == ""
        for again in (kept, Verdicts(tmp_path)):
            calls.clear()
            assert [fault(TorchCudnn(), kind(each), TILES, again) for each in PASSES] == first
            assert calls == []
        assert fault(TorchCudnn(), kind("forward", torch.float16), TILES, kept) == "" and calls, "another dtype"


@pytest.mark.parametrize("changed", ["torch.__version__", "torch.get_num_threads"])
def test_an_update_is_tried_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    with operators():
        assert fault(TorchCudnn(), kind("forward"), TILES, Verdicts(tmp_path)) == ""
        calls.clear()
        trial._place.cache_clear()
        if changed == "torch.__version__":
            monkeypatch.setattr(torch, "__version__", "2.99")
        assert fault(TorchCudnn(), kind("forward"), TILES, Verdicts(tmp_path)) == ""
        assert bool(calls) == (changed == "torch.__version__")
    trial._place.cache_clear()


def test_the_place_names_all_that_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And not which of several equal devices it is."""
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module 580.65.06\nGCC version: 12\n", encoding="utf-8")
    monkeypatch.setattr(trial, "DRIVER", driver)
    monkeypatch.setattr(trial, "device_of", lambda device: type("Here", (), {"name": "NVIDIA H100"}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    monkeypatch.setattr(trial, "version", lambda name: "2.8.3" if name == "flash-attn" else "1")
    trial._place.cache_clear()
    made = [trial._place(torch.device("cuda", index)) for index in (0, 3)]
    trial._place.cache_clear()
    assert made[0] == made[1]
    for each in ("NVIDIA H100", "580.65.06", "(9, 0)", torch.__version__, "cuDNN 91501", "flash-attn 2.8.3"):
        assert each in made[0]


def test_memory_that_ran_out_is_no_verdict(tmp_path: Path) -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")):
        with operators(**{FORWARD: raising(error)}), pytest.raises(type(error), match="out of memory"):
            fault(TorchCudnn(), kind("forward"), TILES, Verdicts(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_what_breaks_the_device_is_left_out_by_the_next_process(tmp_path: Path) -> None:
    """This process can compute nothing more."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with operators(**{FORWARD: raising(error)}):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            fault(TorchCudnn(), kind("forward"), TILES, Verdicts(tmp_path))
        assert "illegal memory" in str(fault(TorchCudnn(), kind("forward"), TILES, Verdicts(tmp_path)))


def test_what_broke_before_is_not_blamed_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        name = "H100"
        stream_clock = staticmethod(raising(RuntimeError("CUDA error: device-side assert triggered")))

    monkeypatch.setattr(trial, "device_of", lambda device: Failed)
    with pytest.raises(RuntimeError, match="device-side assert"):
        fault(CpuFlash(), kind("forward"), TILES, Verdicts(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_within_a_capture_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_capturing", lambda device: True)
    with operators(**BREAKS["base 2"][0]):
        kernel = made(TorchCudnn(), TorchFlash(), kept=Verdicts(tmp_path))
        compute(kernel)
        assert [name for name, _ in calls] == ["cudnn", "cudnn backward"]
        monkeypatch.setattr(trial, "_capturing", lambda device: False)
        compute(kernel)
        assert "flash" in [name for name, _ in calls], "tried afterwards"


# ---------- "auto"


def made(*kernels: AttentionKernel, kept: Verdicts | None = None) -> Choosing:
    """As for a device, whose memory is the CPU's."""
    by_name, kept = {each.name: each for each in kernels}, Verdicts(None) if kept is None else kept

    def tried(kernel: AttentionKernel, direction: Pass, head_dim: int, dtype: torch.dtype) -> str | None:
        return fault(kernel, Kind(direction, head_dim, dtype, CPU), TILES, kept)

    return Choosing(tuple(by_name), lambda name: by_name[name], lambda *_: None, trial=tried)


def compute(kernel: AttentionKernel, dtype: torch.dtype = HALF) -> None:
    q, k = (torch.randn(1, heads, 128, 40).to(dtype) for heads in (4, 2))
    out, lse = kernel.forward(q, k, k, patch=SQUARE, scale=0.2)
    kernel.backward(q, q, k, k, lse, None, out=out.to(dtype), patch=SQUARE, scale=0.2)


@pytest.mark.parametrize("name", WRONG)
def test_auto_takes_the_next_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the pass that is wrong; with the reason in the log, once."""
    broken, direction, says = BREAKS[name]
    wrong = PASSES if name == "other type" else (direction,)  # cuDNN's gradient asks forward how its lse looks
    used = {each: f"{'flash' if each in wrong else 'cudnn'}{' backward' * (each == 'backward')}" for each in PASSES}
    with operators(**broken):
        kernel = made(TorchCudnn(), TorchFlash())
        for _ in range(3):
            calls.clear()
            compute(kernel)
        assert [each for each, _ in calls] == [used[each] for each in PASSES]
    warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warned) == len(wrong) and all(says in each for each in warned)
    assert warned[0].startswith(
        f"kernel 'auto' leaves out torch-cudnn for all tiles {direction}, bfloat16, head dim 40"
    )
    assert says in str(kernel.why_not("torch-cudnn", 40, HALF)) and "torch-cudnn" in kernel.faults()
    assert kernel.why_not("torch-cudnn", 40, torch.float16) is None, "of another dtype nothing is known"


def test_a_program_is_bound_to_what_was_tried() -> None:
    """So that nothing is tried in the middle of a pass."""
    with operators(**BREAKS["base 2"][0]):
        kernel = made(TorchCudnn(), TorchEfficient())
        patches = SQUARE, Patch(0, 128, 0, 128, -10, 10)
        held = kernel.holding(Tiles(patches, "forward", 40, HALF, CPU))
        calls.clear()
        q = torch.randn(1, 2, 128, 40).to(HALF)
        for patch in patches:
            held.forward(q, q, q, patch=patch, scale=0.2)
        assert [name for name, _ in calls] == ["efficient", "efficient"]


def test_who_is_not_taken_is_not_tried() -> None:
    with operators():
        kernel = made(TorchCudnn(), TorchFlash(), TorchEfficient())
        compute(kernel)
        assert {name.partition(" ")[0] for name, _ in calls} == {"cudnn"}


def test_all_fail_but_plain_attention() -> None:
    broken = {name: raising(TypeError("no")) for name in aten.IMPLEMENTED}
    with operators(**broken):
        compute(made(TorchCudnn(), TorchFlash(), TorchEfficient(), Reference()))


def test_on_a_cpu_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where there is no device."""
    monkeypatch.setattr(trial, "_tried", raising(AssertionError("tried")))
    assert not trial.tries(CPU) and not trial.tries(torch.device("cuda"))
    made_here = registry.make_kernel("auto", CPU)
    compute(made_here)
    compute(choosing.for_device(CPU, lambda name: CpuFlash()))


# ---------- the doctor


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The registry as on an H100 whose memory is the CPU's."""
    for_tests(monkeypatch, tmp_path)
    yield
    registry._choosing.cache_clear()


def for_tests(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(trial, "DEVICES", ("cpu",))
    monkeypatch.setattr(choosing, "default_order", lambda capability: ("torch-cudnn", "torch-flash", "reference"))
    monkeypatch.setitem(registry.SEVERAL, "cpu", registry.SEVERAL["cuda"])
    for name in ("torch-cudnn", "torch-flash"):
        monkeypatch.setitem(registry.HOMES, name, "cpu")
    registry._choosing.cache_clear()


@pytest.mark.parametrize(("name", "taken"), [("base 2", "torch-flash"), ("own lse", "torch-cudnn")])
def test_the_doctor_tells_it(hopper: None, name: str, taken: str) -> None:
    broken, direction, says = BREAKS[name]
    with operators(**broken):
        found, others = _kernels(CPU)
    assert found is not None and found["name"] == taken
    whole = {each["name"]: each["why"] for each in others} | {taken: found["why"]}
    assert says in whole["torch-cudnn"] and f"{direction}, its" in whole["torch-cudnn"]
    other = {"torch-flash", "torch-cudnn"} - {"torch-cudnn"}
    assert all(says not in whole[each] for each in other)


# ---------- whole calls


def attends(here: Here, kernel: str, broken_ranks: tuple[int, ...], name: str, folder: str) -> tuple[str, float]:
    """What attention raises, by its type, or its error beside float64 with the operators that were used."""
    with pytest.MonkeyPatch.context() as patched, operators(**BREAKS[name][0] if here.rank in broken_ranks else {}):
        for_tests(patched, Path(folder) / str(here.rank))
        whole = [torch.randn(1, LENGTH, heads, 40, generator=torch.Generator().manual_seed(heads)).to(HALF)
                 for heads in (4, 2, 2)]  # fmt: skip
        with here.cp(kernel=kernel, schedule="ring", layout="contiguous") as cp:
            rows = torch.tensor(cp.layout_for(LENGTH).positions(here.rank))
            q, k, v = (x[:, rows].requires_grad_() for x in whole)
            calls.clear()
            try:
                out = attention(q, k, v, cp=cp, mask=Causal())
                out.sum().backward()
            except (UnsupportedError, ConfigurationError) as error:
                return f"{type(error).__name__}: {error}", 0.0
            finally:
                registry._choosing.cache_clear()
        visible = allowed(Causal(), LENGTH, LENGTH)
        right = attention64(*(x.detach() for x in whole), torch.ones_like(whole[0]), visible, 40**-0.5)
        worst = max(relative_error(q.grad, right.dq[:, rows]), relative_error(out.detach(), right.out[:, rows]))
        passed = [each for each, how in calls if how.get("rows") not in (70, 35)]  # of the irregular trial
        return passed[-1], worst


@pytest.mark.parametrize("broken_ranks", [(), (0, 1), (1,)], ids=["none", "all", "one"])
@pytest.mark.parametrize("name", ["base 2", "own lse"])
def test_auto_over_ranks(ranks: RankPools, tmp_path: Path, name: str, broken_ranks: tuple[int, ...]) -> None:
    """Each rank takes what is right on its device: nobody waits, and the result is exact."""
    found = ranks(2)(attends, "auto", broken_ranks, name, str(tmp_path))
    for rank, (last, worst) in enumerate(found):
        assert worst < 8e-3, (rank, last)
        if name == "own lse":
            assert last == ("flash backward" if rank in broken_ranks else "cudnn backward")


@pytest.mark.parametrize("name", ["base 2", "own lse"])
def test_a_kernel_by_name_that_is_wrong_everywhere(ranks: RankPools, tmp_path: Path, name: str) -> None:
    _, direction, says = BREAKS[name]
    for said, _ in ranks(2)(attends, "torch-cudnn", (0, 1), name, str(tmp_path)):
        assert said.startswith(
            "UnsupportedError: kernel 'torch-cudnn' cannot compute this call: tried on a causal tile"
        )
        assert says in said and direction in said and "choose another, as in ContextParallel(kernel=" in said


@pytest.mark.parametrize("name", ["base 2", "own lse"])
def test_a_kernel_by_name_that_is_wrong_on_one_rank(ranks: RankPools, tmp_path: Path, name: str) -> None:
    """All ranks hear of it before any waits for another."""
    found = [said for said, _ in ranks(2)(attends, "torch-cudnn", (1,), name, str(tmp_path))]
    assert found[0] == found[1]
    assert "Disagreement: the ranks disagree" in found[0] and BREAKS[name][2] in found[0]
    assert "rank 0: computes it" in found[0] and "rank 1: kernel 'torch-cudnn' cannot compute this" in found[0]


def test_a_kernel_by_name_that_is_right(ranks: RankPools, tmp_path: Path) -> None:
    for last, worst in ranks(2)(attends, "torch-cudnn", (), "own lse", str(tmp_path)):
        assert last == "cudnn backward" and worst < 8e-3


@pytest.mark.parametrize("broken_ranks", [(0, 1), (1,)], ids=["all", "one"])
def test_a_device_without_memory_is_a_refusal_that_all_hear(
    ranks: RankPools, tmp_path: Path, broken_ranks: tuple[int, ...]
) -> None:
    found = [said for said, _ in ranks(2)(attends, "torch-cudnn", broken_ranks, "no memory", str(tmp_path))]
    assert all("it could not be tried: CUDA out of memory" in said for said in found)
