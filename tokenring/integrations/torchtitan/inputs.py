"""The place where torchtitan cuts batches for context parallelism: ours for models with our attention, else its own."""

from __future__ import annotations

import importlib
import itertools
import sys
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
OURS = "_of_tokenring"  # attribute of the function that stands there instead: itself, as others' wrappers copy it

# State of the process: setups by the numbers that configs hold, and the model whose batch is being prepared.
_numbers = itertools.count(1)
_setups: dict[int, Setup] = {}
_model: ContextVar[Any] = ContextVar("tokenring_model", default=None)


@dataclass
class Setup:
    """Hold the options of `use_tokenring` for a model, and the contexts that were made of them, one for each mesh.

    replaced: the config of each layer's inner attention as it was, which copies of the model's config share.
    """

    options: dict[str, Any]
    windows: frozenset[Window] = frozenset()
    contexts: dict[Any, ContextParallel] = field(default_factory=dict)
    replaced: list[Any] = field(default_factory=list)

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
    number = _number_in(model)
    if number is not None and number not in _setups:
        raise ConfigurationError(
            "a model's config has the attention of tokenring, which another process put there, or whose setup "
            "stop_tokenring has ended: call use_tokenring in each process that trains"
        )
    return None if number is None else _setups[number]


def _number_in(model: Any) -> int | None:
    layers = [*(getattr(model, "layers", None) or ()), None]
    number: int | None = getattr(getattr(getattr(layers[0], "attention", None), "inner_attention", None), SETUP, None)
    return number


def inner_of(model: Any) -> list[Any]:
    """Return the config of each layer's inner attention: where it is ours, as it was before, if that is known."""
    number = _number_in(model)
    if number in _setups:
        return _setups[number].replaced
    return [layer.attention.inner_attention for layer in layers_of(model)]


def install() -> None:
    """Put our function in front of torchtitan's, where its Trainer and Validator look it up; once."""
    for name, kind in CALLERS.items():
        module = importlib.import_module(name)
        for owner, title, ours in ((module, NAME, in_front_of), (getattr(module, kind), METHOD, noting_model)):
            own = getattr(owner, title)
            if not hasattr(own, OURS):
                setattr(owner, title, ours(own))


def layers_of(model: Any) -> list[Any]:
    """Return the configs of all layers of a model's."""
    return [*model.layers, *getattr(model, "mtp_layers", ())]


def give_back(model: Any) -> None:
    """Give a model's config the inner attention back that it had, and close what was made for it and its copies.

    Once no model of the process has ours, torchtitan's Trainer and Validator have their own functions again.
    """
    setup = setup_of(model)
    if setup is None:
        return
    for layer, was in zip(layers_of(model), setup.replaced, strict=True):
        layer.attention.inner_attention = was
    for number in [number for number, each in _setups.items() if each is setup]:
        del _setups[number]
    for cp in setup.contexts.values():
        cp.close()
    if not _setups:
        _uninstall()


def _uninstall() -> None:
    """Take our functions away where nobody has put another in front of them."""
    for name, kind in CALLERS.items():
        module = sys.modules.get(name)
        for owner, title in ((module, NAME), (getattr(module, kind, None), METHOD)):
            ours: Any = getattr(owner, title, None)
            if hasattr(ours, OURS) and getattr(ours, OURS) is ours:
                setattr(owner, title, ours.__wrapped__)


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

    setattr(noted, OURS, noted)
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

    setattr(prepare_context_parallel_input, OURS, prepare_context_parallel_input)
    return prepare_context_parallel_input
