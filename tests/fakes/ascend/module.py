"""What is `torch.npu` on the emulated machine: as torch.cuda is, for what tokenring and its tests ask of it.

Streams and events are objects whose calls are noted in `noted`; everything is done at once, whatever the stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch

NAME = "Ascend910B3"
TOTAL_BYTES = 64 << 30

_count = 8
_current = 0
_numbers = itertools.count(1)
_streams: dict[int, Stream] = {}  # device → its current stream
_defaults: dict[int, Stream] = {}
noted: list[tuple[str, Any, Any]] = []  # (what, on which stream, with what)
recorded: list[tuple[int, Any]] = []  # (memory, stream) of record_stream


def set_device_count(count: int) -> None:
    global _count, _current
    _count, _current = count, min(_current, count - 1)


def check_index(index: int) -> None:
    if not 0 <= index < _count:
        raise RuntimeError(f"Invalid NPU device ID {index}: this machine has {_count}")


def is_available() -> bool:
    return _count > 0


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing to do."""


def _lazy_init() -> None:
    """Nothing to do."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return _count


def current_device() -> int:
    return _current


def _index(which: Any) -> int:
    if which is None:
        return _current
    if isinstance(which, int):
        index = which
    else:
        which = torch.device(which)
        index = _current if which.index is None else which.index
    check_index(index)
    return index


def set_device(which: Any) -> None:
    global _current
    _current = _index(which)


@contextmanager
def device(which: Any) -> Iterator[None]:
    global _current
    before = _current
    set_device(which)
    try:
        yield
    finally:
        _current = before


def synchronize(which: Any = None) -> None:
    noted.append(("synchronize", _index(which), None))


def get_device_name(which: Any = None) -> str:
    _index(which)
    return NAME


class Properties(NamedTuple):
    """What get_device_properties tells."""

    name: str
    total_memory: int


def get_device_properties(which: Any = None) -> Properties:
    return Properties(get_device_name(which), TOTAL_BYTES)


def mem_get_info(which: Any = None) -> tuple[int, int]:
    """(free, total) bytes; the emulation counts nothing as taken."""
    _index(which)
    return TOTAL_BYTES, TOTAL_BYTES


def empty_cache() -> None:
    """Nothing is cached."""


def can_device_access_peer(which: Any, peer: Any) -> bool:
    return _index(which) != _index(peer)


# ---------- random numbers, automatic precision


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(which: Any = "npu") -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, which: Any = "npu") -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported() -> bool:
    return True


# ---------- streams and events


class Stream:
    """A queue of a device. priority: lower is more urgent."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device_index, self.priority, self.stream_id = _index(device), priority, next(_numbers)

    @property
    def device(self) -> torch.device:
        return torch.device("npu", self.device_index)

    def wait_stream(self, other: Stream) -> None:
        noted.append(("wait_stream", self, other))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        noted.append(("synchronize", self, None))

    def query(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Stream({self.stream_id} of npu:{self.device_index})"


class Event:
    """A point in a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing, self._at = enable_timing, 0.0
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream, self._at = stream or current_stream(), perf_counter()
        noted.append(("record", self.stream, self))

    def wait(self, stream: Stream | None = None) -> None:
        """An event that nobody recorded is waited for in vain: on the device that is no wait at all."""
        if self.stream is None:
            raise RuntimeError("this event was never recorded: waiting for it would wait for nothing")
        noted.append(("wait_event", stream or current_stream(), self))

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        noted.append(("synchronize", self, None))

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self.stream is None or end.stream is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end._at - self._at) * 1e3


def default_stream(device: Any = None) -> Stream:
    index = _index(device)
    return _defaults.setdefault(index, Stream(index))


def current_stream(device: Any = None) -> Stream:
    index = _index(device)
    return _streams.get(index) or default_stream(index)


def set_stream(stream: Stream) -> None:
    _streams[stream.device_index] = stream


@contextmanager
def stream(which: Stream | None) -> Iterator[None]:
    if which is None:
        yield
        return
    before = current_stream(which.device_index)
    set_stream(which)
    try:
        yield
    finally:
        set_stream(before)
