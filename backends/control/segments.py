"""Files in /dev/shm that the ranks of one machine map, and that have no name any more once all have."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

import torch

FOLDER = Path("/dev/shm")
PREFIX = "tokenring-"


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
