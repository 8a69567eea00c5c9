"""The proof of an exchange of cached attention: each result has every shard once, everywhere that it is due.

Shards are the keys and values that one rank holds, and the open part that all hold. Nothing in the proof depends on how
many there are. It goes through the exchange step by step and keeps which rows, partial results and results lie at which
rank: so nothing is sent before it is there, a partial result that is lost or merged twice is found, and so is a result
that is sent before it is complete, or that does not reach one of its homes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tokenring.errors import ScheduleError
from tokenring.ir.cached_exchange import OPEN, ExchangeData, MergePart, SendPart

SAID = {"q": "rows of part", "partial": "its partial result of part", "result": "the result of part"}


def verify_exchange(data: ExchangeData) -> None:
    """Prove an exchange. Raises ScheduleError, which names step, rank and part."""
    try:
        _check_form(data)
        _Walk(data).to_the_end()
    except _Broken as broken:
        raise ScheduleError(f"exchange {data.name!r} of {data.ranks} ranks: {broken}") from None


class _Broken(Exception):
    """An exchange is wrong, with the reason as its text."""


def _check_form(data: ExchangeData) -> None:
    """Refuse what is of no rank or part of it, messages to oneself or sent twice, and keys and values that move."""
    for kv in data.of("kv"):
        raise _Broken(
            f"step {kv.step}: rank {kv.src} sends keys and values to rank {kv.dst}, and they are of the extent that a "
            f"rank holds, whatever that is: no message can say how many. They stay where they lie"
        )
    if len(data.starts) != data.parts or len(data.homes) != data.parts:
        raise _Broken(f"it has {data.parts} parts, starts of {len(data.starts)} and homes of {len(data.homes)}")
    counted: Counter[SendPart] = Counter(data.moves)
    for move, count in counted.items():
        if move.src == move.dst or not {move.src, move.dst} <= set(range(data.ranks)):
            raise _Broken(f"step {move.step}: a message goes from rank {move.src} to rank {move.dst}")
        if count > 1:
            raise _Broken(f"step {move.step}: rank {move.src} sends {_said(move)} to rank {move.dst} {count} times")


class _Walk:
    """An exchange, step by step: the rows, partial results and results that lie at each rank."""

    def __init__(self, data: ExchangeData) -> None:
        self.data, self.wanted = data, Counter((*range(data.ranks), OPEN))
        self.rows = {(rank, part) for part, ranks in enumerate(data.starts) for rank in ranks}
        self.partials: set[tuple[int, int, int]] = set()  # at a rank, of a part, over a shard
        self.merged: dict[tuple[int, int], Counter[int]] = {}  # at a rank, of a part: the shards that are in it

    def to_the_end(self) -> None:
        """Go through all steps, and look at each home in the end."""
        data = self.data
        steps = {each.step for each in data.attends} | {each.step for each in data.moves}
        for step in sorted(steps | {each.step for each in data.merges}):
            for _, rank, part in (each for each in data.attends if each.step == step):
                if (rank, part) not in self.rows:
                    raise _Broken(f"step {step}: rank {rank} attends from part {part}, whose rows it has not got")
                if (rank, part, rank) in self.partials:
                    raise _Broken(f"step {step}: rank {rank} attends from part {part} a second time")
                self.partials.add((rank, part, rank))
            arrivals = [self._sent(move) for move in data.moves if move.step == step]
            for arrive in arrivals:  # behind all sends of the step
                arrive()
            for merge in (each for each in data.merges if each.step == step):
                self._merge(merge)
        for part, homes in enumerate(data.homes):
            for rank in sorted(homes):
                if (found := self.merged.get((rank, part))) is None:
                    raise _Broken(f"the result of part {part} never comes to rank {rank}, one of its homes")
                if found != self.wanted:
                    raise _Broken(f"rank {rank} ends with part {part} {self._wrong(found)}")

    def _sent(self, move: SendPart) -> Callable[[], object]:
        """Return what a message does at its receiver, if what it carries is there."""
        step, src, dst, content, part = move
        if content == "q":
            if (src, part) not in self.rows:
                raise _Broken(f"step {step}: rank {src} sends {_said(move)} before it has got them")
            return lambda: self.rows.add((dst, part))
        if content == "partial":
            if (src, part, src) not in self.partials:
                raise _Broken(f"step {step}: rank {src} sends {_said(move)} before it is made")
            return lambda: self.partials.add((dst, part, src))
        found = self.merged.get((src, part))
        if found != self.wanted:
            how = "before it is there" if found is None else self._wrong(found)
            raise _Broken(f"step {step}: rank {src} sends {_said(move)} {how}")
        if (dst, part) in self.merged:
            raise _Broken(f"step {step}: rank {src} sends {_said(move)} to rank {dst}, which has one")
        return lambda: self.merged.update({(dst, part): Counter(self.wanted)})

    def _merge(self, merge: MergePart) -> None:
        step, rank, part, shards = merge
        into = self.merged.setdefault((rank, part), Counter())
        for shard in shards:
            there = (rank, part) in self.rows if shard == OPEN else (rank, part, shard) in self.partials
            if not there:
                raise _Broken(f"step {step}: rank {rank} merges shard {_name(shard)} of part {part} before it is there")
            into[shard] += 1

    def _wrong(self, found: Counter[int]) -> str:
        """Return what is missing in a result, and what is in it too often."""
        missing, more = self.wanted - found, found - self.wanted
        said = [f"without shard {_names(missing)}"] if missing else []
        return " and ".join([*said, *([f"with shard {_names(more)} merged twice"] if more else [])])


def _names(shards: Counter[int]) -> str:
    return ", ".join(map(_name, sorted(shards)))


def _name(shard: int) -> str:
    return "open" if shard == OPEN else str(shard)


def _said(move: SendPart) -> str:
    return f"{SAID[move.content]} {move.part}"
