"""Schedules that may be chosen, and what is known of them: their least, a prediction, or why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenring.planner.choosing.candidates import Candidate
from tokenring.planner.simulation.predict import Least, Prediction, Worked
from tokenring.schedule.schedule import Schedule

RISK = 0.1  # of the time for which the busiest wire alone is at work: where predictions fall short, it is there


@dataclass(frozen=True)
class Selection:
    """A schedule that may be chosen, by the name that makes it again; made when it is first needed.

    looked_at: called once it is known what becomes of it. make_if: makes it if its tiles are wanted, before it has
    moves; raises NotWanted. worked: what a rank does of the same in fewer pieces, where that is known: more pieces take
    no less beside kernels.
    """

    name: str
    make: Callable[[], Schedule]
    looked_at: Callable[[], None] = lambda: None
    make_if: Callable[[Callable[[Schedule], bool]], Schedule] | None = None
    worked: tuple[Worked, ...] = ()


@dataclass(frozen=True)
class Judged:
    """A schedule with what it costs.

    It has no prediction where its busiest wire or a rank's work alone need too long, where its simulation was given
    up, since it took longer than the fastest, or where it needs too much memory.
    """

    name: str
    schedule: Schedule
    least: Least
    prediction: Prediction | None
    needs_bytes: int | None = None  # at least, of what was not simulated because nothing keeps to the limit
    exceeds_seconds: float | None = None  # of what was simulated and given up

    @property
    def seconds(self) -> float:
        """Predicted seconds; without a prediction the least that it could take."""
        if self.prediction is not None:
            return self.prediction.seconds
        return max(self.least.seconds, self.exceeds_seconds or 0.0)

    @property
    def risk_seconds(self) -> float:
        """Seconds that count beside what it takes: a part of what wires need beyond what kernels can hide."""
        return RISK * max(0.0, self.least.wire_seconds - self.least.kernel_seconds)

    @property
    def weighed_seconds(self) -> float:
        """Seconds by which schedules are compared."""
        return self.seconds + self.risk_seconds

    def fits(self, memory_limit_bytes: int | None) -> bool:
        """Return whether the schedule was simulated and keeps to the limit."""
        if self.prediction is None:
            return False
        return memory_limit_bytes is None or self.prediction.peak_bytes <= memory_limit_bytes


@dataclass(frozen=True)
class Judgement:
    """Schedules that were judged, best first, and the candidates that were not made, with the reason."""

    judged: tuple[Judged, ...] = ()
    misfits: tuple[Candidate, ...] = ()


NOTHING_YET = Judgement()


@dataclass
class Progress:
    """The progress of planning: schedules to look at, as far as they are known, and those that were.

    Rank 0 logs it while the other ranks wait for its plan; another thread may read the numbers.
    """

    known: int = 0
    looked_at: int = 0

    def __str__(self) -> str:
        return f"{self.looked_at} of {self.known} schedules"
