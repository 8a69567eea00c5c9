"""Memory that the ranks of one machine share: files in /dev/shm that they map, and POSIX semaphores in such memory.

A file has no name any more once all ranks have mapped it. With semaphores ranks signal each other: posting releases
and waiting acquires, on every processor. What was written before a post is seen after the wait that takes it, so that
no other fence is needed. Waiting sleeps in the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path("/dev/shm")
PREFIX = "tokenring-"
SEMAPHORE_BYTES = 64  # a cache line for each, though glibc's take 32 bytes: ranks do not disturb each other


class Segment:
    """A shared mapping. `create` reserves the memory, so that no later write can fail; raises OSError."""

    def __init__(self, name: str, size_bytes: int, create: bool = False) -> None:
        path = FOLDER / f"{PREFIX}{name}"
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, size_bytes)
            self._map = mmap.mmap(descriptor, size_bytes)
        except BaseException:
            if create:
                self.unlink_name(name)
            raise
        finally:
            os.close(descriptor)
        # Views hold the mapping; it goes when the last of them does.
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()

    def part(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Return a tensor, uint8, of size_bytes elements, whose storage begins at the offset in bytes."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size_bytes, offset=offset)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Copy size_bytes out of the mapping, from the offset in bytes."""
        return ctypes.string_at(self.address + offset, size_bytes)

    def write(self, offset: int, data: bytes) -> None:
        """Copy data into the mapping, at the offset in bytes."""
        ctypes.memmove(self.address + offset, data, len(data))

    @staticmethod
    def unlink_name(name: str) -> None:
        """Remove the name; the memory stays as long as it is mapped."""
        with contextlib.suppress(OSError):
            (FOLDER / f"{PREFIX}{name}").unlink()


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    until = ctypes.POINTER(_TimeSpec)
    signatures: dict[str, tuple[type, ...]] = {"sem_post": (), "sem_trywait": (), "sem_timedwait": (until,)}
    if hasattr(library, "sem_clockwait"):
        signatures["sem_clockwait"] = (ctypes.c_int, until)
    for name, more in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = (ctypes.c_void_p, *more), ctypes.c_int
    library.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    return library


def no_semaphores() -> str | None:
    """Return None, or why this system has no semaphores that processes can share."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no semaphores in shared memory"
    try:
        _libc()
    except (AttributeError, OSError) as error:
        return f"the C library has no semaphores: {error}"
    return None


def _timed_wait(library: ctypes.CDLL) -> tuple[Callable[[ctypes.c_void_p, Any], int], int]:
    """Return a wait until a time of a clock, and that clock: one that nobody sets, where there is one (glibc 2.30)."""
    if not hasattr(library, "sem_clockwait"):
        return library.sem_timedwait, time.CLOCK_REALTIME
    clock = time.CLOCK_MONOTONIC
    return (lambda at, until: library.sem_clockwait(at, clock, until)), clock


class Semaphore:
    """A counter at an address in memory that several processes map."""

    def __init__(self, address: int) -> None:
        self._at = ctypes.c_void_p(address)
        library = _libc()
        self._post, self._try = library.sem_post, library.sem_trywait
        self._wait_until, self._clock = _timed_wait(library)

    def create(self, value: int = 0) -> None:
        """Set the semaphore up, at this value; by one process, before any other uses it."""
        if _libc().sem_init(self._at, 1, value):
            raise OSError(ctypes.get_errno(), "sem_init failed")

    def post(self) -> None:
        """Raise the counter by one, and wake a process that waits for it."""
        self._post(self._at)

    def try_wait(self) -> bool:
        """Lower the counter by one if it is above zero; return False if it is not."""
        return bool(self._try(self._at) == 0)

    def wait(self, seconds: float) -> bool:
        """Lower the counter by one, sleeping up to so many seconds until it is above zero; else return False."""
        if self._try(self._at) == 0:
            return True
        deadline = time.clock_gettime(self._clock) + seconds
        until = _TimeSpec(int(deadline), int(deadline % 1 * 1e9))
        while self._wait_until(self._at, ctypes.byref(until)):
            if ctypes.get_errno() != errno.EINTR:
                return False
        return True
