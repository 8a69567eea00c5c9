"""ContextParallel's options as flags of a training framework, and its time limit as the framework's own.

args: of the command line, or a TransformerConfig into which MindSpeed puts all of them.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tokenring.api.arguments import MOST_SECONDS, check_name, check_schedule_name, seconds_limit
from tokenring.errors import ConfigurationError

if TYPE_CHECKING:
    from tokenring.integrations.megatron.groups import LayerGroup
    from tokenring.topology.ranks import Topology

SCHEDULE = "--tokenring-schedule"
LATENTS = "--tokenring-latents"


class Flag(NamedTuple):
    """The command-line flag of an option; read: returns the option's value, from (flag, text, args)."""

    metavar: str
    help: str
    read: Callable[[str, str, Any], Any]


def _seconds(flag: str, text: str, args: Any) -> float:
    try:
        return seconds_limit(float(text))
    except ValueError as error:  # ConfigurationError is one, too
        raise ConfigurationError(f"{flag} {text}: {_why(error, 'write a number of seconds')}") from None


def _count(flag: str, text: str, args: Any) -> int:
    from tokenring.sequence.sizes import read_size

    return read_size(flag, text)


def _transport(flag: str, text: str, args: Any) -> str:
    from tokenring.lowering.backend_names import TRANSPORTS

    return _name(flag, text, "transport", TRANSPORTS)


def _kernel(flag: str, text: str, args: Any) -> str:
    from tokenring.lowering.backend_names import KERNELS

    return _name(flag, text, "kernel", KERNELS)


def _name(flag: str, text: str, what: str, known: Mapping[str, str]) -> str:
    try:
        check_name(what, text, known, "")
    except ConfigurationError as error:
        raise ConfigurationError(f"{flag}: {error}") from None
    return text


def _topology(flag: str, text: str, args: Any) -> Topology:
    """Return the topology of the file's first ranks that share a sequence and its heads. Raises ConfigurationError.

    Tensor parallelism is fastest in the order of ranks, as Megatron has it.
    """
    from tokenring.planner.machines.topology_file import read_topology
    from tokenring.topology.ranks import Topology

    try:
        found = read_topology(text)
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(f"{flag}: {error}") from None
    wanted = int(getattr(args, "context_parallel_size", 1)) * int(getattr(args, "tensor_model_parallel_size", 1))
    if found.world_size < wanted:
        raise ConfigurationError(
            f"{flag} {text}: it has {found.world_size} accelerators, and {wanted} ranks share a sequence and heads: "
            f"save that of all their machines (`tokenring topology --save FILE`)"
        )
    if found.world_size == wanted or found.graph is None:
        return found
    return Topology.of(found.graph, found.devices[:wanted])


def _why(error: Exception, otherwise: str) -> str:
    return str(error) if isinstance(error, ConfigurationError) else otherwise


FLAGS: Mapping[str, Flag] = {
    "timeout_seconds": Flag(
        "SECONDS", "how long a rank waits for another one (default: --distributed-timeout-minutes)", _seconds
    ),
    "transport": Flag("NAME", "what moves messages, as hccl/pair or gloo (default: auto)", _transport),
    "topology": Flag("FILE", "what joins the ranks, from `tokenring topology --save` (default: probed)", _topology),
    "memory_limit_bytes": Flag("BYTES", "of each rank, for buffers and connections, as 2G (default: no limit)", _count),
    "kernel": Flag("NAME", "what computes a tile, as npu-fusion or reference (default: auto)", _kernel),
    "pieces": Flag("N", "in how many parts chunks move, of a schedule by name (default: by sizes)", _count),
}  # fmt: skip


def flag_of(option: str) -> str:
    """Return the flag of an option, such as --tokenring-timeout-seconds."""
    return f"--tokenring-{option.replace('_', '-')}"


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add --tokenring-schedule and a flag for each option; for Megatron-LM's `extra_args_provider`."""
    group = parser.add_argument_group("tokenring")
    group.add_argument(SCHEDULE, default="auto", metavar="NAME", help="auto, auto:ring,usp, or one by name, as usp/4")
    add_options(group)
    return parser


def add_options(group: Any) -> None:
    """Add a flag for latents, and one for each option, whose values stay text until they are read: errors are ours."""
    group.add_argument(LATENTS, action="store_true", help="send latents of multi-latent attention, not keys and values")
    for option, flag in FLAGS.items():
        group.add_argument(flag_of(option), default=None, metavar=flag.metavar, help=flag.help)


def options_of(args: Any) -> dict[str, Any]:
    """Return the schedule and options that these flags give, for `use_tokenring`. Raises ConfigurationError."""
    schedule = getattr(args, "tokenring_schedule", "auto")
    check_schedule_name(schedule)
    latents = {"latents": True} if getattr(args, "tokenring_latents", False) else {}
    return {"schedule": schedule, **latents, **options_said(args)}


def options_said(args: Any) -> dict[str, Any]:
    """Return the options whose flags were given. Raises ConfigurationError for wrong values."""
    return {name: FLAGS[name].read(flag_of(name), str(text), args) for name, text in flags_said(args).items()}


def flags_said(args: Any) -> dict[str, object]:
    """Return the options whose flags were given, with their values as given."""
    given = {name: getattr(args, f"tokenring_{name}", None) for name in FLAGS}
    return {name: text for name, text in given.items() if text is not None}


# ---------- the time limit


def framework_seconds(config: Any, group: LayerGroup) -> float | None:
    """Return how long the training framework lets ranks wait for each other, in seconds; None: it has no such limit.

    The limit is --distributed-timeout-minutes, of MindSpeed's config or Megatron-LM's arguments; else the group's own,
    which Megatron-core sets with it.
    """
    minutes = getattr(config, "distributed_timeout_minutes", None)
    if minutes is None:
        minutes = getattr(_megatron_args(), "distributed_timeout_minutes", None)
    found = _group_seconds(group) if minutes is None else 60.0 * float(minutes)
    return None if found is None or found <= 0 else min(found, MOST_SECONDS)


def _megatron_args() -> Any:
    """Return Megatron-LM's arguments; None where it is not at work."""
    held = sys.modules.get("megatron.training.global_vars")
    return getattr(held, "_GLOBAL_ARGS", None)


def _group_seconds(group: LayerGroup) -> float | None:
    """Return the time limit of the group's first backend that has one; None: none has."""
    for device in getattr(group, "_device_types", ()):
        try:
            limit = group._get_backend(torch.device(device)).options._timeout  # type: ignore[union-attr]
            return float(limit.total_seconds())
        except (AttributeError, RuntimeError, TypeError):  # a backend of somebody else's
            continue
    return None
