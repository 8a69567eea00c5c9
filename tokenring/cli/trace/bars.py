"""Bars and messages from the events of a traced call: each instruction in words, on one clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tokenring.cli.trace.record import Bar, TracedMessage
from tokenring.lowering.program import Attend, Fill, Instruction, Merge, Pack, Recv, Send, Span, Wait
from tokenring.runtime.labels import Names, blocks
from tokenring.runtime.trace import Agree, Event

KIND_OF: dict[type[Instruction | Agree], str] = {
    Agree: "wait",
    Attend: "compute",
    Wait: "wait",
    Merge: "merge",
    Fill: "merge",
    Pack: "pack",
    Send: "post",
    Recv: "post",
}
DIGITS = 9  # of seconds


@dataclass(frozen=True)
class Known:
    """Facts that events do not hold themselves; all of them may be left out.

    span_bytes: of a message; tiles: the name of each kernel call, in order; made: when each kernel call was
    done, for those whose results are then written or merged in the same instruction.
    """

    span_bytes: Callable[[Span], int] | None = None
    tiles: Sequence[str] = ()
    made: Mapping[int, float] = field(default_factory=dict)


def bars(events: Sequence[Event], start: float, known: Known | None = None) -> list[Bar]:
    """Return the bars of one pass at one rank. `start` is subtracted from all times."""
    return list(_Words(events, known or Known()).bars(start))


def messages(
    passes: Sequence[Sequence[Event]], start: Sequence[float], known: Sequence[Known] = ()
) -> list[TracedMessage]:
    """Return the messages of one pass, from the events and the start of each rank.

    Those between two ranks on one channel keep their order: the n-th sent is the n-th received.
    """
    arrivals = [list(_arrivals(events, zero)) for events, zero in zip(passes, start, strict=True)]
    found = []
    for src, events in enumerate(passes):
        words = _Words(events, known[src] if known else Known())
        for event in events:
            send = event.instruction
            if isinstance(send, Send):
                here = next(each for each in arrivals[send.dst] if each.key == (src, send.channel))
                arrivals[send.dst].remove(here)
                sent = round(event.began_seconds - start[src], DIGITS)
                found.append(
                    TracedMessage(
                        src, send.dst, send.label, sent, here.ended, here.began, event.direction, words.of_post(send)
                    )
                )
    return found


@dataclass(frozen=True)
class _Arrival:
    """The wait for a message at its receiver."""

    key: tuple[int, str]  # source, channel
    began: float
    ended: float


def _arrivals(events: Sequence[Event], start: float) -> Iterator[_Arrival]:
    """Yield the arrivals in the order in which the receives were posted."""
    waits = {event.instruction.message: event for event in events if isinstance(event.instruction, Wait)}
    for event in events:
        if isinstance(event.instruction, Recv):
            wait = waits[event.instruction.message]
            began, ended = (round(each - start, DIGITS) for each in (wait.began_seconds, wait.ended_seconds))
            yield _Arrival((event.instruction.src, event.instruction.channel), began, ended)


class _Words:
    """The words for the instructions of one pass at one rank."""

    def __init__(self, events: Sequence[Event], known: Known) -> None:
        self.events, self.known = events, known
        self.names = Names(event.instruction for event in events)

    def bars(self, start: float) -> Iterator[Bar]:
        calls = 0
        for event in self.events:
            instruction, tile, made = event.instruction, "", None
            if isinstance(instruction, Attend):
                tile = self.known.tiles[calls] if self.known.tiles else ""
                made = self.known.made.get(calls)
                calls += 1
            bar = self._bar(event, tile, start)
            if made is None:
                yield bar
            else:
                yield from _cut(bar, round(made - start, DIGITS), tile)

    def _bar(self, event: Event, tile: str, start: float) -> Bar:
        instruction, short = event.instruction, ""
        if isinstance(instruction, Attend):
            short = tile or f"{instruction.patch.rows} × {instruction.patch.cols}"
        began, ended = (round(each - start, DIGITS) for each in (event.began_seconds, event.ended_seconds))
        return Bar(
            event.rank,
            event.direction,
            KIND_OF[type(instruction)],
            self.label(instruction, tile),
            short,
            began,
            ended,
            event.step,
            self.names.of(instruction, tile),
            self.details(instruction),
        )

    def label(self, instruction: Instruction | Agree, tile: str) -> str:
        """Describe an instruction in a sentence."""
        match instruction:
            case Agree():
                return "wait until all ranks agree on the call"
            case Attend():
                patch = instruction.patch
                shape = "causal" if patch.is_causal else "full" if patch.is_full else "masked"
                named = f" {tile}," if tile else ""
                return f"attention of{named} {patch.rows} × {patch.cols} tokens, {shape}"
            case Send():
                return f"post the send of {blocks(instruction)} to rank {instruction.dst}"
            case Recv():
                return f"post the receive of {blocks(instruction)} from rank {instruction.src}"
            case Wait():
                return f"wait for {self.names.awaited(instruction, 'rank ')}"
            case Merge():
                return f"merge {instruction.into.rows} rows"
            case Pack():
                return f"pack {instruction.source.rows} rows"
            case Fill():
                return f"clear {instruction.into.rows} rows"
        return "release a buffer"

    def details(self, instruction: Instruction | Agree) -> dict[str, int | str]:
        """Return the numbers of an instruction: rows, bytes, peers."""
        match instruction:
            case Attend():
                return {"rows": instruction.patch.rows, "columns": instruction.patch.cols}
            case Send() | Recv():
                return self.of_post(instruction)
            case Wait(message):
                return self.of_post(self.names.posts[message])
            case Pack():
                return {"rows": instruction.source.rows, **self._bytes(instruction.into)}
            case Merge() | Fill():
                return {"rows": instruction.into.rows}
        return {}

    def of_post(self, post: Send | Recv) -> dict[str, int | str]:
        peer = post.dst if isinstance(post, Send) else post.src
        return {"peer": peer, "channel": post.channel, "rows": post.span.rows, **self._bytes(post.span)}

    def _bytes(self, span: Span) -> dict[str, int | str]:
        return {} if self.known.span_bytes is None else {"bytes": self.known.span_bytes(span)}


def _cut(bar: Bar, at: float, tile: str) -> Iterator[Bar]:
    """Yield two bars where an instruction is a kernel call and then the writing or merging of its result."""
    yield replace(bar, ended=at)
    label, name = (f"{what} of {tile}".removesuffix(" of ") for what in ("write or merge the result", "merge result"))
    yield replace(bar, kind="merge", label=label, name=name, short="", began=at, details={"rows": bar.details["rows"]})
