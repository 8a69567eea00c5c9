"""The calls of users: put tokenring into a trainer of MindSpeed-LLM or MindSpeed-MM, and take it out."""

from __future__ import annotations

import sys
from typing import Any, Literal, get_args

from tokenring.errors import ConfigurationError
from tokenring.integrations.mindspeed_fsdp2.contexts import TrainerContexts, check_options
from tokenring.integrations.mindspeed_fsdp2.replacing import Replaced

Trainer = Literal["mindspeed_llm", "mindspeed_mm"]
TRAINERS: tuple[str, ...] = get_args(Trainer)

# State of the process: what was replaced, and with which contexts.
_replaced: list[Replaced] = []
_contexts = TrainerContexts()


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
    check_options(options)
    before = list(_replaced)
    _put_back()
    try:
        _replaced[:] = _found(trainer, any_model)
    except BaseException:
        _replaced[:] = before  # which stays in use
        raise
    finally:
        for each in _replaced:
            each.put()
    _contexts.use(options)


def _found(trainer: str, any_model: bool) -> list[Replaced]:
    """Return what is to be replaced in a trainer, which has its own functions now."""
    if trainer == "mindspeed_llm":
        from tokenring.integrations.mindspeed_fsdp2 import llm

        return llm.replace(_contexts, any_model)
    from tokenring.integrations.mindspeed_fsdp2 import mm

    return mm.replace(_contexts)


def stop_tokenring() -> None:
    """Put back what `use_tokenring` replaced, and give back what its contexts hold.

    Where the trainer put ours into a model meanwhile, it calls theirs from now on.
    """
    _put_back()
    _contexts.stop()


def _put_back() -> None:
    for each in _replaced:
        each.put_back()
    _replaced.clear()
