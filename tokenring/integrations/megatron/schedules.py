"""Schedules of layers: a layer's `cp_comm_type`, where that names one, else the spec's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenring.api.arguments import check_schedule_name
from tokenring.errors import ConfigurationError

UNSAID = (None, "p2p")  # "p2p" is what Megatron's command line fills in: who wants a ring says "ring"
OF_MEGATRON = {"all_gather": "all-gather-kv", "a2a": "ulysses"}
A2A_P2P = "a2a+p2p"


def schedule_of_layer(cp_comm_type: Any, schedule: str, config: Any) -> str:
    """Return the name of the layer's schedule. Raises ConfigurationError for a cp_comm_type that names none.

    cp_comm_type: a name of ours ("ring", "auto:usp,ulysses"), or one of Megatron's: p2p leaves it to `schedule`,
    all_gather is "all-gather-kv", a2a "ulysses", a2a+p2p USP, by config.hierarchical_context_parallel_sizes if set.
    """
    if cp_comm_type in UNSAID:
        check_schedule_name(schedule)
        return schedule
    if cp_comm_type == A2A_P2P:
        sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
        return f"usp/{sizes[0]}" if sizes else "auto:usp"
    name: str = OF_MEGATRON.get(cp_comm_type, cp_comm_type) if isinstance(cp_comm_type, str) else cp_comm_type
    try:
        check_schedule_name(name)
    except ConfigurationError as error:
        known = ", ".join(["p2p", *OF_MEGATRON, A2A_P2P])
        raise ConfigurationError(
            f"cp_comm_type {cp_comm_type!r} is not one of Megatron's ({known}), and as a name of tokenring's: {error}"
        ) from None
    return name


def per_layer(names: Iterable[str]) -> list[str]:
    """Return a cp_comm_type for each layer of the model: `config.cp_comm_type = per_layer(["ring", "ulysses", ...])`.

    Megatron-core 0.12 to 0.16 look up entry n for layer n, counted from 1: with a plain list each layer would get the
    next one's, and the last an IndexError. Of this list each gets its own, in every version.
    """
    from megatron.core import __version__

    counts_from_1 = tuple(map(int, __version__.split(".")[:2])) < (0, 17)
    return _CountedFrom1(names) if counts_from_1 else list(names)


class _CountedFrom1(list[str]):
    """A list whose first entry is number 1."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index - 1 if isinstance(index, int) else index)
