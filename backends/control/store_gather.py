"""The first exchange of a group's ranks: small texts through the group's store, with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from tokenring.errors import MOST_SAID, ConfigurationError, PeerLost, one_line
from tokenring.launch.background import Background
from tokenring.launch.groups import held

if TYPE_CHECKING:
    from tokenring.launch.groups import Held

T = TypeVar("T")
ROUND = "tokenring/round"  # at a group's store: how many times a meeting has failed
GIVEN_UP = "\0given up"  # in place of what a rank brings, where somebody has waited for it in vain
STORE_SECONDS = 1.0  # how much longer than it should a store may take before it counts as dead


class StoreSilent(Exception):
    """An error: the store did not answer in time, or is gone."""


def bounded(function: Callable[[], T], seconds: float) -> T:
    """Return the function's result. Raises StoreSilent after so many seconds: a stopped store never answers."""
    call = Background(function)
    if not call.ended(seconds):
        raise StoreSilent(f"no answer within {seconds:g} s")
    if call.error is not None:
        raise StoreSilent(one_line(call.error, MOST_SAID))
    return call.result()


def forget(store: Any, what: str, keys: list[str], world_size: int) -> None:
    """Delete the keys, as the last of all ranks to call it: a store that outlives many groups must not grow."""
    done = f"{what}/done"
    if store.add(done, 1) == world_size:
        for key in (*keys, done):
            store.delete_key(key)


class StoreGather:
    """One gathering of all ranks of a group, at its store; every rank makes its meetings in the same order.

    That order begins anew whenever a rank has waited in vain: all later meetings are in another round, so that ranks
    which have made different numbers of meetings before meet again. A rank comes to the round that there is, and those
    that still wait in an old one hear that it has ended.
    """

    def __init__(self, group: Held, timeout_seconds: float) -> None:
        group = held(group)
        self.rank, self.world_size = group.rank, group.world_size
        self.timeout_seconds = timeout_seconds
        self._all = store = group.store()
        self._gathered = 0

        def come() -> tuple[int, int]:
            now = int(store.add(ROUND, 0))
            return now, int(store.add(f"tokenring/meetings of {self.rank}/{now}", 1))

        self._round, number = self._ask(come)
        self.store = dist.PrefixStore(f"tokenring/{self._round}.{number}", store)  # type: ignore[attr-defined]

    def gather(self, what: str, text: str) -> list[str]:
        """Return what every rank brought, by rank. Raises PeerLost, which names who did not come.

        Raises ConfigurationError, on every rank, where another exchanges something else.
        """
        deadline = time.monotonic() + self.timeout_seconds
        self._gathered += 1  # ranks that differ in what it is about must meet, too: keys have its number
        keys = [f"gathering {self._gathered}/{rank}" for rank in range(self.world_size)]

        def meet() -> tuple[list[str], list[int], bool]:
            self.store.set(keys[self.rank], f"{what}\n{text}")
            found, missing = [], []
            for rank, key in enumerate(keys):
                try:
                    left = max(0.01, deadline - time.monotonic())
                    self.store.wait([key], timedelta(seconds=left))
                    found.append(self.store.get(key).decode())
                except dist.DistStoreError:
                    missing.append(rank)
            given_up = [rank for rank, each in enumerate(found) if each == GIVEN_UP] if not missing else []
            if missing or given_up:
                self._give_up([keys[rank] for rank in (self.rank, *missing)])
            else:
                forget(self.store, f"gathering {self._gathered}", keys, self.world_size)
            return found, missing or given_up, not missing

        found, missing, told = self._ask(meet, self.timeout_seconds)
        if missing:
            names = ", ".join(map(str, missing))
            how = f"did not come within {self.timeout_seconds:g} s"
            how = "did not come in time, or gave up waiting," if told else how
            raise PeerLost(
                f"rank {names} of {self.world_size} {how} when the ranks met "
                f"to exchange {what}: every rank of the group must make its first call. Look at that rank's "
                f"log first; if it is only slow, raise timeout_seconds of the context. The group can be used "
                f"further: the ranks meet anew when all of them make a new context",
                missing[0],
            )
        topics, texts = zip(*(each.split("\n", 1) for each in found), strict=True)
        if len(set(topics)) > 1:
            said = ", ".join(f"rank {rank} {topic!r}" for rank, topic in enumerate(topics))
            raise ConfigurationError(
                f"the ranks are at different calls: they met to exchange {said}. Make the same calls on every rank, "
                f"with the same transport and tensors on the same kind of device"
            )
        return list(texts)

    def _give_up(self, keys: list[str]) -> None:
        """Begin a new round for later meetings, as one rank does; ranks that wait for these keys hear at once."""
        if self._all.add(f"tokenring/over/{self._round}", 1) == 1:
            self._all.add(ROUND, 1)
        for key in keys:
            self.store.set(key, GIVEN_UP)

    def _ask(self, function: Callable[[], T], seconds: float = 0.0) -> T:
        try:
            return bounded(function, (seconds or self.timeout_seconds / 10) + STORE_SECONDS)
        except StoreSilent as error:
            raise PeerLost(
                f"rank {self.rank} gets no answer from the group's store ({error}): the process that holds it, "
                f"usually rank 0 or the launcher, is dead or stopped",
                0,
            ) from None
