"""Where the ranks of a group first meet: small texts through the group's store, with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch.distributed as dist

from tokenring.errors import MOST_SAID, PeerLost, one_line
from tokenring.groups import held

if TYPE_CHECKING:
    from tokenring.groups import Held

T = TypeVar("T")
ROUND = "tokenring/round"  # at a group's store: how many times a meeting has failed
LOOK_SECONDS = 0.5  # how often who waits at a store looks whether the others still do
STORE_SECONDS = 1.0  # how much longer than it should a store may take before it counts as dead


class StoreSilent(Exception):
    """The store did not answer in time, or is gone."""


class Aside(Generic[T]):
    """A call in a thread of its own, because it may never come back."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.error: BaseException | None = None  # what it raised
        self._answers: list[T] = []
        self._function = function
        self._thread = threading.Thread(target=self._work, daemon=True, name="tokenring aside")
        self._thread.start()

    def _work(self) -> None:
        try:
            self._answers.append(self._function())
        except BaseException as error:
            self.error = error

    def ended(self, seconds: float) -> bool:
        """Whether it is over, within so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> T:
        """What it gave, once it has ended. Raises what it raised."""
        if self.error is not None:
            raise self.error
        return self._answers[0]


def bounded(function: Callable[[], T], seconds: float) -> T:
    """The function's result. Raises StoreSilent after so many seconds: a stopped store answers nothing, ever."""
    call = Aside(function)
    if not call.ended(seconds):
        raise StoreSilent(f"no answer within {seconds:g} s")
    if call.error is not None:
        raise StoreSilent(one_line(call.error, MOST_SAID))
    return call.result()


def forget(store: Any, what: str, keys: list[str], world_size: int) -> None:
    """The last of all ranks to call it takes the keys away: a store that outlives many groups must not grow."""
    done = f"{what}/done"
    if store.add(done, 1) == world_size:
        for key in (*keys, done):
            store.delete_key(key)


class Meeting:
    """One gathering of all ranks of a group, at its store; every rank makes its meetings in the same order.

    That order begins anew whenever a rank has waited in vain: all later meetings are in another round, so that ranks
    which have made different numbers of meetings before meet again. A rank comes to the round that there is, and those
    that still wait in an old one hear that it is over.
    """

    def __init__(self, group: Held, timeout_seconds: float) -> None:
        group = held(group)
        self.rank, self.world_size = group.rank, group.world_size
        self.timeout_seconds = timeout_seconds
        self._all = store = group.store()

        def come() -> tuple[int, int]:
            now = int(store.add(ROUND, 0))
            return now, int(store.add(f"tokenring/meetings of {self.rank}/{now}", 1))

        self._round, number = self._ask(come)
        self.store = dist.PrefixStore(f"tokenring/{self._round}.{number}", store)  # type: ignore[attr-defined]

    def gather(self, what: str, text: str) -> list[str]:
        """What every rank brought, by rank. Raises PeerLost, which names who did not come."""

        def meet() -> tuple[list[str], list[int], bool]:
            self.store.set(f"{what}/{self.rank}", text)
            found, missing, over = self._wait([f"{what}/{rank}" for rank in range(self.world_size)])
            if missing:
                self._begin_round()
            else:
                forget(self.store, what, [f"{what}/{rank}" for rank in range(self.world_size)], self.world_size)
            return found, missing, over

        found, missing, over = self._ask(meet, self.timeout_seconds)
        if missing:
            names = ", ".join(map(str, missing))
            when = "before another rank gave up waiting" if over else f"within {self.timeout_seconds:g} s"
            raise PeerLost(
                f"rank {names} of {self.world_size} did not come {when} when the ranks "
                f"met to exchange {what}: every rank of the group must make its first call. Look at that rank's "
                f"log first; if it is only slow, raise timeout_seconds of ContextParallel. The group can be used "
                f"further: the ranks meet anew when all of them make a new ContextParallel",
                missing[0],
            )
        return found

    def _wait(self, keys: list[str]) -> tuple[list[str], list[int], bool]:
        """What the keys hold, whose are missing in the end, and whether another rank ended the round before."""
        deadline = time.monotonic() + self.timeout_seconds
        found, missing, over = [], [], False
        for rank, key in enumerate(keys):
            while True:
                left = 0.0 if over else deadline - time.monotonic()
                try:
                    self.store.wait([key], timedelta(seconds=max(0.01, min(left, LOOK_SECONDS))))
                    found.append(self.store.get(key).decode())
                    break
                except dist.DistStoreError:
                    over = over or self._all.add(ROUND, 0) != self._round
                    if over or time.monotonic() >= deadline:
                        missing.append(rank)
                        break
        return found, missing, over

    def _begin_round(self) -> None:
        """What comes after a meeting that failed; the first rank to say so is enough."""
        if self._all.add(f"tokenring/over/{self._round}", 1) == 1:
            self._all.add(ROUND, 1)

    def _ask(self, function: Callable[[], T], seconds: float = 0.0) -> T:
        try:
            return bounded(function, (seconds or self.timeout_seconds / 10) + STORE_SECONDS)
        except StoreSilent as error:
            raise PeerLost(
                f"rank {self.rank} gets no answer from the group's store ({error}): the process that holds it, "
                f"usually rank 0 or the launcher, is dead or stopped",
                0,
            ) from None
