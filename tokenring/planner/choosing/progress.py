"""How far planning is: rank 0 says so while the other ranks wait for its plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """How many schedules there are to look at, as far as is known, and how many were; another thread may read it."""

    known: int = 0
    looked_at: int = 0

    def __str__(self) -> str:
        return f"{self.looked_at} of {self.known} schedules"
