"""s*: the fewest tokens a rank at which attention is compute-bound, for a preset, a model's heads and a schedule.

`python benchmarks/s_star.py` prints the table of docs/s-star.md. Attention counts as compute-bound when its
kernels take 95% of its time, forward and backward; below s* the choice of schedule matters, above it hardly does.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from model_heads import MODELS, ModelHeads  # noqa: E402

from tokenring.errors import ConfigurationError, TokenRingError  # noqa: E402
from tokenring.ir.schedule_data import PASSES  # noqa: E402
from tokenring.planner.choosing.auto import CallToPlan, make  # noqa: E402
from tokenring.planner.interconnects.interconnect import Interconnect  # noqa: E402
from tokenring.planner.interconnects.rank_order import context_parallel_group, heads_of_group, node_sizes  # noqa: E402
from tokenring.planner.interconnects.wiring import interconnect_of  # noqa: E402
from tokenring.planner.machines.machine import machine_of_preset  # noqa: E402
from tokenring.planner.machines.presets import PRESETS, preset  # noqa: E402
from tokenring.planner.simulation.predict import Setting, predict  # noqa: E402
from tokenring.schedule.families.registry import FAMILIES, parse, variants  # noqa: E402
from tokenring.sequence.layout import make_layout  # noqa: E402
from tokenring.sequence.mask import Causal, Full, Mask  # noqa: E402
from tokenring.tables.rates import Machine  # noqa: E402

SHARE = 0.95
CHUNKS = 2  # of a rank in a zigzag layout, the finer of the two that are used
POINTS = [*sorted(tokens for n in range(6, 20) for tokens in (1 << n, 3 << n - 1)), 1 << 20]  # tokens a rank
OVER_NICS = 4  # hosts, each with one rank of the group: tensor parallelism has the node
SHOWN = ("ring", "tokenring", "bidirectional", "direct-kv", "direct-q", "ulysses", "packed", "usp", "sub-sharded")


@dataclass(frozen=True)
class Place:
    """A preset, with context parallelism inside the node, or over NICs because tensor parallelism has the node."""

    name: str
    over_nics: bool

    @property
    def title(self) -> str:
        """The preset's name, with where its context parallelism lies."""
        return f"{self.name}, {'over NICs' if self.over_nics else 'in the node'}"

    def network(self) -> tuple[Interconnect, int]:
        """Return the group's interconnect, and the number of ranks over which the heads are spread."""
        if not self.over_nics:
            return interconnect_of(preset(self.name)), 1
        tensor = PRESETS[self.name].server.count
        return context_parallel_group(interconnect_of(preset(f"{self.name}*{OVER_NICS}")), tensor), tensor


def places() -> list[Place]:
    """Return all presets, each in the node and over NICs."""
    return [Place(name, over_nics) for over_nics in (False, True) for name in PRESETS]


def thresholds(place: Place, model: ModelHeads, families: Sequence[str] = SHOWN) -> dict[str, int | None]:
    """Return for each family the fewest tokens a rank with its best member; None where no length up to 1M is enough.

    A family is left out where it does not fit the heads or the ranks. Raises ConfigurationError where the heads do
    not split over the node.
    """
    net, tensor = place.network()
    mask = Causal() if model.causal else Full()
    found: dict[str, int | None] = {}
    for family in families:
        names = [name for name in _members(net, model, tensor) if name.partition("/")[0] == family]
        if names:
            found[family] = None
        for name in names:
            found[family] = _fewest(place, net, model, tensor, mask, name, found[family])
    return found


def _members(net: Interconnect, model: ModelHeads, tensor: int) -> Iterator[str]:
    size = heads_of_group(model.workload(net.world_size), tensor)
    for local in node_sizes(net):
        yield from variants(net.world_size, size, local)


def _fewest(
    place: Place, net: Interconnect, model: ModelHeads, tensor: int, mask: Mask, name: str, known: int | None
) -> int | None:
    """Return the first of POINTS that is enough, if it is below the known one; else the known one. By bisection."""

    def enough(tokens: int) -> bool:
        return share(place, net, model, tensor, mask, name, tokens) >= SHARE

    fewer = POINTS if known is None else POINTS[: POINTS.index(known)]
    if not fewer or not enough(fewer[-1]):
        return known
    return fewer[bisect_left(fewer[:-1], True, key=enough)]


def share(place: Place, net: Interconnect, model: ModelHeads, tensor: int, mask: Mask, name: str, tokens: int) -> float:
    """Return the part of the time that kernels take, from 0 to 1, with so many tokens a rank.

    If the schedule's pieces do not divide that number, the next one that they divide is taken.
    """
    length = _dividing(name, tokens, net.world_size) * net.world_size
    machine = _machine(place.name, model.dtype)
    workload = heads_of_group(model.workload(length), tensor)
    layout = make_layout("zigzag" if model.causal else "contiguous", net.world_size, length)
    setting = Setting(workload, net, machine, PASSES)
    found = predict(make(CallToPlan(setting, layout, layout, mask), name), setting)
    return found.compute_seconds / found.seconds


def _dividing(name: str, tokens: int, ranks: int) -> int:
    """Return the next number of tokens a rank whose two chunks divide into a schedule's pieces, such as seven rings."""
    scheme = parse(name).make(ranks)
    parts = CHUNKS * lcm(scheme.q_pieces, scheme.kv_pieces)
    return -(-tokens // parts) * parts


@lru_cache
def _machine(name: str, dtype: torch.dtype) -> Machine:
    return machine_of_preset(name, dtype, or_half=True)


def table(
    chosen: Sequence[Place], models: Sequence[ModelHeads], families: Sequence[str], status: Callable[[str], None]
) -> Iterator[str]:
    """Yield the lines of a Markdown table for each place."""
    for place in chosen:
        yield f"\n### {place.title}\n"
        yield "| model | " + " | ".join(families) + " |"
        yield "|---" * (len(families) + 1) + "|"
        for model in models:
            status(f"{place.title}: {model.title}")
            try:
                found = thresholds(place, model, families)
            except ConfigurationError as error:
                yield f"| {model.title} | {error} |" + " |" * (len(families) - 1)
                continue
            yield f"| {model.title} | " + " | ".join(_cell(found, family) for family in families) + " |"


def _cell(found: dict[str, int | None], family: str) -> str:
    if family not in found:
        return "–"
    tokens = found[family]
    return "never" if tokens is None else f"{tokens:,}"


def _names(option: str, text: str, known: Iterable[str]) -> list[str]:
    """Read names separated by commas. Raises ConfigurationError for those that are unknown."""
    names, all_names = text.split(","), list(known)
    if unknown := [name for name in names if name not in all_names]:
        raise ConfigurationError(f"{option} {text}: {unknown[0]!r} is not one of {', '.join(all_names)}")
    return names


def main(argv: list[str] | None = None) -> int:
    """Print the table of the places and models that are asked for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python benchmarks/s_star.py", description=__doc__)
    parser.add_argument("--presets", default=",".join(PRESETS), metavar="NAMES")
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAMES")
    parser.add_argument("--families", default=",".join(SHOWN), metavar="NAMES")
    parser.add_argument("--where", choices=("node", "nics", "both"), default="both")
    options = parser.parse_args(argv)
    wanted = {"node": (False,), "nics": (True,), "both": (False, True)}[options.where]
    try:
        presets = _names("--presets", options.presets, PRESETS)
        models = [MODELS[name] for name in _names("--models", options.models, MODELS)]
        families = _names("--families", options.families, FAMILIES)
        chosen = [each for each in places() if each.name in presets and each.over_nics in wanted]
        for line in table(chosen, models, families, lambda text: print(text, file=sys.stderr)):
            print(line, flush=True)
    except TokenRingError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
