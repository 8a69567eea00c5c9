"""The tokens of text and image, dealt over ranks so that those of both on a rank are its part of one layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from tokenring.errors import ConfigurationError
from tokenring.integrations.diffusers.plans import Stream
from tokenring.sequence.layout import Layout, contiguous

KEPT = 64  # deals, of as many sizes of images and texts


@dataclass(frozen=True)
class StreamDeal:
    """Tokens of each stream by rank. lengths: of whole streams. layout: of both together, as the attention sees them.

    The order of keys means nothing under the full mask: a rank's text and image count as one run of the joint sequence.
    """

    lengths: Mapping[Stream, int]
    parts: Mapping[Stream, tuple[int, ...]]
    layout: Layout

    def range_of(self, stream: Stream, rank: int) -> tuple[int, int]:
        """Return the first token of a stream that a rank holds, and how many it holds."""
        parts = self.parts[stream]
        return sum(parts[:rank]), parts[rank]


def deal(lengths: Mapping[Stream, int], ranks: int) -> StreamDeal:
    """Return the deal of streams of these lengths. Raises ConfigurationError where a rank would get none of one."""
    found = _deal(tuple(lengths.items()), ranks) if min(lengths.values()) >= ranks else None
    if found is None or any(part < 1 for parts in found.parts.values() for part in parts):
        said = " and ".join(f"{length} tokens of {stream}" for stream, length in lengths.items())
        raise ConfigurationError(
            f"a call with {said} gives some of {ranks} ranks none: the layers of diffusers want one at least; call "
            f"the model without context parallelism"
        )
    return found


@lru_cache(maxsize=KEPT)
def _deal(lengths: tuple[tuple[Stream, int], ...], ranks: int) -> StreamDeal:
    """Deal one token of each stream to each rank, and the rest so that a rank's share of text is that of the whole."""
    layout = contiguous(ranks, sum(length for _, length in lengths))
    if len(lengths) == 1:
        return StreamDeal(dict(lengths), {lengths[0][0]: layout.local_lengths}, layout)
    (first, of_first), (second, _) = lengths
    more, rest = of_first - ranks, layout.length - 2 * ranks
    ends = [0, *accumulate(part - 2 for part in layout.local_lengths)]
    shares = [end * more // rest if rest > 0 else 0 for end in ends]
    dealt = tuple(1 + shares[rank + 1] - shares[rank] for rank in range(ranks))
    others = tuple(part - own for part, own in zip(layout.local_lengths, dealt, strict=True))
    return StreamDeal(dict(lengths), {first: dealt, second: others}, layout)
