"""A model of diffusers whose tokens are dealt over ranks: hooks cut what enters its blocks, and gather what leaves.

Each call of the model takes what it takes in one process, the same on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from tokenring.api.context import ContextParallel
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.comparing import agree_on_batch, facts_of
from tokenring.integrations.diffusers.dealing import StreamDeal, deal
from tokenring.integrations.diffusers.gathering import gathered
from tokenring.integrations.diffusers.plans import ModelPlan, Stream, TensorPlace
from tokenring.integrations.diffusers.refusals import check_call, check_layers, without_padding
from tokenring.integrations.gradient_joins import GradientReduction, check_joined
from tokenring.runtime.agreement import refusing, speaking_device
from tokenring.sequence.layout import Layout

Given = dict[str, Any]


class SplitModel:
    """The split of one model: its attention processors have it as `_parallel_config`, from where ours takes it.

    training: of the call that runs, whether a backward pass follows. The deal is that of the last call: where layers
    are checkpointed, their backward pass comes before the next call.
    """

    def __init__(self, cp: ContextParallel, plan: ModelPlan, gradients: GradientReduction) -> None:
        self.cp, self.plan, self.training, self._gradients = cp, plan, False, gradients
        self._factor = cp.world_size if gradients == "mean" else 1
        self._deal: StreamDeal | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitModel:
        return self  # a copy of the model, such as an average of its weights, is split alike

    def hook(self, model: torch.nn.Module) -> list[Any]:
        """Put the hooks into a model; return their handles."""
        begin = torch.compiler.disable(self._begin)  # type: ignore[no-untyped-call]  # it compares ranks
        handles = [model.register_forward_pre_hook(begin, with_kwargs=True)]
        for path in self.plan.cut_modules:
            places = self.plan.at(path)
            inputs = tuple(each for each in places if isinstance(each.where, str))
            outputs = tuple(each for each in places if not isinstance(each.where, str))
            for module in _modules(model, path):
                if inputs:
                    cut = partial(self._cut_inputs, inputs)
                    handles.append(module.register_forward_pre_hook(cut, with_kwargs=True))
                if outputs:
                    handles.append(module.register_forward_hook(partial(self._cut_outputs, outputs)))
        for module in _modules(model, self.plan.gathered):
            handles.append(module.register_forward_hook(self._gather))
        return handles

    def layout_of(self, queries: int, keys: int) -> Layout:
        """Return the layout of a call of attention on so many tokens here. Raises UnsupportedError for other tokens."""
        own = None if self._deal is None else self._deal.layout.local_lengths[self.cp.rank]
        if self._deal is None or queries != own or keys != own:
            raise UnsupportedError(
                f"a layer attends from {queries} tokens to {keys} on rank {self.cp.rank}, which holds {own} of the "
                f"joint sequence: keys that every rank holds whole (image prompts) are not supported, nor is a "
                f"checkpointed layer of another call than the last"
            )
        return self._deal.layout

    # ---------- hooks

    def _begin(self, model: torch.nn.Module, args: tuple[Any, ...], given: Given) -> tuple[tuple[Any, ...], Given]:
        """Check a call, compare it with those of the other ranks, and cut the model's own arguments."""
        tensors = *args, *given.values()
        with refusing(self.cp, "forward", *tensors):
            named = {**dict(zip(_names(model), args, strict=False)), **given}
            check_layers(model, self)
            self._check_hooked(model)
            if torch.is_grad_enabled():
                check_joined(model, self.cp, self._gradients)
            check_call(named)
            facts = facts_of(named) if self.cp.world_size > 1 else {}
            named = without_padding(named)
            self._deal, self.training = None, model.training or torch.is_grad_enabled()
            cut = self._cut(self.plan.at(""), named)
            device = speaking_device(tensors)
            if device is None:
                raise ConfigurationError("a call without tensors: give the model its inputs")
        if self.cp.world_size > 1:
            agree_on_batch(self.cp, facts, device)
        return (), {**named, **cut}

    def _cut_inputs(
        self, places: tuple[TensorPlace, ...], module: torch.nn.Module, args: tuple[Any, ...], given: Given
    ) -> tuple[tuple[Any, ...], Given]:
        """Cut arguments of a module, which come by name or in their order."""
        names = _names(module)
        found = {**dict(zip(names, args, strict=False)), **given}
        with refusing(self.cp, "forward", *found.values()):
            cut = self._cut(places, found)
        changed = tuple(cut.get(name, x) for name, x in zip(names, args, strict=False))
        return changed, {name: cut.get(name, x) for name, x in given.items()}

    def _cut_outputs(self, places: tuple[TensorPlace, ...], module: torch.nn.Module, args: Any, output: Any) -> Any:
        """Cut outputs of a module, which are a list or tuple of tensors."""
        with refusing(self.cp, "forward", *output):
            cut = self._cut(places, dict(enumerate(output)))
        return type(output)(cut.get(index, x) for index, x in enumerate(output))

    def _gather(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        assert self._deal is not None  # the hooks before this one made it
        return gathered(output, self.cp, self._deal.parts["image"], self._factor)

    def _check_hooked(self, model: torch.nn.Module) -> None:
        """Raise ConfigurationError where a module that cuts or gathers was replaced after `hook`, as adapters do."""
        for path in (*self.plan.cut_modules, self.plan.gathered):
            if not all(self._has_hook(module) for module in _modules(model, path)):
                raise ConfigurationError(
                    f"{path} of the model is another module than when use_tokenring was called, so this rank would "
                    f"keep its own tokens alone: call use_tokenring again after adapters (LoRA) are put in or taken out"
                )

    def _has_hook(self, module: torch.nn.Module) -> bool:
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        return any(getattr(getattr(each, "func", each), "__self__", None) is self for each in hooks)

    # ---------- cuts

    def _cut(self, places: tuple[TensorPlace, ...], found: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return this rank's part of each tensor that these places name, by where it was found."""
        whole = {each: found[each.where] for each in places if _holds_tokens(each, found.get(each.where))}
        self._learn({place.stream: x.shape[place.dim] for place, x in reversed(whole.items())})
        return {place.where: self._part(place, x) for place, x in whole.items()}

    def _learn(self, lengths: Mapping[Stream, int]) -> None:
        """Deal streams of these lengths, if that was not done before."""
        if self._deal is None and lengths:
            if missing := [each for each in self.plan.streams if each not in lengths]:
                raise ConfigurationError(f"a call has no tokens of {' and '.join(missing)}: give it all inputs")
            self._deal = deal(lengths, self.cp.world_size)

    def _part(self, place: TensorPlace, x: torch.Tensor) -> torch.Tensor:
        assert self._deal is not None
        if (length := x.shape[place.dim]) != (known := self._deal.lengths[place.stream]):
            raise ConfigurationError(
                f"{_called(place)} has {length} tokens, and the {place.stream} has {known}: give both alike; a "
                f"checkpointed layer takes its backward pass before the next call"
            )
        return x.narrow(place.dim, *self._deal.range_of(place.stream, self.cp.rank))


def _holds_tokens(place: TensorPlace, x: Any) -> bool:
    """Return whether there is a tensor to cut. Raises UnsupportedError for one of another number of dimensions."""
    if x is None:
        return False
    if not isinstance(x, torch.Tensor) or x.dim() != place.dims:
        if place.optional:
            return False
        shape = f" {list(x.shape)}" if isinstance(x, torch.Tensor) else f" of type {type(x).__name__}"
        raise UnsupportedError(f"{_called(place)}{shape} is not supported: give a tensor of {place.dims} dimensions")
    return True


def _called(place: TensorPlace) -> str:
    what = place.where if isinstance(place.where, str) else f"output {place.where}"
    return f"{place.module} {what}".lstrip()


def _names(module: torch.nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _modules(model: torch.nn.Module, path: str) -> Iterator[torch.nn.Module]:
    """Yield the modules of a path, whose "*" is each of a list."""
    if path.endswith(".*"):
        yield from model.get_submodule(path[:-2]).children()
    else:
        yield model.get_submodule(path)
