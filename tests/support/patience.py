"""How long tests wait, on a machine that may be busy with something else.

A limit that only a hang reaches, or one that is meant to expire and must spare whoever is merely slow, is written for
a quiet machine and stretched by how busy this one is: `patient(1.0)`. It is measured before each test, from how many
processes want to run and how long this one waited to run, and goes to the ranks with every call, so that all ranks of
a test have the same limits. No test asserts how long something took.
"""

from __future__ import annotations

import os
from pathlib import Path

LOADAVG, SCHEDSTAT = Path("/proc/loadavg"), Path("/proc/self/schedstat")
LEAST_NS = 2_000_000  # of processor time: less says nothing
MOST = 10.0  # a process that has hardly run may have waited a thousand times as long, and that says nothing of others
PER_CORE = 3  # so many processes that want to run leave a test its usual pace, or nearly

_stretch = 1.0


def patient(seconds: float) -> float:
    """A limit for a quiet machine, as long as it takes on this one."""
    return seconds * _stretch


def stretch() -> float:
    """What `patient` multiplies with in this process."""
    return _stretch


def set_stretch(factor: float) -> None:
    global _stretch
    _stretch = factor


def measured_stretch(
    loadavg: Path = LOADAVG, schedstat: Path = SCHEDSTAT, cores: int | None = None, since: tuple[int, int] = (0, 0)
) -> float:
    """How many times longer things take than on a quiet machine, from 1 to MOST; 1 where nobody counts.

    By how many processes want to run right now, and by how long this one waited for a processor beside what it ran:
    the larger counts. since: what `ran_and_waited` gave before.
    """
    try:
        running = int(loadavg.read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):  # not Linux
        running = 0
    ran, waited = (now - before for now, before in zip(ran_and_waited(schedstat), since, strict=True))
    crowd = running / (PER_CORE * (cores or os.cpu_count() or 1))
    return min(MOST, max(1.0, crowd, 1 + waited / ran if ran > LEAST_NS else 1.0))


def ran_and_waited(schedstat: Path = SCHEDSTAT) -> tuple[int, int]:
    """Nanoseconds that this process had a processor, and those that it waited for one; 0 where nobody counts."""
    try:
        ran, waited, _ = schedstat.read_text().split()
        return int(ran), int(waited)
    except (OSError, ValueError):
        return 0, 0
