"""The flags of the feature, and the flags of MindSpeed and Megatron that conflict with them.

args: those of the command line, or a TransformerConfig, into which MindSpeed puts all of them.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

from tokenring.api.arguments import check_schedule_name
from tokenring.errors import ConfigurationError
from tokenring.integrations import mindspeed_llm
from tokenring.integrations.megatron.latents import check_latent_flags
from tokenring.integrations.megatron.options import LATENTS, SCHEDULE, add_options, flag_of, flags_said, options_said
from tokenring.integrations.mindspeed_cuts.layouts import ALGORITHMS
from tokenring.integrations.mindspeed_cuts.together import TOGETHER
from tokenring.schedule.families.registry import misfit

ASKED = "--context-parallel-attention tokenring"

CONFLICTS: dict[str, tuple[Callable[[Any], bool], str]] = {  # attribute → which of its values, and why
    "context_parallel_algo": (
        lambda value: value not in (None, *ALGORITHMS),
        f"batches are cut by it: choose one of {', '.join(ALGORITHMS)}",
    ),
    "position_embedding_type": (lambda value: value == "alibi", "a bias of attention cannot be split: use rope"),
    "tp_2d": (bool, "its ranks share the sequence, too: leave it out"),
    "apply_query_key_layer_scaling": (bool, "scores are not divided by the layer's number here: leave it out"),
    "attention_dropout": (bool, "it cannot be the same under every split: set it to 0 (Megatron's default is 0.1)"),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags to MindSpeed's parser, and through MindSpeed to Megatron's."""
    group = parser.add_argument_group("tokenring")
    group.add_argument(
        "--context-parallel-attention",
        choices=("mindspeed", "tokenring"),
        default="mindspeed",
        help="whose attention runs under context parallelism",
    )
    group.add_argument(
        SCHEDULE,
        default="auto",
        metavar="NAME",
        help="auto (MindSpeed's own algorithm stays where it is hardly slower), auto:ring,usp to choose among these, "
        "or one by name, as usp/4, without comparing",
    )
    add_options(group)


def is_asked(args: Any) -> bool:
    """Tell whether our attention is to run."""
    return getattr(args, "context_parallel_attention", None) == "tokenring" and ranks(args) > 1


def ranks(args: Any) -> int:
    """Return the size of the context-parallel group, which is text until Megatron has parsed its own flags."""
    return int(getattr(args, "context_parallel_size", 1))


def is_auto(schedule: str) -> bool:
    """Tell whether the planner chooses the schedule."""
    return schedule.partition(":")[0] == "auto"


def check_arguments(args: Any) -> None:
    """Raise ConfigurationError for flags that conflict, and for values that are unknown or do not fit."""
    name = getattr(args, "tokenring_schedule", "auto")
    said = {SCHEDULE: name} if name != "auto" else {}
    said |= {flag_of(option): value for option, value in flags_said(args).items()}
    said |= {LATENTS: ""} if (latents := getattr(args, "tokenring_latents", False)) else {}
    if said and args.context_parallel_attention != "tokenring":
        flag, value = next(iter(said.items()))
        raise ConfigurationError(f"{f'{flag} {value}'.strip()} has no effect without {ASKED}: add it")
    if not is_asked(args):
        return
    for attribute, (conflicts, why) in (CONFLICTS | mindspeed_llm.CONFLICTS).items():
        if conflicts(value := getattr(args, attribute, None)):
            raise ConfigurationError(f"--{attribute.replace('_', '-')} {value} does not go with {ASKED}: {why}")
    for attribute, (conflict, why) in TOGETHER.items():
        if conflict(args):
            value = getattr(args, attribute)
            raise ConfigurationError(f"--{attribute.replace('_', '-')} {value} does not go with {ASKED}: {why}")
    if latents:
        check_latent_flags(args, LATENTS)
    check_schedule_name(name)
    options_said(args)
    if not is_auto(name) and (reason := misfit(name, ranks(args))) is not None:
        raise ConfigurationError(f"{SCHEDULE} {name}: {reason}")
