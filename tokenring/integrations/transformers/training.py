"""A model of transformers, trained with its sequences split over the ranks of a ContextParallel.

    cp = tr.ContextParallel(mesh["cp"], layout="auto")
    model = use_tokenring(model, cp)                  # once, before DDP or FSDP wraps it
    loss = model(**batch).loss                        # whole sequences, the same on every rank of cp
    loss.backward()
    add_up_gradients(model, cp)                       # unless DDP or FSDP does: then gradients="mean" above

Importing this imports no transformers. docs/transformers.md says what is supported.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from tokenring.api.context import ContextParallel
from tokenring.api.inputs import check_context
from tokenring.api.sharding import add_up
from tokenring.errors import ConfigurationError
from tokenring.integrations.comparing import agree_on_batch, expected_size
from tokenring.integrations.gradient_joins import (
    GradientReduction,
    add_up_gradients,
    check_joined,
    check_reduction,
)
from tokenring.integrations.transformers.attention import ATTENTION_NAME, register
from tokenring.integrations.transformers.batches import BATCH, CutBatch, cut_batch
from tokenring.integrations.transformers.configs import put_back, text_config, with_own_configs
from tokenring.integrations.transformers.refusals import (
    check_adapters,
    check_attended,
    check_attends,
    check_keywords,
    check_model,
)
from tokenring.integrations.transformers.versions import check_version
from tokenring.runtime.agreement import refusing

__all__ = ["GradientReduction", "add_up_gradients", "cut_batch", "stop_tokenring", "use_tokenring"]

Model = TypeVar("Model", bound=torch.nn.Module)
HELD = "_tokenring_training"  # attribute of a model that was changed


def use_tokenring(
    model: Model, cp: ContextParallel, *, gradients: GradientReduction = "sum", any_model: bool = False,
    any_version: bool = False,
) -> Model:  # fmt: skip
    """Change a model of transformers so that its calls take whole sequences, and compute this rank's tokens of them.

    model: as transformers makes it; change it before DDP or FSDP wraps it. It is changed in place, and returned. It has
    copies of its configs until `stop_tokenring`, so that models which share them keep their attention.
    gradients: what becomes of the ranks' gradients. "sum": `add_up_gradients`, or your own all-reduce. "mean": DDP or
    FSDP over these ranks, and over others too. Calls refuse DDP and FSDP2 over ranks that do not agree with it.
    any_model, any_version: take families and versions of transformers that were not compared with one process.

    A call of the model takes what it takes in one process (`cut_batch` says which of it), the same on every rank of cp.
    Its loss is that of the whole batch, on every rank; logits and hidden states are those of this rank's tokens.

    Raises UnsupportedError for families and versions that were not run, and in calls for what would be wrong;
    BackendUnavailable without transformers.
    """
    check_context(cp)
    check_reduction(gradients)
    factor = cp.world_size if gradients == "mean" else 1
    return change_model(model, cp, gradients, factor, any_model=any_model, any_version=any_version)


def change_model(
    model: Model, cp: ContextParallel, gradients: GradientReduction, factor: int, every: Sequence[int] | None = None, *,
    any_model: bool, any_version: bool,
) -> Model:  # fmt: skip
    """Change a model as `use_tokenring` does, for a loop that multiplies the loss itself.

    factor: by which the gradients of a call's loss are multiplied. every: all ranks whose mean the loop wants; None:
    those of cp, and others if the caller says so.
    """
    check_version(any_version)
    check_model(model, any_model)
    stop_tokenring(model)
    register()
    given = with_own_configs(model)
    try:
        model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
        check_attends(model, ATTENTION_NAME)
    except Exception:
        put_back(given)
        raise
    calls = _Calls(cp, gradients, factor, every)
    hooks = (
        model.register_forward_pre_hook(calls.before, with_kwargs=True),
        model.register_forward_hook(calls.after, with_kwargs=True),
    )
    setattr(model, HELD, (hooks, given))
    return model


def stop_tokenring(model: torch.nn.Module) -> None:
    """Give a model back the attention and the configs that it had before `use_tokenring`; others stay as they are."""
    held = getattr(model, HELD, None)
    if held is None:
        return
    hooks, given = held
    for hook in hooks:
        hook.remove()
    put_back(given)
    delattr(model, HELD)


class _Calls:
    """A pair of hooks around each call of one model."""

    def __init__(
        self, cp: ContextParallel, gradients: GradientReduction, factor: int, every: Sequence[int] | None = None
    ) -> None:
        self.cp, self.gradients, self._factor, self._every = cp, gradients, factor, every
        self._cut_here = False  # by the last call, which was given whole sequences

    def before(self, model: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, Any]:
        """Cut whole sequences, leave what `cut_batch` has cut, and compare the batches of all ranks."""
        self._cut_here = given.get(BATCH) is None
        with refusing(self.cp, "forward", *args, *given.values()):
            check_attends(model, ATTENTION_NAME)
            check_adapters(model)
            if torch.is_grad_enabled():
                check_joined(model, self.cp, self.gradients, self._every)
            check_keywords(model.config, given)
            if self._cut_here:
                named = dict(zip(inspect.signature(model.forward).parameters, args, strict=False))
                args, given = (), cut_batch({**named, **given}, self.cp, model.config)
            if given.get("position_ids") is None:
                raise ConfigurationError("what cut_batch returned came without its position_ids: give the model all")
            if given[BATCH].cp is not self.cp:
                raise ConfigurationError("this batch was cut for another ContextParallel than the model has")
        _compare(given[BATCH], given["position_ids"], model.config, self._cut_here)
        given[BATCH].attended.clear()
        return args, given

    def after(self, model: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> Any:
        """Put the loss of the whole batch in the place of this rank's share, where this call cut the batch.

        Either way its gradients become such as the ranks' sum or mean of them wants. Raises UnsupportedError, on all
        ranks, where some layer did not come to our attention.
        """
        with refusing(self.cp, "forward", given["position_ids"]):
            check_attended(model, len(given[BATCH].attended))
        if given.get("labels") is None:
            return output
        added_up = self.cp if self._cut_here else None
        if isinstance(output, tuple):
            return (_with_gradient(output[0], added_up, self._factor), *output[1:])
        output["loss"] = _with_gradient(output["loss"], added_up, self._factor)
        return output


def _compare(batch: CutBatch, places: torch.Tensor, config: Any, cut_here: bool) -> None:
    """Raise Disagreement, on every rank, unless all ranks cut the same batch, all in this call or all before.

    places: of this rank's tokens, [B, T].
    """
    if batch.cp.world_size > 1:
        size = expected_size(text_config(config), len(places), batch.length)
        facts = {**batch.facts, "cut": "by the call" if cut_here else "before, by cut_batch"}
        agree_on_batch(batch.cp, facts, places.device, size)


def _with_gradient(share: torch.Tensor, cp: ContextParallel | None, factor: int) -> torch.Tensor:
    """Return the sum of all ranks' shares, or without cp this one; its gradient goes to this share, times `factor`."""
    if cp is None and factor == 1:
        return share
    found: torch.Tensor = _Loss.apply(share, cp, factor)  # type: ignore[no-untyped-call]
    return found


class _Loss(torch.autograd.Function):
    """A loss of several ranks, each of which computes the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, cp: ContextParallel | None, factor: int) -> torch.Tensor:
        ctx.factor = factor
        whole = share.detach().clone()
        if cp is not None and cp.world_size > 1:
            add_up(whole, cp, "adding up the loss")
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None, None
