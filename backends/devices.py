"""Devices as the library uses them: clocks, streams, memory, a name; the same for CPU, CUDA and Ascend.

The type that a tensor says (`tensor.device.type`) decides, and nothing else: under torch_npu's transfer_to_npu
`is_cuda`, `torch.cuda.is_available()` and even the device string "cuda" answer for an NPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

from tokenring.errors import BackendUnavailable, UnsupportedError

GRAPHS = ("CUDAGraph", "NPUGraph", "XPUGraph")  # what a device's module calls them
NO_GRAPHS = "device {} has no graphs to capture calls in: call tokenring.attention itself"
ACCELERATORS = ("cuda", "npu", "xpu", "mps")  # the types that are looked for; device_of takes any


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device: held by tensors of this process, free, and in total. None: not known."""

    in_use_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None


class DeviceRuntime(Protocol):
    """One device. Calls may return before their work is done, so that a clock has to wait for it."""

    type: str

    @property
    def name(self) -> str:
        """The model, as "Ascend910B3"."""

    def synchronize(self) -> None:
        """Wait on the host until everything that was queued is done, on every stream."""

    def clock(self) -> float:
        """Return perf_counter seconds once all that was queued is done: the only clock to time work with."""

    def stream_clock(self) -> float:
        """Return perf_counter seconds once the current stream is done; other streams go on meanwhile."""

    def current_stream(self) -> Any:
        """Return the stream that calls are queued on; None on a device without streams."""

    def new_stream(self, high_priority: bool = False) -> Any:
        """Make another stream; None on a device without streams."""

    def new_event(self) -> Any:
        """Make an event, to record in one stream and wait for elsewhere; None on a device without streams."""

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Queue calls on the stream, inside the context."""

    def capture(self) -> AbstractContextManager[Any]:
        """Capture work, inside the context, instead of doing it: in the graph that it gives, whose `replay` does it.

        Raises UnsupportedError on a device without graphs.
        """

    def memory(self) -> DeviceMemory:
        """Return the bytes that are in use, free, and there in total."""


def device_of(where: torch.Tensor | torch.device | str) -> DeviceRuntime:
    """Return the device of a tensor, or the one that is named."""
    device = where.device if isinstance(where, torch.Tensor) else torch.device(where)
    return Cpu() if device.type == "cpu" else Accelerator(device)


def has_device(kind: str) -> bool:
    """Return True if tensors of this type can be made here, and their own type is the one asked for.

    transfer_to_npu makes an NPU's tensors where "cuda" was asked for: that is no CUDA device.
    """
    module = getattr(torch, kind, None)
    if kind == "cpu":
        return True
    if module is None or not module.is_available():
        return False
    return torch.empty(0, device=kind).device.type == kind


def accelerator_types() -> list[str]:
    """Return the types of accelerators that tensors can be made on here."""
    return [kind for kind in ACCELERATORS if has_device(kind)]


class Cpu:
    """The CPU, on which everything is done when a call returns."""

    type = "cpu"

    @property
    def name(self) -> str:
        """The processor's model."""
        from tokenring.display.console import processor

        return processor()

    def synchronize(self) -> None:
        """Do nothing: everything is done when a call returns."""
        pass

    def clock(self) -> float:
        """Return perf_counter seconds."""
        return perf_counter()

    def stream_clock(self) -> float:
        """Return perf_counter seconds."""
        return perf_counter()

    def current_stream(self) -> Any:
        """Return None: there are no streams."""
        return None

    def new_stream(self, high_priority: bool = False) -> Any:
        """Return None: there are no streams."""
        return None

    def new_event(self) -> Any:
        """Return None: there are no streams."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Do nothing, inside the context: there are no streams."""
        return nullcontext()

    def capture(self) -> AbstractContextManager[Any]:
        """Raise UnsupportedError: there are no graphs."""
        raise UnsupportedError(NO_GRAPHS.format("cpu"))

    def memory(self) -> DeviceMemory:
        """Return no figures: none are known of the CPU's memory."""
        return DeviceMemory(None, None, None)


class Accelerator:
    """A device behind torch's module of its type: torch.cuda, torch.npu, ..., which have the same names.

    Raises BackendUnavailable where torch has no such module.
    """

    def __init__(self, device: torch.device) -> None:
        self.type = device.type
        self._module: Any = getattr(torch, device.type, None)
        if self._module is None:
            raise BackendUnavailable(
                f"device {device}: no module torch.{device.type}; import its package first (for npu: torch_npu)"
            )
        self._index = self._module.current_device() if device.index is None else device.index

    @property
    def name(self) -> str:
        """The model, as the vendor's library says it."""
        return str(self._module.get_device_name(self._index))

    def synchronize(self) -> None:
        """Wait on the host until all streams are done; see DeviceRuntime.synchronize."""
        self._module.synchronize(self._index)

    def clock(self) -> float:
        """Return seconds once all streams are done; see DeviceRuntime.clock."""
        self.synchronize()
        return perf_counter()

    def stream_clock(self) -> float:
        """Return seconds once the current stream is done; see DeviceRuntime.stream_clock."""
        self.current_stream().synchronize()
        return perf_counter()

    def current_stream(self) -> Any:
        """Return the stream that calls are queued on; None where torch's module has none (torch.mps)."""
        ask = getattr(self._module, "current_stream", None)  # of torch.mps there is none
        return None if ask is None else ask(self._index)

    def new_stream(self, high_priority: bool = False) -> Any:
        """Make another stream, of priority -1 if high_priority, else 0."""
        return self._module.Stream(device=self._index, priority=-1 if high_priority else 0)

    def new_event(self) -> Any:
        """Make an event; see DeviceRuntime.new_event."""
        return self._module.Event()

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Queue calls on the stream, inside the context."""
        made: AbstractContextManager[object] = self._module.stream(stream)
        return made

    @contextmanager
    def capture(self) -> Iterator[Any]:
        """Capture work in a graph; see DeviceRuntime.capture. Raises UnsupportedError if there are no graphs."""
        made = next((getattr(self._module, name) for name in GRAPHS if hasattr(self._module, name)), None)
        if made is None:
            raise UnsupportedError(NO_GRAPHS.format(self.type))
        graph = made()
        # On a stream of this device: a thread of its own has another current one, and torch would keep its stream.
        with self._module.device(self._index), self._module.graph(graph, stream=self.new_stream()):
            yield graph

    def memory(self) -> DeviceMemory:
        """Return the bytes in use by this process's tensors, free on the device, and there in total."""
        free, total = self._module.mem_get_info(self._index)
        in_use = getattr(self._module, "memory_allocated", None)
        return DeviceMemory(None if in_use is None else in_use(self._index), free, total)
