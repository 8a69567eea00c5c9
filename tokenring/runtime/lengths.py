"""Lengths of whole sequences, of which a rank sees only its own part.

Where a length does not divide, parts differ from rank to rank, and a part alone does not say the length. A rank takes
that which it knows: of the sequence that it sharded last with a part so long, else as if all parts were equal. If that
is wrong anywhere, the digests of the call differ, and what the ranks then send each other says what each holds. So all
of them learn the length, and make the call again. Calls of which the guess is right exchange nothing for this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import Layout, make_layout

MOST_KNOWN = 1024  # parts, of which the oldest is forgotten
TAKEN = "_tokenring_taken"  # of an error: what the rank holds of the call that it refuses, and the lengths it took
OF_LENGTHS = ("q_length", "kv_length")  # the fields of a description that follow from them
ADVICE = "take each rank's part from tr.shard, or by tr.positions"
Fields = Mapping[str, str]


class Held(NamedTuple):
    """The tokens of q and of kv that a rank holds."""

    q: int
    kv: int


class Lengths:
    """Lengths that one rank of a context knows, by the parts of them that it held."""

    def __init__(self, layout: str | Layout, rank: int, world_size: int) -> None:
        self._layout, self._rank, self._world_size = layout, rank, world_size
        self._known: dict[int | Held, tuple[int, int]] = {}
        self._parts: dict[int, tuple[int, ...]] = {}
        if isinstance(layout, Layout) and layout.world_size == world_size:
            self.note(layout.length)

    def note(self, length: int) -> None:
        """Note that the rank was given its part of a sequence of this length."""
        self._learn(self.parts(length)[self._rank], (length, length))

    def learn(self, held: Held, lengths: tuple[int, int]) -> None:
        """Note the lengths of q and kv of a call, as all ranks found them."""
        self._learn(held, lengths)

    def _learn(self, part: int | Held, lengths: tuple[int, int]) -> None:
        self._known.pop(part, None)
        self._known[part] = lengths
        if len(self._known) > MOST_KNOWN:
            self._known.pop(next(iter(self._known)))

    def of(self, held: Held) -> tuple[int, int]:
        """Return the lengths that q and kv are taken to have."""
        if (found := self._known.get(held)) is not None:
            return found
        q, kv = (self._known.get(part, (part * self._world_size,))[0] for part in held)
        return q, kv

    def parts(self, length: int) -> tuple[int, ...]:
        """Return the tokens that each rank holds of a sequence of this length. Raises ConfigurationError."""
        if length not in self._parts:
            if len(self._parts) >= MOST_KNOWN:
                self._parts.clear()
            self._parts[length] = make_layout(self._layout, self._world_size, length).local_lengths
        return self._parts[length]

    def check(self, held: Held, lengths: tuple[int, int]) -> None:
        """Raise ConfigurationError unless these are this rank's parts of sequences of these lengths."""
        called = self._layout if isinstance(self._layout, str) else self._layout.name
        for name, part, length in zip(("q", "k and v"), held, lengths, strict=True):
            own = self.parts(length)[self._rank] if length else None
            if own is None:
                raise ConfigurationError(
                    f"rank {self._rank} holds no token of {name}, and layout {called!r} makes no parts such as the "
                    f"ranks hold: {ADVICE}"
                )
            if part != own:
                raise ConfigurationError(
                    f"of {length} positions layout {called!r} gives rank {self._rank} {own} tokens of {name}, but it "
                    f"holds {part}: {ADVICE}"
                )


def found(descriptions: Sequence[Fields], held: Sequence[Held | None], of: Lengths, refused: str) -> Held | None:
    """Return the lengths of q and kv of a call of which ranks differ in nothing else; None: there are no others.

    descriptions, held: of all ranks. refused: the field of those that refuse; for another reason, unless they say what
    they hold.
    """
    parts = [each for each in held if each is not None]
    others = [_without_lengths(each) for each in descriptions if refused not in each]
    same = {each["layout"] for each in descriptions if "layout" in each}
    if len(parts) < len(held) or len(same) > 1 or any(each != others[0] for each in others):
        return None
    lengths = Held(sum(part.q for part in parts), sum(part.kv for part in parts))
    if all(tuple(each[name] for name in OF_LENGTHS) == tuple(map(str, lengths)) for each in descriptions):
        return None  # which is what all took them for
    try:
        by_side = zip(lengths, zip(*parts, strict=True), strict=True)
        fits = all(of.parts(length) == tuple(own) for length, own in by_side)
    except ConfigurationError:
        return None
    return lengths if fits else None


def _without_lengths(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if name not in OF_LENGTHS}
