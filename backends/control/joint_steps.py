"""Steps that all ranks of a transport take at once, with a time limit and the same outcome on all."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from tokenring.backends.control.control import Control
from tokenring.backends.control.store_gather import StoreSilent, bounded
from tokenring.errors import MOST_SAID, BackendUnavailable, one_line

NEEDS_REACH = "transport {!r} needs memory that peers reach, and {} fails on {}; use transport='nccl' or 'auto'"
WAITED = re.compile(r"no answer within|time[d-]? ?out", re.IGNORECASE)
T = TypeVar("T")


class Acting:
    """A transport in memory that peers reach."""

    name: str
    rank: int
    control: Control

    def _together(
        self, what: str, act: Callable[[], T], here: bool = False,
        raises: type[BackendUnavailable] = BackendUnavailable, text: str = NEEDS_REACH,
    ) -> T:  # fmt: skip
        """Run a step on all ranks at once. If it fails on any, all raise BackendUnavailable, or `raises`, a kind of it.

        text: of the error, for the transport's name, what fails, and on which rank of what.
        With a time limit, in a thread, which has a current device of its own; unless `here`, where it cannot hang.
        """
        made: list[T] = []
        trouble = ""
        try:
            made.append(act() if here else bounded(act, self.control.timeout_seconds / 2))
        except (StoreSilent, RuntimeError, OSError) as error:
            trouble = f"rank {self.rank}: {one_line(error, MOST_SAID)}"
        said = [each.decode() for each in self.control.exchange_text(trouble.encode(), what)]
        # Who only waited in vain does not know why.
        if first := min(filter(None, said), key=lambda each: bool(WAITED.search(each)), default=""):
            raise raises(text.format(self.name, what, first))
        return made[0]
