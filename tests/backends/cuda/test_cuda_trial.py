"""Kernels are tried before they are taken: what is wrong with them, who computes then, and what is remembered."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vendor
from cuda_ops import aten
from cuda_ops.aten import calls, operators
from cuda_ops.broken import BREAKS, FORWARD, WRONG, raising, top_left
from cuda_ops.packages import RELEASES, installed
from test_cuda_kernels import PACKAGES

from tokenring.backends import registry
from tokenring.backends.interfaces import AttentionKernel, Tiles
from tokenring.backends.kernels import auto as choosing
from tokenring.backends.kernels import numeric_trial as trial
from tokenring.backends.kernels.auto import Choosing
from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.backends.kernels.numeric_trial import TILES, Kind, fault
from tokenring.backends.kernels.reference import Reference
from tokenring.backends.kernels.torch_cuda import TorchCudnn, TorchEfficient, TorchFlash
from tokenring.cli.doctor.probes import _kernels
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.sequence.region import Patch
from tokenring.tables import trial_verdicts as verdicts
from tokenring.tables.trial_verdicts import Verdicts

CPU, HALF = torch.device("cpu"), torch.bfloat16
SQUARE = Patch(0, 128, 0, 128, None, 0)


@pytest.fixture(autouse=True)
def _forgets() -> None:
    """As a new process: what no file has is not known."""
    verdicts._in.cache_clear()


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


def test_what_raised_is_tried_again_by_the_next_process(tmp_path: Path) -> None:
    """Not by this one. The reason may be gone by then: a compiler that was not found, a library that was not loaded."""
    with operators(**BREAKS["other type"][0]):
        said = [fault(TorchCudnn(), kind("forward"), TILES, Verdicts(tmp_path)) for _ in range(2)]
        assert said[0] == said[1] and "it raised TypeError" in str(said[0])
    assert list(tmp_path.iterdir()) == []
    with operators():
        assert fault(TorchCudnn(), kind("forward"), TILES, Verdicts(tmp_path)) == said[0] and not calls
        verdicts._in.cache_clear()
        assert fault(TorchCudnn(), kind("forward"), TILES, Verdicts(tmp_path)) == ""


def test_a_mistake_of_ours_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And looks like no kernel that is left out."""

    def fails(*given: Any) -> Any:
        exec("assert False, 'a mistake'", {"__name__": "tokenring.backends.kernels.torch_cuda"})

    monkeypatch.setattr(TorchFlash, "call_forward", fails)
    with operators(), pytest.raises(AssertionError, match="a mistake"):
        fault(TorchFlash(), kind("forward"), TILES, Verdicts(tmp_path))


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


def test_on_a_cpu_nothing_is_imported_for_it(tmp_path: Path) -> None:
    code = (
        "import sys, torch, tokenring\n"
        "x = torch.zeros(1, 8, 2, 8)\n"
        "tokenring.attention(x, x, x, cp=tokenring.ContextParallel('self'))\n"
        "print([n for n in ('numeric_trial', 'torch_cuda') if f'tokenring.backends.kernels.{n}' in sys.modules])"
    )
    assert vendor.run(tmp_path, "-c", code).out == "[]\n"


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
    verdicts._in.cache_clear()


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
