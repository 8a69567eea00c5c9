"""Before a rank uses anything of another, all make sure that they are about to do the same thing.

Each call exchanges 32 bytes: the digest of a description of the call. Only if digests differ do the
descriptions travel, so that the error can name rank, field and values; every rank raises it. A rank that
cannot make the call takes part with its reason instead.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tokenring.backends.interfaces import Transport
from tokenring.errors import ConfigurationError, TokenRingError
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import Layout

REFUSED = "refused"  # the field of a rank that makes no call, with the reason


class Disagreement(ConfigurationError):
    """The ranks make different calls. No rank has used anything of another, and all can go on."""


@dataclass(frozen=True)
class Description:
    """What a rank is about to do, field by field."""

    fields: tuple[tuple[str, str], ...]
    digest: bytes

    @staticmethod
    def of(fields: dict[str, object]) -> Description:
        """Fields must print alike on all ranks."""
        texts = tuple((name, str(value)) for name, value in fields.items())
        return Description(texts, hashlib.sha256(json.dumps(texts).encode()).digest())


def named_digest(some: Layout | Schedule) -> str:
    """A name, and what tells apart those that share it."""
    text = some.to_json() if isinstance(some, Schedule) else repr(some)
    return f"{some.name!r} ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def agree(transport: Transport, mine: Description) -> None:
    """Raises Disagreement, on every rank, if any rank's description differs; PeerLost.

    Where messages of calls that differ never meet, this only begins, and `settle` raises.
    """

    def judge(digests: list[bytes]) -> None:
        if any(digest != mine.digest for digest in digests):
            texts = transport.exchange_text(json.dumps(mine.fields).encode(), "what differs")
            raise Disagreement(_difference([dict(json.loads(text)) for text in texts]))

    if transport.target.deferring:
        transport.begin_call(mine.digest, "the call", judge)
    else:
        judge(transport.exchange(mine.digest, "the call"))


def settle(transport: Transport | None) -> None:
    """The end of `agree`, where that has only begun. Raises what it raises."""
    if transport is not None and transport.target.deferring:
        transport.settle()


@contextmanager
def beginning(transport: Transport | None) -> Iterator[None]:
    """From `agree` until the program of the call runs. Errors of our own are raised by all ranks, if these agree."""
    try:
        yield
    except TokenRingError:
        settle(transport)
        raise
    except BaseException as error:  # such as Ctrl-C: the others begin the pass
        if transport is not None:
            transport.fail(error)
        raise


def _difference(descriptions: list[dict[str, str]]) -> str:
    """What ranks refused; else each field in which they differ, with the values and who has them."""
    if any(REFUSED in fields for fields in descriptions):
        return refusals([fields.get(REFUSED) for fields in descriptions])
    names = dict.fromkeys(name for fields in descriptions for name in fields)
    found = []
    for name in names:
        values = [fields.get(name, "nothing") for fields in descriptions]
        counted = Counter(values).most_common()  # the more common value first
        if len(counted) > 1:
            parts = [f"{_ranks(values, value)}: {value}" for value, _ in counted]
            found.append(f"{name}: {'; '.join(parts)}")
    return f"the ranks disagree, so the call was not made. {'. '.join(found)}. Make the same call on every rank"


def refusals(texts: Sequence[str | None]) -> str:
    """What each rank refused, as the others say it; None: it did not."""
    found = [f"{_ranks(texts, text)} refused: {text}" for text in dict.fromkeys(texts) if text is not None]
    return f"{'; '.join(found)}. So no rank made the call"


def _ranks(values: Sequence[str | None], value: str) -> str:
    ranks = [str(rank) for rank, each in enumerate(values) if each == value]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
