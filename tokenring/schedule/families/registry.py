"""The registry: which families there are, what a name says, and what fits a workload."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokenring.errors import ConfigurationError
from tokenring.schedule.families import basic
from tokenring.schedule.families.change import in_pieces, mirrored
from tokenring.schedule.families.family import Family, Later, Numbers, split_heads
from tokenring.schedule.scheme import Scheme

if TYPE_CHECKING:
    from tokenring.sequence.layout import Layout
    from tokenring.sequence.workload import Workload

NAME = re.compile(r"([a-z-]+)(?:/([1-9][0-9]{0,4}(?:x[1-9][0-9]{0,4})*))?((?:/[a-z]+[0-9]{0,3})*)", re.ASCII)
PIECES = re.compile("pieces([1-9][0-9]{0,2})", re.ASCII)  # an option, as in "ring/pieces2"
SMALL_TILE_TOKENS = 128  # shorter sides cost the CPU kernel a tenth to a half more for each pair


def _late(scheme: Scheme) -> Scheme:
    return replace(scheme, late=True)


def _keep(scheme: Scheme) -> Scheme:
    return replace(scheme, keep=frozenset({"q", "kv"}))


def _regather(scheme: Scheme) -> Scheme:
    return replace(scheme, keep=frozenset())


OPTIONS = {"late": _late, "keep": _keep, "regather": _regather}

RING, TOKENRING = "Ring Attention, arXiv:2310.01889", "TokenRing, arXiv:2412.20501"
MINE = "tokenring"
choices, mixed, multi_ring, nodes, one_hop = map(Later, ("choices", "mixed", "multi_ring", "nodes", "one_hop"))
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("ring", "KV", "1 × 1 × P", RING, lambda world: basic.ring(), turns=True, cut=basic.kv_cut),
        Family("tokenring", "Q", "1 × P × 1", TOKENRING, lambda world: basic.tokenring(), turns=True, cut=basic.q_cut),
        Family(
            "bidirectional", "KV", "1 × 1 × P", MINE, lambda world: basic.bidirectional(), cut=basic.kv_cut,
            least_pieces=2,
        ),
        Family(
            "direct-kv", "KV", "1 × 1 × P", MINE, lambda world: basic.direct_kv(), cut=basic.kv_cut, small=basic.fused
        ),
        Family("direct-q", "Q", "1 × P × 1", MINE, lambda world: basic.direct_q(), cut=basic.q_cut, small=basic.fused),
        Family("all-gather-kv", "KV", "1 × 1 × P", "Llama 3, arXiv:2407.21783", basic.all_gather_kv),
        Family(
            "ulysses", "Q, KV", "P × 1 × 1", "DeepSpeed Ulysses, arXiv:2309.14509", one_hop.ulysses, ("K",), 1,
            choices=choices.ulysses,
        ),
        Family("packed", "Q, KV", "P of G × P × 1", MINE, one_hop.packed, ("G",), choices=choices.packed),
        Family(
            "uneven", "Q, KV", "P of G × 1 × 1", "DeepSpeed Ulysses, uneven heads", one_hop.uneven, ("G",),
            choices=choices.uneven,
        ),
        Family(
            "usp", "Q, KV", "U × 1 × P/U", "USP, arXiv:2405.07719", nodes.usp, ("U",), choices=choices.usp, turns=True
        ),
        Family("tiles", "Q, KV", "1 × A × B", MINE, one_hop.tiles, ("A", "B"), choices=choices.tiles),
        Family(
            "sub-sharded", "Q, KV", "U × A × B", MINE, one_hop.sub_sharded, ("U", "A", "B"),
            choices=choices.sub_sharded,
        ),
        Family("mixed", "Q or KV", "1 × P × P, each pair once", MINE, mixed.mixed, ("G", "H"), 2,
            choices=choices.mixed),
        Family(
            "double-ring", "KV", "1 × 1 × (P/L · L)", "LoongTrain, arXiv:2406.18485", nodes.double_ring, ("L",),
            choices=choices.nodes, turns=True,
        ),
        Family(
            "case-iii", "Q, KV", "1 × L × P/L", TOKENRING, nodes.case_iii, ("L",), choices=choices.nodes, turns=True
        ),
        Family(
            "case-iii-direct", "Q, KV", "1 × L × P/L", MINE, nodes.case_iii_direct, ("L",), choices=choices.nodes,
            turns=True,
        ),
        Family("reduced", "Q", "1 × P × 1", MINE, nodes.reduced, ("L",), choices=choices.nodes),
        Family("relay", "KV", "1 × 1 × P", MINE, nodes.relay, ("L",), choices=choices.nodes),
        Family("relay-q", "Q", "1 × P × 1", MINE, nodes.relay_q, ("L",), choices=choices.nodes),
        Family("mesh-kv", "KV", "1 × 1 × P", MINE, nodes.mesh_kv, ("A", "B"), repeats=True, choices=choices.mesh),
        Family("mesh-q", "Q", "1 × P × 1", MINE, nodes.mesh_q, ("A", "B"), repeats=True, choices=choices.mesh),
        Family(
            "multi-ring", "KV", "1 × 1 × P", "TASP, arXiv:2509.26541", multi_ring.multi_ring,
            choices=choices.multi_ring,
        ),
        Family("multi-ring-q", "Q", "1 × P × 1", MINE, multi_ring.multi_ring_q, choices=choices.multi_ring),
    )
}  # fmt: skip
OURS = frozenset(FAMILIES.values())  # users may add theirs


@dataclass(frozen=True)
class Named:
    """A schedule's name, read: its family, parameters and options."""

    text: str
    family: Family
    parameters: Numbers
    options: tuple[str, ...]
    pieces: int | None = None

    def make(self, world_size: int, direction: int = 1, pieces: int | None = None, small: bool = False) -> Scheme:
        """Make the scheme for so many ranks. Raises ConfigurationError if it does not fit them.

        direction: -1 for its mirror image. pieces: None for what the name says, else the fewest.
        small: for small tiles.
        """
        family = self.family
        if pieces is not None and self.pieces is not None:
            raise ConfigurationError(f"schedule {self.text!r} says how many pieces: leave pieces={pieces} out")
        pieces = self.pieces if pieces is None else pieces
        scheme = family.make(self.parameters, world_size)
        if pieces is not None:
            if pieces < family.least_pieces or pieces % family.least_pieces:
                raise ConfigurationError(
                    f"schedule {self.text!r} in {pieces} pieces: use a multiple of {family.least_pieces}"
                )
            scheme = (family.cut or in_pieces)(scheme, pieces)
        if small and family.small is not None:
            scheme = family.small(scheme)
        if direction == -1:
            scheme = mirrored(scheme, world_size)
        for option in self.options:
            scheme = OPTIONS[option](scheme)
        return replace(scheme, name=self.text)


def parse(name: str) -> Named:
    """Return what a name says. Raises ConfigurationError; its fit to a world size is checked when it is made."""
    match = NAME.fullmatch(name) if isinstance(name, str) else None
    family = FAMILIES.get(match[1]) if match else None
    if match is None or family is None:
        from tokenring.nearest import hint

        written = family_of(name) if isinstance(name, str) else ""
        raise ConfigurationError(f"unknown schedule {name!r}; choose one of {forms()}{hint(written, FAMILIES)}")
    numbers = tuple(map(int, match[2].split("x"))) if match[2] else ()
    if not family.takes(len(numbers)):
        found = {0: "none is given", 1: "1 is given"}.get(len(numbers), f"{len(numbers)} are given")
        raise ConfigurationError(
            f"schedule {name!r}: {family.form} takes {_count(family)}, {found}; e.g. {_example(family)}"
        )
    options = tuple(option for option in match[3].split("/")[1:] if not PIECES.fullmatch(option))
    pieces = [int(found[1]) for found in map(PIECES.fullmatch, match[3].split("/")) if found]
    if len(pieces) > 1:
        raise ConfigurationError(f"schedule {name!r} says twice how many pieces")
    if unknown := [option for option in options if option not in OPTIONS]:
        from tokenring.nearest import hint

        known = ", ".join([*OPTIONS, "piecesN"])
        like = hint(unknown[0], OPTIONS, f"{name.removesuffix(f'/{unknown[0]}')}/")
        raise ConfigurationError(f"schedule {name!r}: there is no option {unknown[0]!r}; use {known}{like}")
    return Named(name, family, numbers, options, pieces[0] if pieces else None)


def _count(family: Family) -> str:
    if not family.parameters:
        return "no parameters"
    least = f"{len(family.parameters)} or more numbers" if family.repeats else "the numbers"
    return f"{least} {' and '.join(family.parameters)}" if len(family.parameters) > 1 else "one number"


def _example(family: Family) -> str:
    """Return the name of a member on eight ranks."""
    return next(iter(family.variants(8, None, 4 if family.choices is choices.nodes else None)), family.name)


def forms() -> str:
    """Return how all names are written."""
    return ", ".join(family.form for family in FAMILIES.values())


def family_of(name: str) -> str:
    """Return what stands before the numbers and options of a name."""
    return name.partition("/")[0]


def is_known(name: str) -> bool:
    """Return whether it names a family, whatever the parameters."""
    return family_of(name) in FAMILIES


def expand(
    names: Sequence[str], world_size: int, workload: Workload | None = None, local: int | None = None
) -> list[str]:
    """Return names for a planner to choose among: a family stands for all its members worth trying.

    Raises ConfigurationError for unknown names, and where nothing is left.
    """
    found: dict[str, None] = {}
    for name in names:
        family = FAMILIES.get(name)
        found.update(
            dict.fromkeys([parse(name).text] if family is None else family.variants(world_size, workload, local))
        )
    if not found:
        asked = ",".join(names) or "nothing"
        raise ConfigurationError(
            f"auto was restricted to {asked}, but nothing of that fits {world_size} ranks and these heads; "
            f"choose among {forms()}"
        )
    return list(found)


def variants(world_size: int, workload: Workload | None = None, local: int | None = None) -> list[str]:
    """Return the names of all schedules worth trying, with `local` ranks a node (None: one node)."""
    return [name for family in FAMILIES.values() for name in family.variants(world_size, workload, local)]


def misfit(
    name: str,
    world_size: int,
    workload: Workload | None = None,
    q_layout: Layout | None = None,
    kv_layout: Layout | None = None,
    pieces: int | None = None,
) -> str | None:
    """Return why a schedule does not fit (the world size, heads or chunks that do not divide), None if it does."""
    try:
        scheme = parse(name).make(world_size, pieces=pieces)
        check_fit(name, scheme, workload, q_layout, kv_layout)
    except ConfigurationError as error:
        return str(error)
    return None


def check_fit(
    name: str,
    scheme: Scheme,
    workload: Workload | None = None,
    q_layout: Layout | None = None,
    kv_layout: Layout | None = None,
) -> None:
    """Raise ConfigurationError unless heads and chunks divide."""
    for cut, layout in ((scheme.q_pieces, q_layout), (scheme.kv_pieces, kv_layout)):
        if layout is not None and not layout.takes_pieces(cut):
            raise ConfigurationError(
                f"schedule {name!r}: {cut} pieces do not divide chunks of {layout.chunk_length} tokens "
                f"(layout {layout.name!r} of {layout.length}); use fewer pieces or another length"
            )
    if workload is not None:
        check_heads(name, scheme.head_groups, workload)


def check_heads(name: str, groups: int, workload: Workload) -> None:
    """Raise ConfigurationError unless the heads divide into so many groups."""
    if not split_heads(workload, groups):
        if workload.latent_dim is not None:
            raise ConfigurationError(
                f"schedule {name!r} splits heads into {groups} groups, and latents are of all heads: choose one that "
                f"moves whole keys and values, such as 'ring' or 'direct-kv', or 'auto'; or expand them and call "
                f"attention()"
            )
        raise ConfigurationError(
            f"schedule {name!r}: {workload.q_heads} query heads over {workload.kv_heads} kv heads do not split into "
            f"{groups} equal head groups; choose one with other head groups, as sub-sharded/UxAxB, or with none"
        )
