"""Notes of what a rank does in a step over a cache: kernels, posts, waits and merges, as they are called.

The step itself knows nothing of them, and takes no longer where nobody looks. Messages are seen by a transport that
passes everything on, kernels and merges by functions that take the place of those that the step calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from tokenring.api.caching import attending, one_token, rows
from tokenring.backends.interfaces import Transport, Work
from tokenring.cli.bench.sleeping import replaced
from tokenring.runtime import cached_exchange

AGREED = "wait until all ranks agree"
AGREEMENTS = ("exchange", "exchange_text", "begin_call", "settle")


@dataclass
class StepNote:
    """Something that a rank did, in perf_counter seconds of its process. kind: one of picture.KINDS."""

    kind: str
    label: str
    name: str
    began: float
    ended: float
    short: str = ""
    details: dict[str, int | str] = field(default_factory=dict)


@dataclass
class NotedMessage:
    """A message at one of its ends. waited: when the wait for it began and ended."""

    peer: int
    channel: str
    label: str
    nbytes: int
    posted: float
    waited: tuple[float, float] | None = None

    @property
    def details(self) -> dict[str, int | str]:
        """Its numbers, as a trace shows them."""
        return {"peer": self.peer, "channel": self.channel, "bytes": self.nbytes}


@dataclass
class Notes:
    """All notes of a step at one rank, in order, with its messages."""

    done: list[StepNote] = field(default_factory=list)
    sent: list[NotedMessage] = field(default_factory=list)
    received: list[NotedMessage] = field(default_factory=list)

    def clear(self) -> None:
        """Forget all of them."""
        for each in (self.done, self.sent, self.received):
            each.clear()

    def call(self, kind: str, label: str, name: str, call: Callable[[], Any]) -> Any:
        """Make a call, and note it; return its result."""
        began = perf_counter()
        try:
            return call()
        finally:
            self.done.append(StepNote(kind, label, name, began, perf_counter()))


class _NotedWork:
    """A message on its way, whose first wait is noted."""

    def __init__(self, notes: Notes, work: Work, message: NotedMessage, where: str) -> None:
        self._notes, self._work, self._message, self._where = notes, work, message, where

    def wait(self) -> None:
        """Wait as the message itself does."""
        began = perf_counter()
        self._work.wait()
        ended = perf_counter()
        message = self._message
        if message.waited is None:
            message.waited = began, ended
        what = f"{message.label} {self._where} rank {message.peer}"
        self._notes.done.append(StepNote("wait", f"wait for {what}", f"wait {what}", began, ended, "", message.details))


class NotingTransport:
    """A transport that passes everything on to another one, and notes posts, waits and agreements."""

    def __init__(self, transport: Transport, notes: Notes) -> None:
        self._transport, self._notes = transport, notes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        if name not in AGREEMENTS:
            return found
        return lambda *given: self._notes.call("wait", AGREED, "agree", lambda: found(*given))

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> _NotedWork:
        """Post a send, and note it."""
        return self._posted(self._notes.sent, self._transport.send, "to", data, dst, channel, label)

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> _NotedWork:
        """Post a receive, and note it."""
        return self._posted(self._notes.received, self._transport.recv, "from", data, src, channel, label)

    def _posted(
        self, into: list[NotedMessage], post: Callable[..., Work], where: str, data: torch.Tensor, peer: int,
        channel: str, label: str,
    ) -> _NotedWork:  # fmt: skip
        began = perf_counter()
        message = NotedMessage(peer, channel, label, data.numel() * data.element_size(), began)
        work = post(data, peer, channel, label)
        into.append(message)
        what = "send" if where == "to" else "receive"
        label = f"post the {what} of {label} {where} rank {peer}"
        note = StepNote("post", label, f"{what} {where} {peer}", began, perf_counter(), "", message.details)
        self._notes.done.append(note)
        return _NotedWork(self._notes, work, message, where)


@contextmanager
def noting(notes: Notes) -> Iterator[None]:
    """Note the kernels and merges of steps over a cache; afterwards nothing is in front of them."""

    def kernel(real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(q: torch.Tensor, k: torch.Tensor, *rest: Any, **how: Any) -> Any:
            made = notes.call("compute", "", "attend", lambda: real(q, k, *rest, **how))
            note, counts = notes.done[-1], (q.shape[2], k.shape[2])
            note.label, note.short = "attention of {} × {} rows and keys".format(*counts), "{} × {}".format(*counts)
            note.details = {"rows": counts[0], "columns": counts[1]}
            return made

        return noted

    def merge(real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(outs: torch.Tensor, lses: torch.Tensor) -> Any:
            label = f"merge {outs.shape[0]} partial results"
            return notes.call("merge", label, "merge", lambda: real(outs, lses))

        return noted

    kernels = ((attending, "cached_partial"), (rows, "cached_partial"), (one_token, "FLASH"))
    merges = ((cached_exchange, "merge_all"), (cached_exchange, "merge_outs"), (rows, "merge_all"),
              (one_token, "merge_seen"))  # fmt: skip
    wrapped = {key: kernel(getattr(*key)) for key in kernels} | {key: merge(getattr(*key)) for key in merges}
    with replaced(wrapped):
        yield
