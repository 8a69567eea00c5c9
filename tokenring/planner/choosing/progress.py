"""The progress of planning: rank 0 logs it while the other ranks wait for its plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """The schedules to look at, as far as they are known, and those that were; another thread may read the numbers."""

    known: int = 0
    looked_at: int = 0

    def __str__(self) -> str:
        return f"{self.looked_at} of {self.known} schedules"
