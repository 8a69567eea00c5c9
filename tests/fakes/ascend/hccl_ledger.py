"""What an emulated HCCL keeps account of: its limits, communicators and their memory, messages, buffers in use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

MEGABYTE = 1 << 20
label: ContextVar[str] = ContextVar("label", default="")  # what the message is that is being posted, for errors


class HcclError(RuntimeError):
    """What the emulation refuses. On the device most of it is a hang until HCCL_EXEC_TIMEOUT.

    It says whose error it is, as torch_npu's messages do ("ERR02200 DIST call hccl api failed").
    """

    def __str__(self) -> str:
        return f"{super().__str__()} [ERR02200 DIST]"


@dataclass
class Limits:
    """Time limits in seconds: short ones, where HCCL_CONNECT_TIMEOUT has at least 120 and HCCL_EXEC_TIMEOUT 1836.

    late_errors: a wait does not raise, as on the device where it only orders streams: the next call does.
    streams: that communicators of pairs take round-robin from the device, as torch_npu has a pool of 32 or 8; None:
    each has its own. retrying: communicators that there may be with HCCL_OP_RETRY_ENABLE, on A3. meet_when_made: a
    group is there once all ranks have made theirs; for a group of several backends, of which torch keeps this one
    alone, since it is a ProcessGroup (torch_npu's is a Backend, which Python cannot derive from): a rank that drops
    its Gloo group would end the connections of those that still make theirs.
    """

    connect: float = 8.0
    execute: float = 8.0
    late_errors: bool = False
    streams: int | None = None
    retrying: int = 5
    meet_when_made: bool = False


class Communicator(NamedTuple):
    """One that this rank has made. peers: "low:high", or "all" for the whole group's."""

    group: str
    peers: str
    nbytes: int


class Noted(NamedTuple):
    """A message that this rank has posted."""

    group: str
    kind: str
    peer: int
    nbytes: int
    label: str


class NotedCollective(NamedTuple):
    """A collective that this rank has begun; nbytes: of all that it gives the others."""

    group: str
    what: str
    ranks: int
    nbytes: int
    label: str


@dataclass
class InUse:
    """Memory that a message reads ("send") or writes ("recv") from its post to its wait."""

    kind: str
    start: int
    stop: int
    name: str


@dataclass
class Ledger:
    """Of this process, over all groups."""

    communicators: list[Communicator] = field(default_factory=list)
    messages: list[Noted] = field(default_factory=list)
    collectives: list[NotedCollective] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # messages that nobody waited for
    in_use: list[InUse] = field(default_factory=list)
    running: dict[str, str] = field(default_factory=dict)  # group → its last message since the device was waited for
    torn: list[str] = field(default_factory=list)  # groups that were dropped under such a message

    def clear(self) -> None:
        """Forget messages; communicators stay."""
        self.messages.clear()
        self.collectives.clear()
        self.dropped.clear()

    @property
    def nbytes(self) -> int:
        """Device memory of all communicators."""
        return sum(each.nbytes for each in self.communicators)

    def check_all_waited(self) -> None:
        """Raises HcclError if a message was never waited for."""
        left = [*self.dropped, *(each.name for each in self.in_use)]
        if left:
            raise HcclError(f"never waited for: {left[0]}" + (f", and {len(left) - 1} more" if left[1:] else ""))

    def check_read(self, memory: torch.Tensor, by: str) -> None:
        """Raises HcclError if memory is read into which a message may still come."""
        self._check(memory, by, ("recv",), "reads")

    def check_write(self, memory: torch.Tensor, by: str) -> None:
        """Raises HcclError if memory is written that a message still uses."""
        self._check(memory, by, ("recv", "send"), "writes")

    def _check(self, memory: torch.Tensor, by: str, kinds: tuple[str, ...], does: str) -> None:
        if not self.in_use:
            return
        first, last = extent(memory)
        near = [each for each in self.in_use if each.start < last and first < each.stop and each.kind in kinds]
        parts = extents(memory) if near else []
        for each in near:
            if any(each.start < stop and start < each.stop for start, stop in parts):
                raise HcclError(f"{by} {does} the buffer of {each.name}, before that is waited for")


limits = Limits()
ledger = Ledger()


def extent(memory: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first to behind the last element."""
    if memory.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True))
    return memory.data_ptr(), memory.data_ptr() + (last + 1) * memory.element_size()


def extents(memory: torch.Tensor, most: int = 64) -> list[tuple[int, int]]:
    """The same of each block, of up to so many, between which nothing of this tensor lies."""
    if memory.numel() == 0:
        return []
    dims = sorted(range(memory.dim()), key=memory.stride, reverse=True)
    starts = [memory.data_ptr()]
    while dims and len(starts) * memory.shape[dims[0]] <= most:
        outer, *dims = dims
        step = memory.stride(outer) * memory.element_size()
        starts = [start + step * at for start in starts for at in range(memory.shape[outer])]
    inner = sum((memory.shape[dim] - 1) * memory.stride(dim) for dim in dims) + 1
    return [(start, start + inner * memory.element_size()) for start in starts]


@contextmanager
def labelled(text: str) -> Iterator[None]:
    """Messages posted inside are called so in errors."""
    token = label.set(text)
    try:
        yield
    finally:
        label.reset(token)
