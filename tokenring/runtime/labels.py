"""Names of instructions in traces and profiles: attend q0×kv4, send kv0,kv7 to 1, wait kv4 from 3."""

from __future__ import annotations

from collections.abc import Iterable

from tokenring.ir.schedule_data import ScheduleData
from tokenring.ir.text import tile_text
from tokenring.lowering.calls import Supports, calls
from tokenring.lowering.program import Attend, Fill, Instruction, Multiply, Program, Recv, Send, Wait
from tokenring.lowering.storage import storage_of
from tokenring.runtime.trace import Agree


class Names:
    """The names of the instructions of one pass at one rank."""

    def __init__(self, instructions: Iterable[Instruction | Agree]) -> None:
        self.posts = {each.message: each for each in instructions if isinstance(each, (Send, Recv))}

    def of(self, instruction: Instruction | Agree, tile: str = "") -> str:
        """Return a name of a few words. tile: of a kernel call, where it is known."""
        match instruction:
            case Agree():
                return "agree"
            case Attend():
                return f"attend {tile}".rstrip()
            case Multiply():
                rows, columns = instruction.corner
                to = "".join(f" for {kind}" for kind in sorted({each.kind for each in instruction.results}))
                return f"multiply {rows}:{rows + instruction.q.rows} × {columns}:{columns + instruction.kv.rows}{to}"
            case Send():
                return f"send {blocks(instruction)} to {instruction.dst}"
            case Recv():
                return f"receive {blocks(instruction)} from {instruction.src}"
            case Wait():
                return f"wait {self.awaited(instruction)}"
            case Fill():
                return "clear"
        return type(instruction).__name__.lower()

    def awaited(self, wait: Wait, rank: str = "") -> str:
        """Return the blocks of the message that is waited for, and its peer; `rank` stands before the peer's number."""
        post = self.posts[wait.message]
        peer = f"from {rank}{post.src}" if isinstance(post, Recv) else f"to {rank}{post.dst}"
        return f"{blocks(post)} {peer}"


def blocks(post: Send | Recv) -> str:
    """Return the blocks of a message, without the step that its label begins with."""
    return post.label.partition(", ")[2] or post.label


def tiles(schedule: ScheduleData, rank: int, supports: Supports) -> list[str]:
    """Return the tile of each kernel call of a rank, in order."""
    mine = sorted((tile for tile in schedule.tiles if tile.rank == rank), key=lambda tile: tile.step)
    return [tile_text(schedule, tile) for tile in mine for _ in calls(storage_of(schedule), tile, supports)]


def range_names(schedule: ScheduleData, program: Program, supports: Supports) -> list[str]:
    """Return the name of each step of an executor, as profilers show it: "tokenring forward 2: attend q0×kv4"."""
    names, calls_of = Names(program.instructions), iter(tiles(schedule, program.rank, supports))
    found = []
    for instruction, step in zip(program.instructions, program.steps, strict=True):
        tile = next(calls_of, "") if isinstance(instruction, Attend) else ""
        found.append(f"tokenring {program.direction} {step}: {names.of(instruction, tile)}")
    return found
