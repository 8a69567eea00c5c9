"""Where the ranks of a group first meet: small texts through the group's store, with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch.distributed as dist

from tokenring.errors import MOST_SAID, ConfigurationError, PeerLost, one_line

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
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
    """One gathering of all ranks of a group, at its store; every rank makes its meetings in the same order."""

    def __init__(self, group: ProcessGroup, timeout_seconds: float) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout_seconds = timeout_seconds
        store = dist.distributed_c10d._get_process_group_store(group)
        number = self._ask(lambda: store.add(f"tokenring/meetings of {self.rank}", 1))
        self.store = dist.PrefixStore(f"tokenring/{number}", store)  # type: ignore[attr-defined]
        self._gathered = 0

    def gather(self, what: str, text: str) -> list[str]:
        """What every rank brought, by rank. Raises PeerLost, which names who did not come.

        Raises ConfigurationError, on every rank, where another exchanges something else.
        """
        deadline = time.monotonic() + self.timeout_seconds
        self._gathered += 1
        place = f"gathering {self._gathered}"  # by its number: ranks that differ in what it is about must meet, too

        def meet() -> tuple[list[str], list[int]]:
            self.store.set(f"{place}/{self.rank}", f"{what}\n{text}")
            found, missing = [], []
            for rank in range(self.world_size):
                try:
                    left = max(0.01, deadline - time.monotonic())
                    self.store.wait([f"{place}/{rank}"], timedelta(seconds=left))
                    found.append(self.store.get(f"{place}/{rank}").decode())
                except dist.DistStoreError:
                    missing.append(rank)
            if not missing:
                forget(self.store, place, [f"{place}/{rank}" for rank in range(self.world_size)], self.world_size)
            return found, missing

        found, missing = self._ask(meet, self.timeout_seconds)
        if missing:
            names = ", ".join(map(str, missing))
            raise PeerLost(
                f"rank {names} of {self.world_size} did not come within {self.timeout_seconds:g} s when the ranks "
                f"met to exchange {what}: every rank of the group must make its first call. Look at that rank's "
                f"log first; if it is only slow, raise timeout_seconds of ContextParallel",
                missing[0],
            )
        topics, texts = zip(*(each.split("\n", 1) for each in found), strict=True)
        if len(set(topics)) > 1:
            said = ", ".join(f"rank {rank} {topic!r}" for rank, topic in enumerate(topics))
            raise ConfigurationError(
                f"the ranks make different transports: they met to exchange {said}. Give all ranks the same transport, "
                f"and tensors on the same kind of device"
            )
        return list(texts)

    def _ask(self, function: Callable[[], T], seconds: float = 0.0) -> T:
        try:
            return bounded(function, (seconds or self.timeout_seconds / 10) + STORE_SECONDS)
        except StoreSilent as error:
            raise PeerLost(
                f"rank {self.rank} gets no answer from the group's store ({error}): the process that holds it, "
                f"usually rank 0 or the launcher, is dead or stopped",
                0,
            ) from None
