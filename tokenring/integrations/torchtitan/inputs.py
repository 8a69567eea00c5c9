"""The place where torchtitan cuts batches for context parallelism: ours for models with our attention, else its own."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

from tokenring.api.context import ContextParallel
from tokenring.api.standing import is_open
from tokenring.errors import ConfigurationError
from tokenring.integrations.torchtitan.batches import Window, cut_batch

NAME = "prepare_context_parallel_input"  # of the function of torchtitan.distributed.context_parallel
CALLERS = {"torchtitan.trainer": "Trainer", "torchtitan.components.validate": "Validator"}  # which import it by name
METHOD = "post_dataloading_process"  # of theirs, which calls it
SETUP = "tokenring_setup"  # field of the config of our inner attention: the number of its Setup
OURS = "_of_tokenring"  # attribute of the function that stands there instead

# State of the process: setups by the numbers that configs hold, and the model whose batch is being prepared.
_numbers = itertools.count(1)
_setups: dict[int, Setup] = {}
_model: ContextVar[Any] = ContextVar("tokenring_model", default=None)


@dataclass
class Setup:
    """Hold the options of `use_tokenring` for a model, and the contexts that were made of them, one for each mesh."""

    options: dict[str, Any]
    windows: frozenset[Window] = frozenset()
    contexts: dict[Any, ContextParallel] = field(default_factory=dict)

    def number(self) -> int:
        """Return a number of this process by which a model's config names it, from now on."""
        number = next(_numbers)
        _setups[number] = self
        return number

    def context(self, mesh: Any) -> ContextParallel:
        """Return the ContextParallel of torchtitan's mesh "cp"; all its ranks come here together.

        A mesh of new groups equals one of the same ranks whose groups were destroyed.
        """
        found = self.contexts.get(mesh)
        if found is None or not is_open(found):
            found = self.contexts[mesh] = ContextParallel(mesh, **self.options)
        return found


def setup_of(model: Any) -> Setup | None:
    """Return the Setup of a model's config; None: its attention is not ours. Raises ConfigurationError."""
    layers = [*(getattr(model, "layers", None) or ()), None]
    number = getattr(getattr(getattr(layers[0], "attention", None), "inner_attention", None), SETUP, None)
    if number is not None and number not in _setups:
        raise ConfigurationError(
            "a model's config has the attention of tokenring, which another process put there: call use_tokenring in "
            "each process that trains"
        )
    return None if number is None else _setups[number]


def install() -> None:
    """Put our function in front of torchtitan's, where its Trainer and Validator look it up; once."""
    for name, kind in CALLERS.items():
        module = importlib.import_module(name)
        own = getattr(module, NAME)
        if not hasattr(own, OURS):
            setattr(module, NAME, in_front_of(own))
            caller = getattr(module, kind)
            setattr(caller, METHOD, noting_model(getattr(caller, METHOD)))


def noting_model(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of torchtitan's that prepares a batch, which notes meanwhile for which model."""

    @wraps(method)
    def noted(
        self: Any, input_dict: Any, labels: Any, model_parts: Any = None, *given: Any, **more: Any
    ) -> Any:  # fmt: skip
        parts = () if model_parts is None else (model_parts,)  # a Validator is told, a Trainer knows
        model = getattr(model_parts[0], "config", None) if parts else getattr(self, "model_config", None)
        token = _model.set(model)
        try:
            return method(self, input_dict, labels, *parts, *given, **more)
        finally:
            _model.reset(token)

    return noted


def in_front_of(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that is called in the place of torchtitan's `own`, with its arguments.

    A batch of a model whose attention is not ours goes on to `own`.
    """

    @wraps(own)
    def prepare_context_parallel_input(
        inputs: torch.Tensor,
        labels: torch.Tensor,
        extra_kwargs: dict[str, Any],
        cp_mesh: Any,
        *given: Any,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        setup = setup_of(_model.get())
        if setup is None:
            found: tuple[torch.Tensor, torch.Tensor, dict[str, Any]] = own(
                inputs, labels, extra_kwargs, cp_mesh, *given, **more
            )
            return found
        return cut_batch(inputs, labels, extra_kwargs, setup.context(cp_mesh), windows=setup.windows)

    setattr(prepare_context_parallel_input, OURS, True)
    return prepare_context_parallel_input
