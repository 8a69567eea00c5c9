"""What carries delta to CUDA's gradients: with as few passes over memory as said, and no less exact than before."""

from __future__ import annotations

import pytest
import torch
from cuda_ops.aten import operators
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenring.backends.kernels.delta import lean_stand_in, stand_in
from tokenring.backends.kernels.torch_cuda import TorchFlash
from tokenring.sequence.region import Patch

ROWS, BYTES_AN_ELEMENT = 512, 12
HALF = (torch.bfloat16, torch.float16)


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that operators read and write of tensors of one size, views aside; the widest of those that are made."""

    def __init__(self, count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.moved_bytes, self.widest = count, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        if not function.is_view and "empty" not in str(function):
            read = {name: each for name, each in kwargs.items() if name != "out"}
            self.moved_bytes += sum(map(self._size, tree_leaves((args, read, made))))
            self.widest = max([self.widest, *map(self._size, tree_leaves(made))])
        return made

    def _size(self, x: object) -> int:
        return x.element_size() if isinstance(x, torch.Tensor) and x.numel() == self.count else 0


def rows(dtype: torch.dtype, size: float, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """dout [rows, D], and its delta with an output of usual size."""
    random = torch.Generator().manual_seed(1)
    dout, out = (torch.randn(ROWS, head_dim, generator=random, dtype=torch.float64) for _ in range(2))
    dout = (dout.clamp(-1, 1) * size).to(dtype)
    return dout, (dout.double() * out).sum(dim=-1).float()


def kernel_bytes(dtype: torch.dtype) -> Traffic:
    """Of a gradient by delta, beside one by the output."""
    x, statistic = torch.randn(1, 4, 128, 64).to(dtype), torch.zeros(1, 4, 128)
    counted: list[Traffic] = []
    with operators():
        kernel, how = TorchFlash(), {"patch": Patch(0, 128, 0, 128), "scale": 0.1}
        for delta, out in ((statistic, None), (None, x)):
            with Traffic(x.numel()) as traffic:
                kernel.backward(x, x, x, x, statistic, delta, out=out, **how)  # type: ignore[arg-type]
            counted.append(traffic)
    counted[0].moved_bytes -= counted[1].moved_bytes
    return counted[0]


@pytest.mark.parametrize("dtype", HALF)
def test_few_passes(dtype: torch.dtype) -> None:
    dout, delta = rows(dtype, 1.0, 64)
    with Traffic(dout.numel()) as traffic:
        lean_stand_in(dout, delta)
    assert traffic.moved_bytes <= BYTES_AN_ELEMENT and traffic.widest == dtype.itemsize
    with Traffic(dout.numel()) as traffic:
        stand_in(dout.float(), delta).to(dtype)
    assert traffic.moved_bytes > 4 * BYTES_AN_ELEMENT, "what is counted is what was meant"


@pytest.mark.parametrize("dtype", HALF)
def test_kernels_take_it(dtype: torch.dtype) -> None:
    assert kernel_bytes(dtype).moved_bytes <= BYTES_AN_ELEMENT


@pytest.mark.parametrize("head_dim", [1, 64, 128])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.bfloat16, size) for size in (1.0, 1e-6, 1e-30, 1e30, 1e-38, 1e-40)]
    + [(torch.float16, size) for size in (1.0, 1e-3, 1e-6, 6e4)],
)
def test_no_less_exact(dtype: torch.dtype, size: float, head_dim: int) -> None:
    """Beside dout · delta / |dout|² in float64: as far off as in fp32 throughout, to 0.1%."""
    dout, delta = rows(dtype, size, head_dim)
    square = dout.double().square().sum(dim=-1)
    exact = dout.double() * (delta.double() / square.where(square > 0, 1.0))[..., None]
    errors = [
        float((made.double() - exact).norm() / exact.norm())
        for made in (lean_stand_in(dout, delta), stand_in(dout.float(), delta).to(dtype))
    ]
    assert errors[0] <= 1.001 * errors[1], errors


@pytest.mark.parametrize("dtype", HALF)
def test_rows_of_zeros_and_of_any_size_do_not_touch_each_other(dtype: torch.dtype) -> None:
    dout = torch.tensor([[0.0, -0.0], [1.0, 1.0], [6e-8, 0.0], [6e4, 6e4]], dtype=dtype)
    delta = torch.tensor([5.0, 4.0, 0.0, 6e4])
    made = lean_stand_in(dout, delta)
    wanted = [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [0.5, 0.5]]
    assert torch.equal(made, torch.tensor(wanted, dtype=dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_it_lies_as_dout_does(dtype: torch.dtype) -> None:
    """All heads of a token together: no kernel has to copy it."""
    record = torch.randn(32, 1, 100, dtype=torch.float32).to(dtype)  # statistics, then 4 heads of 16
    dout = record[..., 36:].view(32, 1, 4, 16).permute(1, 2, 0, 3)
    made = lean_stand_in(dout, torch.ones(1, 4, 32))
    assert made.transpose(1, 2).is_contiguous() and not made.isnan().any()
