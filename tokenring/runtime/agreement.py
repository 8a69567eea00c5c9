"""Agreement of all ranks on a call, before any of them uses anything of another.

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
    """One rank's description of the call that it is about to make, field by field, with its digest."""

    fields: tuple[tuple[str, str], ...]
    digest: bytes

    @staticmethod
    def of(fields: dict[str, object]) -> Description:
        """Make a description with its SHA-256 digest; the fields must print alike on all ranks."""
        texts = tuple((name, str(value)) for name, value in fields.items())
        return Description(texts, hashlib.sha256(json.dumps(texts).encode()).digest())


def named_digest(some: Layout | Schedule) -> str:
    """Return the name of a layout or schedule with a digest that tells apart those that share the name."""
    text = some.to_json() if isinstance(some, Schedule) else repr(some)
    return f"{some.name!r} ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def agree(transport: Transport, mine: Description) -> None:
    """Make sure that all ranks make the same call. Raises Disagreement, on every rank, if they do not; PeerLost.

    Where messages of calls that differ never meet, this only begins the exchange, and `settle` raises.
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
    """Finish the exchange that `agree` has only begun, if so. Raises what `agree` raises."""
    if transport is not None and transport.target.deferring:
        transport.settle()


@contextmanager
def beginning(transport: Transport | None) -> Iterator[None]:
    """Guard the part of a call between `agree` and its program: all ranks raise our errors, if the ranks agree."""
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
    """Return the reasons of ranks that refused; else each field in which ranks differ, with its values and ranks."""
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
    """Return the sentence that names each reason with the ranks that refused for it; None: the rank did not refuse."""
    found = [f"{_ranks(texts, text)} refused: {text}" for text in dict.fromkeys(texts) if text is not None]
    return f"{'; '.join(found)}. So no rank made the call"


def _ranks(values: Sequence[str | None], value: str) -> str:
    ranks = [str(rank) for rank, each in enumerate(values) if each == value]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
