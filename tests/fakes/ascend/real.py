"""A real torch_npu in a process of its own, over the stub libraries of hardware/npu/cann_stubs.py.

It has no devices, but its operators have their real signatures, checked by torch's dispatcher, and its kernels for
the device "meta" say the shapes and dtypes of results. For the device "cpu" it has none: there our goldens compute,
under the real signatures, so that a whole kernel runs on CPU tensors as it would on NPUs.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ranks import Here, RankPools, Ranks

from ascend.operators import by_name, on_cpu_tensors
from tokenring.backends.kernels.npu_fusion import NpuFusion
from tokenring.backends.kernels.npu_operator import find

IMPORT_SECONDS = 100.0
LATER = "npu_fusion_attention_v2", "npu_fusion_attention_grad_v2"
USED = ("npu_fusion_attention", "npu_fusion_attention_grad", *LATER)  # by the kernel npu-fusion
Made = tuple[tuple[int, ...], torch.dtype]


class Seen(NamedTuple):
    """One call that a golden answered: the operator, its arguments, and what its first three results were."""

    name: str
    arguments: dict[str, Any]
    made: tuple[Made, ...]


seen: list[Seen] = []
registered: list[torch.library.Library] = []  # an operator lives as long as its library


class RealPools(RankPools):
    """Pools whose ranks have a real torch_npu, from this folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def _make(self, world_size: int) -> Ranks:
        made = super()._make(world_size)
        made.within(IMPORT_SECONDS, load, self._folder)
        return made


def load(here: Here, folder: Path) -> None:
    """Imports torch_npu and registers the goldens. Raises RuntimeError: what is missing, and what to run."""
    stubs = sorted(folder.glob("stubs/*.so"))
    if not stubs or not (folder / "torch_npu").is_dir():
        raise RuntimeError(f"{folder} lacks torch_npu or stubs: docs/ascend-emulation.md has the commands for both")
    # The loader takes a library for the one that it looks for if it goes by the same name, wherever it came from.
    for each in sorted(stubs, key=lambda path: path.name != "libascendcl.so"):
        ctypes.CDLL(str(each), ctypes.RTLD_GLOBAL)
    sys.path.append(str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch_npu")
        # It would ask the chip for its name, to warn of torch.compile.
        meta: Any = importlib.import_module("torch_npu.op_plugin.meta._meta_registrations")
    meta._npu_fusion_attention_warning_printed = True
    register_goldens()


def register_goldens() -> None:
    """Lets our goldens compute the operators that the kernel uses, on CPU tensors; their calls are noted in `seen`."""
    library = torch.library.Library("npu", "IMPL")  # type: ignore[no-untyped-call]
    registered.append(library)
    for name in USED:
        library.impl(name, _noted(name), "CPU")  # type: ignore[no-untyped-call]


def operator(name: str) -> Any:
    """What torch_npu holds under this name. Raises AttributeError."""
    return getattr(torch.ops.npu, name).default


def _noted(name: str) -> Callable[..., tuple[Any, ...]]:
    schema = operator(name)._schema
    compute = on_cpu_tensors(schema)

    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        made = compute(*args, **kwargs)
        seen.append(Seen(name, by_name(schema, args, kwargs), shapes(made)))
        return made

    return call


def kernel_of(version: int) -> NpuFusion:
    """The kernel with the first or the second version of the operators."""
    made = NpuFusion()
    if version == 2:
        made._forward, made._gradient = map(find, LATER)
    return made


def on_meta(call: Seen) -> tuple[Made, ...]:
    """What the real operator says that it would make of the same call, its first three results."""
    made = operator(call.name)(**{name: _to_meta(value) for name, value in call.arguments.items()})
    return shapes(made)


def shapes(made: tuple[Any, ...]) -> tuple[Made, ...]:
    """Of the first three results, which are all that the kernel reads."""
    return tuple((tuple(x.shape), x.dtype) for x in made[:3])


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value
