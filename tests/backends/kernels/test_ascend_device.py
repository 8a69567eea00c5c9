"""The emulated device: what tokenring and its users do with tensors works, what an NPU refuses is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend.device import host_waits, raw
from ascend.ranks import NpuPools
from ranks import Here
from torch.utils.checkpoint import checkpoint


def npu() -> Any:
    return torch.get_device_module("npu")


def moves(here: Here) -> None:
    here_is = torch.randn(2, 3)
    x = here_is.to("npu")
    assert (x.device, x.is_npu, x.get_device()) == (torch.device("npu", 0), True, 0)  # type: ignore[attr-defined]
    assert torch.equal(x.cpu(), here_is) and torch.equal(raw(x), here_is)
    there = x.to("npu:5")
    assert there.device == torch.device("npu:5") and there.to(x).device == x.device
    assert torch.zeros_like(there).device == (there * 2).device == there.bfloat16().device == there.device
    with npu().device(3):
        assert torch.ones(2, device="npu").device == torch.tensor([1.0], device="npu").device == torch.device("npu:3")
        assert here_is.to("npu").device == torch.nn.Linear(2, 2).to("npu").weight.device == torch.device("npu:3")
    assert npu().current_device() == 0 and npu().device_count() == 8
    assert x.tolist() == here_is.tolist() and torch.empty_like(x, device="cpu").device.type == "cpu"


def views(here: Here) -> None:
    """What runtime/pool.py does with its bytes."""
    pool = torch.zeros(64, dtype=torch.uint8, device="npu")
    typed = pool[:60].view(torch.float32).as_strided((2, 2), (4, 1), 2)
    typed.fill_(3.0)
    assert typed.stride() == (4, 1) and typed.storage_offset() == 2
    assert pool.view(torch.float32).tolist()[:9] == [0, 0, 3, 3, 0, 0, 3, 3, 0]
    assert typed.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
    total = torch.empty(2, 2, device="npu")
    assert torch.logaddexp(typed, typed, out=total) is total
    typed.lerp_(total, 0.5).masked_fill_(typed > 100, 0.0)
    typed[0] += 1
    wanted = 3 + 0.5 * torch.log(torch.tensor(2.0))
    torch.testing.assert_close(typed.cpu(), wanted + torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    assert torch.cat([typed, total]).shape == (4, 2) and typed.permute(1, 0).contiguous().stride() == (2, 1)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        with torch.autocast(x.device.type, enabled=False):
            return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        given: torch.Tensor = 2 * x * grads[0]
        return given


def times_twice(x: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    made = Twice.apply(x @ leaf)  # type: ignore[no-untyped-call]
    assert isinstance(made, torch.Tensor)
    return made


def gradients(here: Here) -> None:
    for index in (0, 6):
        npu().set_device(index)
        leaf = torch.nn.Parameter(torch.randn(3, 3).to("npu"))
        x = torch.randn(2, 3, device="npu", requires_grad=True)
        made = checkpoint(times_twice, x, leaf, use_reentrant=False)
        torch.autograd.backward(made.sum())
        plain, plain_leaf = (y.detach().cpu().requires_grad_() for y in (x, leaf))
        torch.autograd.backward(((plain @ plain_leaf) ** 2).sum())
        for got, wanted in ((x, plain), (leaf, plain_leaf)):
            assert got.grad is not None and got.grad.device == torch.device("npu", index)
            torch.testing.assert_close(got.grad.cpu(), wanted.grad)
    npu().set_device(0)


def streams(here: Here) -> None:
    module = npu()
    side = module.Stream(priority=-1)
    assert side.device == torch.device("npu:0") and module.current_stream() is module.default_stream()
    with module.stream(side):
        assert module.current_stream() is side
    event = side.record_event(module.Event(enable_timing=True))
    module.current_stream().wait_event(event)
    torch.ones(2, device="npu").record_stream(side)
    assert event.query() and module.mem_get_info()[0] > 0 and module.get_device_name() == "Ascend910B3"
    with pytest.raises(RuntimeError, match="never recorded"):
        side.wait_event(module.Event())
    with pytest.raises(TypeError, match="record_stream wants"):
        torch.ones(2, device="npu").record_stream(object())  # type: ignore[arg-type]


def refusals(here: Here) -> None:
    x, y = torch.ones(2, device="npu"), torch.ones(2)
    mixtures: list[Callable[[], torch.Tensor]] = [
        lambda: x + y, lambda: torch.cat([x, y]), lambda: x[torch.tensor([0])], lambda: x.add_(y),
    ]  # fmt: skip
    for mixed in mixtures:
        with pytest.raises(RuntimeError, match="at least two devices, npu:0 and cpu"):
            mixed()
    with pytest.raises(RuntimeError, match="at least two devices, npu:0 and npu:1"):
        x + x.to("npu:1")
    assert (x * torch.tensor(2.0)).tolist() == [2.0, 2.0]  # a number
    with pytest.raises(RuntimeError, match="Invalid NPU device ID 8"):
        torch.ones(2, device="npu:8")
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(2, device="npu", generator=torch.Generator())
    with pytest.raises(NotImplementedError, match="changes what memory a tensor has"):
        x.resize_(3)
    with pytest.raises(NotImplementedError, match="changed a tensor's shape"):
        torch.add(x, x, out=torch.empty(0, device="npu"))
    with pytest.raises(TypeError, match="not on an emulated NPU"):
        raw(y)


def waits(here: Here) -> None:
    x, few = torch.ones(2, device="npu"), torch.ones(2)
    seen, at, counts = x > 0, torch.zeros(1, dtype=torch.int64, device="npu"), torch.tensor([2, 0]).to("npu")
    host_waits.clear()
    ((x + 1) * 2).to(torch.bfloat16).copy_(few, non_blocking=True)
    x.to("cpu", non_blocking=True), few.to("npu", non_blocking=True), x.to("npu:1")
    x[at] += x.index_select(0, at) * x.masked_fill(seen, 2.0)[0]
    x.repeat_interleave(2), x.repeat_interleave(counts, output_size=2), x.where(seen, 0.0)
    x[1:] = 3.0
    assert host_waits == []
    waiting: dict[str, Callable[[], object]] = {
        "aten::_local_scalar_dense": lambda: x.sum().item(),
        "aten::_to_copy to the host": lambda: x.cpu(),
        "aten::copy_ from the host": lambda: few.to("npu"),
        "aten::copy_ to the host": lambda: few.copy_(x),
        "aten::index": lambda: x[seen],
        "aten::index_put_": lambda: x.index_put_((seen,), x[0]),
        "aten::nonzero": lambda: torch.where(seen),
        "aten::_unique2": lambda: torch.ops.aten._unique2(x),
        "aten::repeat_interleave": lambda: x.repeat_interleave(counts),
    }
    for name, act in waiting.items():
        host_waits.clear()
        act()
        assert host_waits == [name]


@pytest.mark.parametrize("what", [moves, views, gradients, streams, refusals, waits], ids=lambda what: what.__name__)
def test_device(npus: NpuPools, what: Any) -> None:
    npus(1)(what)


def test_this_process_has_none() -> None:
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
