"""The place where torchtitan cuts batches for context parallelism: ours for models with our attention, else its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenring.api.context import ContextParallel
from tokenring.integrations.torchtitan.batches import Window, cut_batch

NAME = "prepare_context_parallel_input"  # of the function of torchtitan.distributed.context_parallel
CALLERS = ("torchtitan.trainer", "torchtitan.components.validate")  # which import it by its name
OURS = "_tokenring_setup"  # attribute of the function that stands there instead


@dataclass
class Setup:
    """Hold the options of `use_tokenring`, and the contexts that were made of them, one for each mesh."""

    options: dict[str, Any]
    windows: frozenset[Window]
    contexts: dict[Any, ContextParallel] = field(default_factory=dict)

    def context(self, mesh: Any) -> ContextParallel:
        """Return the ContextParallel of torchtitan's mesh "cp"; all its ranks come here together."""
        if mesh not in self.contexts:
            self.contexts[mesh] = ContextParallel(mesh, **self.options)
        return self.contexts[mesh]


def install(setup: Setup) -> None:
    """Put our function in front of torchtitan's, where its Trainer and Validator look it up.

    A later call takes the place of an earlier one; the windows of its models are known still.
    """
    for name in CALLERS:
        module = importlib.import_module(name)
        own = getattr(module, NAME)
        if (before := getattr(own, OURS, None)) is not None:
            own, setup.windows = own.__wrapped__, setup.windows | before.windows
        setattr(module, NAME, in_front_of(own, setup))


def in_front_of(own: Callable[..., Any], setup: Setup) -> Callable[..., Any]:
    """Return the function that is called in the place of torchtitan's `own`, with its arguments.

    A batch that has attention_masks is of a model with FlexAttention or VarlenAttention, and goes on to `own`.
    """

    def prepare_context_parallel_input(
        inputs: torch.Tensor,
        labels: torch.Tensor,
        extra_kwargs: dict[str, Any],
        cp_mesh: Any,
        *given: Any,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        if extra_kwargs.get("attention_masks") is not None:
            found: tuple[torch.Tensor, torch.Tensor, dict[str, Any]] = own(
                inputs, labels, extra_kwargs, cp_mesh, *given, **more
            )
            return found
        return cut_batch(inputs, labels, extra_kwargs, setup.context(cp_mesh), windows=setup.windows)

    setattr(prepare_context_parallel_input, OURS, setup)
    prepare_context_parallel_input.__wrapped__ = own  # type: ignore[attr-defined]
    return prepare_context_parallel_input
