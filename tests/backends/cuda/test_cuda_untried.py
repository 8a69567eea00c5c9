"""What a trial leaves out or cannot tell: tiles that do harm, memory that ran out, a device that failed; and the sizes
that a program reserves when it is bound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_ops import aten
from cuda_ops.aten import calls, operators
from cuda_ops.broken import BACKWARD, FORWARD, raising
from ranks import Here, RankPools
from test_cuda_trial import for_tests

from tokenring import Causal, attention
from tokenring.backends import registry
from tokenring.backends.interfaces import AttentionKernel, Tiles
from tokenring.backends.kernels import numeric_trial as trial
from tokenring.backends.kernels.auto import Choosing
from tokenring.backends.kernels.numeric_trial import Kind, fault
from tokenring.backends.kernels.torch_cuda import MOST_IRREGULAR, TorchCudnn, TorchEfficient, TorchFlash
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.ir.schedule_data import PASSES
from tokenring.sequence.region import Patch
from tokenring.sequence.workload import Workload
from tokenring.tables import trial_verdicts as verdicts
from tokenring.tables.trial_verdicts import Verdicts

CPU, HALF = torch.device("cpu"), torch.bfloat16
LENGTH, HEAD_DIM = 256, 40
WORKLOAD = Workload(1, LENGTH, LENGTH, 4, 2, HEAD_DIM, HALF)
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
SQUARES = [Patch(0, side, 0, side) for side in range(101, 121)]  # irregular, each of another size


@pytest.fixture(autouse=True)
def _forgets() -> None:
    """As a new process: what no file has is not known."""
    verdicts._in.cache_clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The registry as on an H100 whose memory is the CPU's."""
    for_tests(monkeypatch, tmp_path)
    yield
    registry._choosing.cache_clear()


def rows_of_cudnn() -> set[int]:
    return {how["rows"] for name, how in calls if name == "cudnn"}


def forward(kernel: Any, patch: Patch) -> None:
    q, k = (torch.randn(1, heads, patch.rows, HEAD_DIM).to(HALF) for heads in (4, 2))
    kernel.forward(q, k, k, patch=patch, scale=0.2)


@pytest.mark.parametrize(("version", "irregular"), [(91002, False), (91501, True)])
@pytest.mark.parametrize("name", ["torch-cudnn", "auto"])
def test_a_tile_that_does_harm_is_not_tried(
    hopper: None, monkeypatch: pytest.MonkeyPatch, name: str, version: int, irregular: bool
) -> None:
    """Neither by name: cuDNN up to 9.15.0 reads beyond irregular tiles."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    trial._place.cache_clear()
    kernel = registry.make_kernel(name, CPU)
    with operators():
        for direction in PASSES:
            if isinstance(kernel, Choosing):
                kernel.tried_picks(direction, 128, HEAD_DIM, HALF)
            assert registry.kernel_refusal(kernel, WORKLOAD, CPU, direction) is None
    trial._place.cache_clear()
    assert 128 in rows_of_cudnn() and (70 in rows_of_cudnn()) == irregular


def test_a_device_that_failed_is_known_to_this_process_alone(tmp_path: Path) -> None:
    """Another stream may have broken it while this kernel was tried."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    kind = Kind("forward", HEAD_DIM, HALF, CPU)
    with operators(**{FORWARD: raising(error)}):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            fault(TorchCudnn(), kind, kept=Verdicts(tmp_path))
        assert "illegal memory" in str(fault(TorchCudnn(), kind, kept=Verdicts(tmp_path)))
    assert list(tmp_path.iterdir()) == []


# ---------- memory that ran out


def once_without_memory() -> Any:
    """cuDNN's forward, the first time."""
    errors: list[Exception] = [NO_MEMORY]

    def fails(*given: Any, **named: Any) -> Any:
        if errors:
            raise errors.pop()
        return aten.cudnn_forward(*given, **named)

    return fails


def attends(here: Here, kernel: str, broken_ranks: tuple[int, ...], folder: str) -> list[str]:
    """What each of two equal calls raises, "" where it computes."""
    broken = {FORWARD: once_without_memory()} if here.rank in broken_ranks else {}
    said = []
    with pytest.MonkeyPatch.context() as patched, operators(**broken):
        for_tests(patched, Path(folder) / str(here.rank))
        try:
            with here.cp(kernel=kernel, schedule="ring", layout="contiguous") as cp:
                q, k, v = (torch.randn(1, LENGTH // here.world_size, heads, HEAD_DIM).to(HALF) for heads in (4, 2, 2))
                for _ in range(2):
                    try:
                        attention(q, k, v, cp=cp, mask=Causal())
                        said.append("")
                    except (UnsupportedError, ConfigurationError) as error:
                        said.append(f"{type(error).__name__}: {error} from {type(error.__cause__).__name__}")
        finally:
            registry._choosing.cache_clear()
    return said


@pytest.mark.parametrize("broken_ranks", [(0, 1), (1,)], ids=["all", "one"])
def test_by_name_all_hear_and_the_next_call_tries_again(
    ranks: RankPools, tmp_path: Path, broken_ranks: tuple[int, ...]
) -> None:
    found = ranks(2)(attends, "torch-cudnn", broken_ranks, str(tmp_path))
    for rank, (first, second) in enumerate(found):
        assert "it could not be tried: CUDA out of memory" in first
        kind = "UnsupportedError" if rank in broken_ranks else "Disagreement"
        assert first.startswith(f"{kind}: ") and second == "", (rank, first, second)
        assert first.endswith("from OutOfMemoryError") == (rank in broken_ranks)


def test_one_rank_alone_tries_again_too(ranks: RankPools, tmp_path: Path) -> None:
    ((first, second),) = ranks(1)(attends, "torch-cudnn", (0,), str(tmp_path))
    assert first.startswith("UnsupportedError: kernel 'torch-cudnn' cannot compute this call") and second == ""


@pytest.mark.parametrize("broken_ranks", [(0, 1), (1,)], ids=["all", "one"])
def test_auto_computes_without_a_trial(ranks: RankPools, tmp_path: Path, broken_ranks: tuple[int, ...]) -> None:
    assert ranks(2)(attends, "auto", broken_ranks, str(tmp_path)) == [["", ""]] * 2


def test_a_program_is_bound_untried_and_the_next_one_tries(hopper: None, caplog: pytest.LogCaptureFixture) -> None:
    """It is no verdict; and nothing is tried in the middle of a pass."""
    kernel, patch = registry.make_kernel("auto", CPU), Patch(0, 128, 0, 128, None, 0)
    assert isinstance(kernel, Choosing)
    tiles = Tiles((patch,), "forward", HEAD_DIM, HALF, CPU)
    with operators(**{FORWARD: raising(NO_MEMORY)}):
        held = kernel.holding(tiles)
    assert "takes torch-cudnn untried for tiles forward" in caplog.text and kernel.faults() == {}
    with operators():
        forward(held, patch)
        assert rows_of_cudnn() == {128} and len(calls) == 1
        calls.clear()
        kernel.holding(tiles)
    assert rows_of_cudnn() == {128, 70}, "the next program's"


# ---------- sizes


def test_what_is_bound_is_what_runs(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of cuDNN are counted when a program is bound, so that no other kernel steps in, and is tried, in a pass."""
    kernel = registry.make_kernel("auto", CPU)
    assert isinstance(kernel, Choosing)
    tried: list[str] = []
    real = trial._tried

    def noted(made: AttentionKernel, *given: Any) -> str:
        tried.append(made.name)
        return real(made, *given)

    monkeypatch.setattr(trial, "_tried", noted)
    with operators():
        held = kernel.holding(Tiles(tuple(SQUARES), "forward", HEAD_DIM, HALF, CPU))
        assert tried == ["torch-cudnn"] * 2 + ["torch-flash"] * 2
        calls.clear()
        for _ in range(2):
            for patch in reversed(SQUARES):  # in whatever order: the first of the program's have it
                forward(held, patch)
    assert rows_of_cudnn() == {patch.rows for patch in SQUARES[:MOST_IRREGULAR]}
    assert len(tried) == 4


def test_masks_are_held_by_who_is_taken() -> None:
    """Those of tiles that cuDNN leaves over, for want of sizes, are made when the program is bound."""
    with operators():
        made = {each.name: each for each in (TorchCudnn(), TorchEfficient())}
        kernel = Choosing(tuple(made), lambda name: made[name], lambda *_: None)
        given: list[int] = []
        efficient = made["torch-efficient"]
        assert isinstance(efficient, TorchEfficient)
        holding = efficient.holding
        efficient.holding = lambda tiles: given.append(len(tiles.patches)) or holding(tiles)  # type: ignore
        kernel.holding(Tiles(tuple(SQUARES), "forward", HEAD_DIM, HALF, CPU))
    assert given == [len(SQUARES) - MOST_IRREGULAR]


def test_the_tiles_of_a_trial_cost_no_sizes() -> None:
    """Nor the one that asks forward how its lse looks."""
    with operators():
        kernel = TorchCudnn()
        for direction in reversed(PASSES):
            assert fault(kernel, Kind(direction, HEAD_DIM, HALF, CPU), kept=Verdicts(None)) == ""
        made = {kernel.name: kernel, "torch-flash": TorchFlash()}
        chosen = Choosing(tuple(made), lambda name: made[name], lambda *_: None)
        calls.clear()
        for patch in SQUARES:
            forward(chosen, patch)
        assert len(rows_of_cudnn()) == MOST_IRREGULAR


def test_parts_without_a_graph_cost_no_sizes() -> None:
    """A band's parts of one row or column are computed by plain attention."""
    with operators():
        kernel, band = TorchCudnn(), Patch(0, 64, 0, 64, -9, 0)
        kernel.reserve(band)
        assert kernel._built and all(rows > 1 and cols > 1 for rows, cols, _ in kernel._built)


def test_a_trial_asks_for_irregular_tiles_beyond_all_sizes() -> None:
    """A tile of a size that there is already may come in another dtype or head dim."""
    with operators():
        kernel = TorchCudnn()
        for patch in SQUARES[:MOST_IRREGULAR]:
            kernel.reserve(patch)
        calls.clear()
        assert fault(kernel, Kind("forward", HEAD_DIM, HALF, CPU), kept=Verdicts(None)) == ""
        assert rows_of_cudnn() == {128, 70}


def test_a_gradient_without_memory_names_its_pass(hopper: None, caplog: pytest.LogCaptureFixture) -> None:
    kernel = registry.make_kernel("auto", CPU)
    with operators(**{BACKWARD: raising(NO_MEMORY)}):
        kernel.tried_picks("backward", 128, HEAD_DIM, HALF)  # type: ignore[attr-defined]
    assert "takes torch-cudnn untried for tiles backward" in caplog.text
