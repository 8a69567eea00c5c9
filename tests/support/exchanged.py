"""Texts that ranks exchange, counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tokenring as tr


@contextmanager
def counted_texts(cp: tr.ContextParallel) -> Iterator[list[str]]:
    """What each exchange of texts over a context's transport was about, in order, while this lasts."""
    transport, found = cp.transport, list[str]()
    assert transport is not None
    exchange = transport.exchange_text

    def counted(text: bytes, what: str) -> list[bytes]:
        found.append(what)
        return exchange(text, what)

    transport.exchange_text = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del transport.exchange_text
