"""Tiles of how many sizes cuDNN is given, each of which torch builds and keeps a graph for; and what it copies."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from cuda_ops.aten import calls, operators
from torch.utils._python_dispatch import TorchDispatchMode

from tokenring import Causal, Documents, Mask
from tokenring.backends.kernels import torch_cuda
from tokenring.backends.kernels.auto import Choosing
from tokenring.backends.kernels.torch_cuda import MOST_IRREGULAR, MOST_SHAPES, TorchCudnn, TorchFlash
from tokenring.lowering.lower import lower
from tokenring.lowering.program import Attend
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.region import Patch
from tokenring.sequence.workload import Workload

RANKS, LENGTH, HALF = 4, 2048, torch.bfloat16
WORKLOAD = Workload(1, LENGTH, LENGTH, 2, 1, 8, HALF)
PASSES = 2  # each has graphs of its own


@pytest.fixture
def chosen() -> Iterator[Choosing]:
    """As on an H100 without packages."""
    with operators():
        made = {"torch-cudnn": TorchCudnn(), "torch-flash": TorchFlash()}
        yield Choosing(tuple(made), lambda name: made[name], lambda *_: None)


def step(kernel: Choosing, mask: Mask, rank: int = 1) -> None:
    """The kernel calls of one rank, in both passes."""
    layout = make_layout("zigzag", RANKS, LENGTH)
    schedule = make_schedule("ring", layout, layout, mask)
    program = lower(schedule, rank, "forward", WORKLOAD, supports=kernel.supports_patch)
    for patch in (each.patch for each in program.instructions if isinstance(each, Attend)):
        both(kernel, patch)


def both(kernel: Choosing, patch: Patch) -> None:
    q, k = (torch.zeros(1, tokens, heads, 8, dtype=HALF).transpose(1, 2)
            for tokens, heads in ((patch.rows, 2), (patch.cols, 1)))  # fmt: skip
    out, lse = kernel.forward(q, k, k, patch=patch, scale=1.0)
    kernel.backward(q, q, k, k, lse, None, out=out, patch=patch, scale=1.0)


def graphs() -> set[object]:
    """Those that torch has built so far, of both passes."""
    return {(name, how["graph"]) for name, how in calls if name.startswith("cudnn")}


def packed(dice: random.Random, multiple: int = 1) -> Mask:
    """Documents as a training step brings them."""
    ends = sorted({multiple * dice.randrange(1, LENGTH // multiple) for _ in range(12)})
    return Documents([0, *ends, LENGTH]) & Causal()


def test_packed_documents_build_few_graphs(chosen: Choosing) -> None:
    """20 steps, each with other documents; then causal calls, all by cuDNN as they are without documents."""
    dice, built = random.Random(1), []
    for _ in range(20):
        step(chosen, packed(dice))
        built.append(len(graphs()))
    assert built[-1] <= PASSES * (MOST_IRREGULAR + 4), f"graphs after each step: {built}"
    assert built[-1] <= built[4] + 2 * PASSES, "regular ones alone in later steps"
    calls.clear()
    step(chosen, Causal())
    assert {name for name, _ in calls} == {"cudnn", "cudnn backward"}


def test_regular_documents_are_bounded_too(chosen: Choosing) -> None:
    """Documents that are filled up to multiples of 128: few sizes are needed, and cuDNN takes all of them."""
    dice = random.Random(2)
    for _ in range(20):
        step(chosen, packed(dice, 128))
    assert 10 < len(graphs()) <= PASSES * MOST_SHAPES
    sides = {side for name, how in calls if name == "cudnn" for side in (how["rows"], how["cols"])}
    assert all(side % 128 == 0 for side in sides)


def test_a_process_builds_so_many(chosen: Choosing) -> None:
    kernel = TorchCudnn()
    for at in range(MOST_SHAPES):
        regular = Patch(0, 128, 0, 128 * (1 + at))
        assert kernel.avoids(regular) is None
        kernel._built.add(torch_cuda._shape(regular))
    assert "yet another size" in str(kernel.avoids(Patch(0, 256, 0, 128)))
    assert kernel.avoids(Patch(5, 133, 3, 131)) is None, "it has that one"
    assert "yet another size" in str(kernel.avoids(Patch(0, 128, 0, 128, None, 0))), "causal is another one"


def test_sizes_that_stay_are_computed_by_cudnn(chosen: Choosing) -> None:
    """A few irregular ones, as those of a length that is no multiple of 128: again and again."""
    for _ in range(3):
        for rows in (100, 200, 300):
            both(chosen, Patch(0, rows, 0, rows, None, 0))
    assert {name for name, _ in calls} == {"cudnn", "cudnn backward"}


@pytest.mark.parametrize(("version", "avoids"), [(91002, True), (91500, True), (91501, False), (None, False)])
def test_versions_that_read_beyond_irregular_tiles(
    chosen: Choosing, monkeypatch: pytest.MonkeyPatch, version: int | None, avoids: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    kernel = TorchCudnn()
    for patch in (Patch(0, 100, 0, 128), Patch(0, 128, 0, 100)):
        assert ("reads beyond" in str(kernel.avoids(patch))) == avoids
    assert kernel.avoids(Patch(0, 128, 0, 256)) is None


def test_a_cudnn_that_does_not_fit_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", fails)
    assert torch_cuda.cudnn_version() is None


# ---------- copies


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts copies of tensors of one shape."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("batch", "heads", "copies"), [(1, 4, 0), (1, 1, 0), (2, 4, 2)], ids=["batch 1", "one head", "batch 2"]
)
def test_rows_of_one_batch_entry_are_not_copied(chosen: Choosing, batch: int, heads: int, copies: int) -> None:
    """dout and out are rows of a call's tensors: for batch 1 they lie as cuDNN wants them."""
    kernel = TorchCudnn()
    whole = [torch.randn(batch, 512, heads, 8).to(HALF) for _ in range(4)]
    q, k, dout, out = (x[:, 128:256].transpose(1, 2) for x in whole)
    lse, patch = torch.zeros(batch, heads, 128), Patch(0, 128, 0, 128)
    kernel.forward(q, k, k, patch=patch, scale=0.3)
    with Copies() as counted:  # type: ignore[no-untyped-call]
        made = kernel.backward(dout, q, k, k, lse, None, out=out, patch=patch, scale=0.3)
    assert counted.count == copies
    right = kernel.backward(dout.contiguous(), q, k, k, lse, None, out=out.contiguous(), patch=patch, scale=0.3)
    assert all(torch.equal(x, y) for x, y in zip(made, right, strict=True))
