"""The calls of users: put tokenring into a trainer of MindSpeed-LLM or MindSpeed-MM, and take it out."""

from __future__ import annotations

import sys
from typing import Any, Literal, get_args

from tokenring.errors import ConfigurationError
from tokenring.integrations.mindspeed_fsdp2.contexts import TrainerContexts
from tokenring.integrations.mindspeed_fsdp2.replacing import Replaced

Trainer = Literal["mindspeed_llm", "mindspeed_mm"]
TRAINERS: tuple[str, ...] = get_args(Trainer)

# State of the process: what was replaced, and with which contexts.
_replaced: list[Replaced] = []
_contexts: list[TrainerContexts] = []


def use_tokenring(trainer: Trainer | None = None, *, any_model: bool = False, **options: Any) -> None:
    """Let the context parallelism of MindSpeed-LLM's or MindSpeed-MM's FSDP2 trainer run on tokenring.

    trainer: which of both; None: the one that this process has imported.
    options: of ContextParallel: schedule ("auto", which is the default, or a name), timeout_seconds, transport,
    topology, memory_limit_bytes, kernel, ... The sequence stays cut as the trainer's own options say (cp_type and
    cp_size; ring_attention_size and ulysses_parallel_size), over its own group of ranks.
    any_model: take models with layers of other kinds that were not compared with one process.

    Call it once in every process, above the line that builds the trainer: models that tokenring does not support are
    then refused by name. A model that was built already is changed, too.

    Raises BackendUnavailable where the trainer cannot be imported, UnsupportedError for a release without the
    functions that are replaced, ConfigurationError for options that do not fit; and in training, on all ranks,
    UnsupportedError for what would be wrong.
    """
    if trainer is None:
        found = [each for each in TRAINERS if each in sys.modules]
        if len(found) != 1:
            raise ConfigurationError(
                f"use_tokenring() finds {' and '.join(found) or 'neither of ' + ' and '.join(TRAINERS)} imported: say "
                f"which, as use_tokenring({TRAINERS[0]!r})"
            )
        trainer = found[0]  # type: ignore[assignment]
    if trainer not in TRAINERS:
        raise ConfigurationError(f"use_tokenring({trainer!r}): say one of {', '.join(map(repr, TRAINERS))}")
    contexts = TrainerContexts(options)
    stop_tokenring()
    if trainer == "mindspeed_llm":
        from tokenring.integrations.mindspeed_fsdp2 import llm

        made = llm.replace(contexts, any_model)
    else:
        from tokenring.integrations.mindspeed_fsdp2 import mm

        made = mm.replace(contexts)
    for each in made:
        each.put()
    _replaced[:], _contexts[:] = made, [contexts]


def stop_tokenring() -> None:
    """Put back what `use_tokenring` replaced, and give back what its contexts hold."""
    for each in _replaced:
        each.put_back()
    for contexts in _contexts:
        contexts.close()
    _replaced.clear()
    _contexts.clear()
