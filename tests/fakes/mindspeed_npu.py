"""torch_npu as far as MindSpeed asks for it when it is imported, around the emulated device of tests/fakes/ascend.

What matters is there: the device, its operators, HCCL, and `transfer_to_npu`, which lets torch.cuda answer for NPUs.
All else that is looked up in torch_npu, torchair and Ascend's triton, none of which runs here, is a mock; so are
packages that MindSpeed imports for other features, where they are not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from ascend import device, hccl, operators
from ascend.schemas import OFFERS
from ranks import Here
from torch.utils._pytree import tree_map_only

OF_NPUS = ("torch_npu", "torchair", "triton")  # triton: Ascend's fork goes by the name of the one for GPUs
WHERE_MISSING = ("gpytorch", "pandas", "scipy", "six", "sklearn", "sqlalchemy")
WHEEL = next(iter(OFFERS))
VERSIONS = {"torch_npu": "2.7.1", "triton": "3.2.0"}
SHARED = (
    "is_available", "device_count", "current_device", "set_device", "current_stream", "synchronize", "Stream", "Event",
    "stream", "get_device_properties", "get_device_name", "empty_cache", "manual_seed", "manual_seed_all",
    "mem_get_info",
)  # fmt: skip


class _Mock(ModuleType):
    """A module in which everything is found."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class Finder(MetaPathFinder, Loader):
    """Finds any module of these packages."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Mock(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = f"{module.__name__}.py"
        if module.__name__ in VERSIONS:
            module.__version__ = VERSIONS[module.__name__]  # type: ignore[attr-defined]
        if module.__name__ == "torch_npu":
            module.npu = torch.get_device_module("npu")  # type: ignore[attr-defined]
            module.npu.mstx = _Mock("torch_npu.npu.mstx")  # marks for the profiler
            for name in OFFERS[WHEEL]:
                setattr(module, name, _copying(getattr(torch.ops.npu, name)))
        if module.__name__ == "triton.runtime.driver":
            module.active.get_current_target.return_value.backend = "npu"
        if module.__name__ == "torch_npu.contrib":
            module.transfer_to_npu = import_module("torch_npu.contrib.transfer_to_npu")  # type: ignore[attr-defined]
        if module.__name__ == "torch_npu.contrib.transfer_to_npu":
            _transfer()


def install(here: Here) -> None:
    """In a rank with emulated NPUs (ascend.ranks): a torch_npu to import, the operators of a wheel, and HCCL."""
    if "torch_npu" not in here.memory:
        sys.meta_path.insert(0, Finder(*OF_NPUS))
        sys.meta_path.append(Finder(*WHERE_MISSING))
        operators.register(WHEEL)
        hccl.install()
        # Each rank sees one NPU, as under ASCEND_RT_VISIBLE_DEVICES: some gradients make helpers on the first one.
        device.install(1)
        here.memory["torch_npu"] = True


def _copying(operator: Callable[..., Any]) -> Callable[..., Any]:
    """As the real operators do: operands that are not contiguous are copied. The emulation's refuse them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.contiguous, (args, kwargs))
        return operator(*args, **kwargs)

    return call


def _transfer() -> None:
    """As torch_npu.contrib.transfer_to_npu: whoever asks torch for CUDA gets an NPU."""
    npu, make = torch.get_device_module("npu"), torch.tensor
    for name in SHARED:
        if hasattr(npu, name):
            setattr(torch.cuda, name, getattr(npu, name))

    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)  # there is no memory to pin

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False) -> torch.Tensor:
        return self.to("npu", non_blocking=non_blocking)

    torch.tensor = tensor
    torch.Tensor.cuda = cuda  # type: ignore[method-assign,assignment]
    torch.Tensor.npu = cuda  # type: ignore[attr-defined]
    device.NpuTensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
