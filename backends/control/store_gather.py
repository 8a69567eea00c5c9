"""The first exchange of a group's ranks: small texts through the group's store, with a time limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist

from tokenring.errors import MOST_SAID, ConfigurationError, PeerLost, one_line
from tokenring.launch.background import Background
from tokenring.launch.groups import held

if TYPE_CHECKING:
    from tokenring.launch.groups import Held

T = TypeVar("T")
ROUND = "tokenring/round"  # at a group's store: how many times a meeting has failed
ALL_CAME = "[-1, []]"  # how a gathering ended: the rank that gave up waiting, and for whom
STORE_SECONDS = 1.0  # how much longer than it should a store may take before it counts as dead


class _End(NamedTuple):
    """The end of a gathering: who waited for whom in vain, where somebody is missing."""

    by: int
    missing: list[int]


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
        self._gathered += 1  # ranks that differ in what it is about must meet, too: keys have its number
        topic = f"gathering {self._gathered}"
        keys, come, end = [f"{topic}/{rank}" for rank in range(self.world_size)], f"{topic}/come", f"{topic}/end"

        def meet() -> tuple[_End, list[str]]:
            self.store.set(keys[self.rank], f"{what}\n{text}")
            if self.store.add(come, 1) == self.world_size:
                self.store.compare_set(end, "", ALL_CAME)
            how = self._end(end, keys)
            if how.missing:
                return how, []
            found = [each.decode() for each in self.store.multi_get(keys)]
            forget(self.store, topic, [*keys, come, end], self.world_size)
            return how, found

        how, found = self._ask(meet, self.timeout_seconds)
        if how.missing:
            missing = [how.by] if self.rank in how.missing else how.missing  # a late rank misses who gave up
            names = ", ".join(map(str, missing))
            waited = f"did not come within {self.timeout_seconds:g} s"
            waited = waited if how.by == self.rank else "did not come in time, or gave up waiting,"
            raise PeerLost(
                f"rank {names} of {self.world_size} {waited} when the ranks met "
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

    def _end(self, end: str, keys: list[str]) -> _End:
        """Wait for the end of the gathering, one key that is written once, so that all ranks read the same.

        Whoever comes last writes it, or whoever first has waited for too long. One key, and all texts in one request:
        a request for each text would be as many as the square of the ranks, for which one process takes minutes.
        """
        with suppress(dist.DistStoreError):
            self.store.wait([end], timedelta(seconds=self.timeout_seconds))
            return _End(*json.loads(self.store.get(end)))
        late = self._late(keys, 0)
        how = json.loads(self.store.compare_set(end, "", json.dumps([self.rank, late]) if late else ALL_CAME))
        if how == [self.rank, late] and self._all.add(f"tokenring/over/{self._round}", 1) == 1:
            self._all.add(ROUND, 1)
        return _End(*how)

    def _late(self, keys: list[str], first: int) -> list[int]:
        """Return the ranks whose keys are not there, by halves: few requests where few are late. first: its rank."""
        if not keys or self.store.check(keys):
            return []
        if len(keys) == 1:
            return [first]
        half = len(keys) // 2
        return self._late(keys[:half], first) + self._late(keys[half:], first + half)

    def _ask(self, function: Callable[[], T], seconds: float = 0.0) -> T:
        try:
            return bounded(function, (seconds or self.timeout_seconds / 10) + STORE_SECONDS)
        except StoreSilent as error:
            raise PeerLost(
                f"rank {self.rank} gets no answer from the group's store ({error}): the process that holds it, "
                f"usually rank 0 or the launcher, is dead or stopped",
                0,
            ) from None
