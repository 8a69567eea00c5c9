"""What a process holds at a moment: memory, files, mappings, threads."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6


@dataclass(frozen=True)
class Held:
    """`rss_mb` after garbage went and malloc gave back what it could; `threads` of the system, `python` of them."""

    rss_mb: float
    files: int
    shared: int  # mappings of files in /dev/shm
    maps: int
    threads: int
    python: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {round(value, 1)}" for name, value in self.rows())

    def rows(self) -> list[tuple[str, float]]:
        return list(asdict(self).items())

    def growth(self, before: Held, rss_mb: float, maps: int) -> list[str]:
        """What is more than before; memory and its mappings may grow by so much."""
        spare = {"rss_mb": rss_mb, "maps": maps}
        pairs = zip(before.rows(), self.rows(), strict=True)
        return [f"{name} {old:g} → {new:g}" for (name, old), (_, new) in pairs if new > old + spare.get(name, 0)]


def held(collect: bool = True) -> Held:
    if collect:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Held(
        int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MB,
        len(os.listdir("/proc/self/fd")),
        sum("/dev/shm/" in line for line in maps),
        len(maps),
        len(os.listdir("/proc/self/task")),
        threading.active_count(),
    )
