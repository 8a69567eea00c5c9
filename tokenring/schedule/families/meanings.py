"""Meanings of the numbers and the options in a schedule's name, in a few words each."""

from __future__ import annotations

from collections.abc import Iterable

from tokenring.errors import ConfigurationError
from tokenring.schedule.families.registry import Named, parse

NODE = "L ranks a node"
MESH = "the sizes of the mesh's dimensions"
NUMBERS = {
    "ulysses": "the heads go in K waves: one is exchanged while the one before is computed",
    "packed": "G head groups, cut into equal shares for all ranks",
    "uneven": "G head groups, of which some ranks have one more than others",
    "usp": "U neighbours share the heads; K and V go round between their groups",
    "tiles": "a rank computes with Q of A ranks and with K and V of B",
    "sub-sharded": "U head groups, Q in A pieces, K and V in B",
    "mixed": "computes with G query heads a kv head, in H head groups",
    "double-ring": NODE,
    "case-iii": NODE,
    "case-iii-direct": NODE,
    "reduced": NODE,
    "relay": NODE,
    "relay-q": NODE,
    "mesh-kv": MESH,
    "mesh-q": MESH,
}
OPTIONS_SAY = {
    "late": "half of each rank's own tile is computed last, so that the last results travel meanwhile",
    "keep": "what forward gathered is kept for backward, and does not move again",
    "regather": "backward gathers again what forward gathered, which saves memory",
    "pieces": "chunks move in N pieces, each computed with once it has come",
}


def meanings(names: Iterable[str]) -> dict[str, str]:
    """Return what is written in these names behind the families, each once: as it is written, and what it says."""
    known = [named for name in names if (named := _parsed(name)) is not None]
    found: dict[str, str] = {}
    for named in known:
        if named.parameters:
            found[named.family.form.replace("[", "").replace("]", "")] = NUMBERS[named.family.name]
    for named in known:
        options = [*named.options, *([] if named.pieces is None else ["pieces"])]
        found |= {"/piecesN" if each == "pieces" else f"/{each}": OPTIONS_SAY[each] for each in options}
    return found


def _parsed(name: str) -> Named | None:
    """Return what a name says; None for a user's own schedule, which may have any name."""
    try:
        return parse(name)
    except ConfigurationError:
        return None
