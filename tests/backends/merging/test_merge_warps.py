"""The Triton kernel where warps hold the same rows: each reads, computes and stores them, and none waits for another
but at a barrier. Triton's interpreter has no warps, so that the kernel runs here over a few lines of its language, the
whole program once for each warp, and each warp goes on to the next barrier before the others begin."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from merging import CASES, check, check_nan
from patience import patient

FILE = Path(__file__).resolve().parents[3] / "backends" / "merging" / "triton.py"
WARPS = 3
BARRIER = "    tl.debug_barrier()\n"
SOME = [case for case in CASES if case.name in ("plain", "outputs, bf16", "records", "heads of 80", "heads of 128")]


class Turns:
    """The warps of one program, each until it comes to a barrier or to its end."""

    def __init__(self) -> None:
        self.may_go = [threading.Semaphore(0) for _ in range(WARPS)]
        self.current = 0

    def pass_on(self, warp: int) -> None:
        self.may_go[(warp + 1) % WARPS].release()

    def barrier(self) -> None:
        warp = int(threading.current_thread().name)
        self.pass_on(warp)
        self.may_go[warp].acquire()

    def run(self, program: Callable[[], None]) -> None:
        def one(warp: int) -> None:
            self.may_go[warp].acquire()
            program()
            self.pass_on(warp)

        threads = [threading.Thread(target=one, args=(warp,), name=str(warp), daemon=True) for warp in range(WARPS)]
        for thread in threads:
            thread.start()
        self.pass_on(WARPS - 1)
        for thread in threads:
            thread.join(patient(20))
        assert not any(thread.is_alive() for thread in threads), "the warps come to different barriers"


class Pointer:
    """Elements of a tensor's storage."""

    def __init__(self, data: torch.Tensor, at: Any) -> None:
        self.data, self.at, self.dtype = data, at, SimpleNamespace(element_ty=data.dtype)

    def __add__(self, offsets: Any) -> Pointer:
        return Pointer(self.data, self.at + offsets)


def pointer(x: torch.Tensor) -> Pointer:
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return Pointer(whole, x.storage_offset())


def load(where: Pointer, mask: torch.Tensor, other: float) -> torch.Tensor:
    return torch.where(mask, where.data[where.at.masked_fill(~mask, 0)], other)


def store(where: Pointer, values: torch.Tensor, mask: torch.Tensor) -> None:
    where.data[where.at[mask]] = values[mask]


def larger(x: torch.Tensor, y: torch.Tensor, propagate_nan: str = "") -> torch.Tensor:
    """As on a GPU; Triton's interpreter passes NaN on in any case."""
    return torch.maximum(x, y) if propagate_nan == "all" else torch.fmax(x, y)


class Jitted:
    """A kernel: `kernel[grid](...)` runs all its programs."""

    turns: Turns
    program = 0

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*given: Any, num_warps: int, **constants: Any) -> None:
            arguments = [pointer(x) if isinstance(x, torch.Tensor) else x for x in given]
            for Jitted.program in range(*grid):
                Jitted.turns = Turns()
                Jitted.turns.run(lambda: self.function(*arguments, **constants))

        return launch


def language() -> ModuleType:
    """What the kernel uses of triton.language."""
    made: Any = ModuleType("triton.language")
    made.program_id, made.debug_barrier = lambda axis: Jitted.program, lambda: Jitted.turns.barrier()
    made.arange, made.where, made.exp, made.log = torch.arange, torch.where, torch.exp, torch.log
    made.load, made.store, made.float32, made.int64 = load, store, torch.float32, torch.int64
    made.maximum, made.PropagateNan = larger, SimpleNamespace(ALL="all")
    found: ModuleType = made
    return found


def merger(monkeypatch: pytest.MonkeyPatch, text: str, folder: Path) -> Any:
    """What the kernel's text makes of itself."""
    triton: Any = ModuleType("triton")
    triton.jit, triton.language = Jitted, language()
    for name, module in {"triton": triton, "triton.language": triton.language}.items():
        monkeypatch.setitem(sys.modules, name, module)
    (folder / "merge_of_warps.py").write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("merge_of_warps", folder / "merge_of_warps.py")
    assert spec is not None and spec.loader is not None
    made: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "merge_of_warps", made)
    spec.loader.exec_module(made)
    return made.make()


@pytest.mark.parametrize("case", SOME, ids=str)
def test_warps_that_are_late(case: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check(merger(monkeypatch, FILE.read_text(encoding="utf-8"), tmp_path), case)


@pytest.mark.parametrize("how", ["no barrier", "the lse before it", "the barrier last"])
def test_without_its_order_they_merge_twice(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = FILE.read_text(encoding="utf-8")
    (stored,) = (line for line in text.splitlines(keepends=True) if line.startswith("    tl.store(lse_at"))
    assert text.count(BARRIER) == 1 and BARRIER + stored in text
    without = text.replace(BARRIER, "")
    changed = {
        "no barrier": without,
        "the lse before it": text.replace(BARRIER + stored, stored + BARRIER),
        "the barrier last": without.replace("mask=here)\n\n\n", "mask=here)\n" + BARRIER + "\n\n"),
    }[how]
    assert changed != text and changed.count(BARRIER) == (how != "no barrier")
    with pytest.raises(AssertionError, match=r"lse \(.*\): errors"):
        check(merger(monkeypatch, changed, tmp_path), SOME[0])


def test_nan_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = FILE.read_text(encoding="utf-8")
    check_nan(merger(monkeypatch, text, tmp_path))
    changed = text.replace(", propagate_nan=tl.PropagateNan.ALL", "")
    assert changed != text
    with pytest.raises(AssertionError, match="NaN is gone"):
        check_nan(merger(monkeypatch, changed, tmp_path))
