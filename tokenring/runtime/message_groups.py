"""Groups of messages, which transports want to know beside single messages: where all go, which go together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tokenring.backends.interfaces import Transport
from tokenring.lowering.program import Instruction, Pack, Recv, Send, Wait
from tokenring.runtime.pool import Views

T = TypeVar("T")


def placed(transport: Transport | None, views: Views, instructions: Sequence[Instruction]) -> Callable[[], object]:
    """Send the ranks the places of a program's messages; return what is to be called whenever the program begins.

    This is a collective call where the transport is a placing one.
    """
    if transport is None or not transport.target.placing:
        return lambda: None
    landings = []
    for each in instructions:
        if isinstance(each, Recv):
            landing = views.landing(each.span)
            landings.append((each.src, each.channel, views.message(each.span) if landing is None else landing))
    placement = transport.place(landings)
    return lambda: transport.begin(placement)


def grouped(
    transport: Transport | None, instructions: Sequence[Instruction], steps: list[Callable[[T], None]]
) -> list[Callable[[T], None]]:
    """Return the steps, where posts that stand in a row begin to move at the last of them."""
    if transport is None or not transport.target.grouping:
        return steps
    made = list(steps)
    for at in last_posts(instructions):
        made[at] = _in_turn(made[at], lambda call: transport.go())
    return made


def last_posts(instructions: Sequence[Instruction]) -> list[int]:
    """Return the positions where rows of posts on one channel end; only copies into what is sent stand inside rows.

    Of one channel, so that rows follow each other in the order of posts that all ranks share: groups of both channels
    at once would begin in an order that depends on how each rank's rows happen to be cut.
    """
    found: list[int] = []
    last: int | None = None
    row = ""  # its channel
    for at, instruction in enumerate([*instructions, None]):
        if isinstance(instruction, Pack):
            continue
        channel = instruction.channel if isinstance(instruction, Recv | Send) else ""
        if last is not None and channel != row:
            found.append(last)
        last, row = at if channel else None, channel
    return found


def settled(
    transport: Transport | None, instructions: Sequence[Instruction], steps: list[Callable[[T], None]]
) -> list[Callable[[T], None]]:
    """Return the steps, of which the first that waits for a message also makes sure that all ranks agree."""
    at = next((at for at, each in enumerate(instructions) if isinstance(each, Wait)), None)
    if at is None or transport is None or not transport.target.deferring:
        return steps
    made = list(steps)
    made[at] = _in_turn(lambda call: transport.settle(), made[at])
    return made


def _in_turn(*steps: Callable[[T], None]) -> Callable[[T], None]:
    def each(call: T) -> None:
        for step in steps:
            step(call)

    return each
