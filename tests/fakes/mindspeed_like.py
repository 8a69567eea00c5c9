"""A stand-in of what MindSpeed offers to features of others, and of as much of Megatron as such features patch.

Written for these tests from a description of the surface: a list of features with hooks, patches that are recorded and
then applied in every module that holds the same object, arguments parsed when the adaptor is imported, batch and
rotary embeddings cut by the name of the algorithm. Releases are "whole" (to Megatron-core 0.16) or "split" (from 0.17).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tokenring.sequence.layout import zigzag

OURS = "tokenring.integrations.mindspeed"
DPA = "megatron.core.transformer.dot_product_attention"
TE = "megatron.core.extensions.transformer_engine"
SPECS = "megatron.core.models.gpt.gpt_layer_specs"
BATCH = "megatron.training.utils"
STATE = "megatron.core.parallel_state"
BUILD = "megatron.core.transformer.spec_utils"
ULYSSES = "mindspeed.core.context_parallel.ulysses_context_parallel.ulysses_context_parallel"
ROTARY = "megatron.core.models.common.embeddings.rotary_pos_embedding"


class Feature:
    """As MindSpeedFeature."""

    def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
        self.feature_name = feature_name.replace("-", "_")
        self.optimization_level = optimization_level

    def is_need_apply(self, args: Any) -> bool:
        return self.optimization_level == 0 or bool(getattr(args, self.feature_name, None))

    def register_args(self, parser: argparse.ArgumentParser) -> None: ...
    def pre_validate_args(self, args: Any) -> None: ...
    def validate_args(self, args: Any) -> None: ...
    def post_validate_args(self, args: Any) -> None: ...
    def pre_register_patches(self, patches: Any, args: Any) -> None: ...
    def register_patches(self, patches: Any, args: Any) -> None: ...


class Patches:
    """As MindSpeedPatchesManager: the last one that is forced wins, and what was bound elsewhere changes as well."""

    def __init__(self) -> None:
        self.recorded: dict[str, Any] = {}
        self.wrappers: dict[str, Callable[[Any], Any]] = {}

    def register_patch(self, name: str, new: Any, force_patch: bool = False, create_dummy: bool = False) -> None:
        if new.__name__.endswith(("wrapper", "decorator")):
            self.wrappers[name] = new
            return
        if name in self.recorded and not force_patch:
            raise RuntimeError(f"the patch of {name} exist !")
        self.recorded[name] = new

    def apply(self) -> None:
        for target in {**self.recorded, **self.wrappers}:
            module, _, name = target.rpartition(".")
            old = getattr(sys.modules[module], name)
            new = self.recorded.get(target, old)
            new = self.wrappers[target](new) if target in self.wrappers else new
            for each in list(sys.modules.values()):
                if vars(each).get(name) is old:
                    setattr(each, name, new)


class OwnAttention(torch.nn.Module):
    """As MindSpeedCPDotProductAttention; its results are all 7."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.full_like(query, 7.0).flatten(-2)


class OwnUlysses(torch.nn.Module):
    """As UlyssesContextAttention: around the attention of whoever makes it."""

    def __init__(self, local_attention: torch.nn.Module, sequence_process_group: Any, *rest: Any) -> None:
        super().__init__()
        self.local_attn = local_attention


class ContextParallelFeature(Feature):
    """As MindSpeed's own of that name."""

    def __init__(self, line: str) -> None:
        super().__init__("context-parallel-size")
        self.line = line

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        algorithms = ["megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo", "kvallgather_cp_algo", "of_a_newcomer"]
        parser.add_argument("--context-parallel-algo", default="megatron_cp_algo", choices=algorithms)
        parser.add_argument("--attention-mask-type", default="causal", choices=["causal", "general"])
        parser.add_argument("--cp-window-size", type=int, default=1)
        parser.add_argument("--ulysses-degree-in-cp", type=int, default=None)

    def register_patches(self, patches: Any, args: Any) -> None:
        if int(args.context_parallel_size) == 1:
            return
        if self.line == "whole":
            patches.register_patch(f"{DPA}.DotProductAttention", OwnAttention)
            patches.register_patch(f"{TE}.TEDotProductAttention", OwnAttention)
        patches.register_patch(f"{BATCH}.get_batch_on_this_cp_rank", _cut_batch(args))
        patches.register_patch(f"{ROTARY}.get_pos_emb_on_this_cp_rank", _cut_rotary(args))


def _rows(args: Any, length: int) -> torch.Tensor:
    """What this rank has of a sequence. Of an algorithm that is not known here it has all, without a word."""
    group = sys.modules[STATE].get_context_parallel_group()
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if args.context_parallel_algo in ("megatron_cp_algo", "kvallgather_cp_algo"):
        return torch.tensor(zigzag(ranks, length).positions(rank))
    if args.context_parallel_algo == "hybrid_cp_algo":
        group, member = divmod(rank, args.ulysses_degree_in_cp)
        held = torch.tensor(zigzag(ranks // args.ulysses_degree_in_cp, length).positions(group))
        return held.view(args.ulysses_degree_in_cp, -1)[member]
    if args.context_parallel_algo == "ulysses_cp_algo":
        return torch.arange(length).chunk(ranks)[rank]
    return torch.arange(length)


def _cut_batch(args: Any) -> Callable[..., Any]:
    def get_batch_on_this_cp_rank(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: x[:, _rows(args, x.shape[1])] for name, x in batch.items()}

    return get_batch_on_this_cp_rank


def _cut_rotary(args: Any) -> Callable[..., Any]:
    def get_pos_emb_on_this_cp_rank(pos_emb: torch.Tensor, seq_dim: int) -> torch.Tensor:
        return pos_emb.index_select(seq_dim, _rows(args, pos_emb.shape[seq_dim]).to(pos_emb.device))

    return get_pos_emb_on_this_cp_rank


class LikeMindSpeed:
    """One MindSpeed and one Megatron, in sys.modules."""

    def __init__(self, line: str) -> None:
        self.patches, self.line = Patches(), line
        self.features: list[Any] = [ContextParallelFeature(line)]

    def modules(self) -> dict[str, dict[str, Any]]:
        """What is in which module."""
        manager = type("MindSpeedFeaturesManager", (), {"FEATURES_LIST": self.features})
        local = type("DotProductAttention", (torch.nn.Module,), {})
        engine = type("TEDotProductAttention", (OwnAttention,), {})
        state = {"get_context_parallel_group": lambda check_initialized=True: dist.group.WORLD}
        found: dict[str, dict[str, Any]] = {
            "mindspeed.features_manager": {"MindSpeedFeaturesManager": manager, "MindSpeedFeature": Feature},
            "megatron.core": {"__version__": "0.12.1" if self.line == "whole" else "0.17.0"},
            STATE: state,
            DPA: {"DotProductAttention": local},
            TE: {"TEDotProductAttention": engine},
            SPECS: {"DotProductAttention": local, "TEDotProductAttention": engine},
            BUILD: {"build_module": lambda spec, *args, **kwargs: spec},
            BATCH: {"get_batch_on_this_cp_rank": lambda batch: batch},
            ROTARY: {"get_pos_emb_on_this_cp_rank": lambda pos_emb, seq_dim: pos_emb},
        }
        if self.line == "whole":
            found["mindspeed.te"] = {}
            found["mindspeed.core.context_parallel.adaptor"] = {"MindSpeedCPDotProductAttention": OwnAttention}
            found[ULYSSES] = {"UlyssesContextAttention": OwnUlysses}
        return found

    def import_adaptor(self, *command_line: str) -> Any:
        """What `import mindspeed.megatron_adaptor` does, and what Megatron does with its arguments afterwards."""
        parser = argparse.ArgumentParser(allow_abbrev=False)
        for feature in self.features:
            feature.register_args(parser)
        args, rest = parser.parse_known_args(command_line)
        for name, value in zip(rest[::2], rest[1::2], strict=True):  # as text: Megatron's parser knows their types
            setattr(args, name[2:].replace("-", "_"), value)
        sys.modules["mindspeed.megatron_adaptor"] = ModuleType("mindspeed.megatron_adaptor")
        for feature in self.features:
            if feature.is_need_apply(args):
                feature.register_patches(self.patches, args)
        self.patches.apply()
        return args

    def validate(self, args: Any) -> None:
        """What Megatron's validation of arguments does, of a config, too."""
        for feature in self.features:
            feature.validate_args(args)


@contextmanager
def like_mindspeed(line: str = "whole") -> Iterator[LikeMindSpeed]:
    """A stand-in for as long as this lasts, into which ours has not been imported yet."""
    made = LikeMindSpeed(line)
    with without("mindspeed", "megatron", OURS) as patched:
        for name, content in made.modules().items():
            put(patched, name, content)
        yield made


@contextmanager
def without(*names: str) -> Iterator[pytest.MonkeyPatch]:
    """As if these packages had not been imported; afterwards everything is as it was."""
    before = dict(sys.modules)

    def forget(among: set[str]) -> None:
        for name in among:
            if any(name == each or name.startswith(f"{each}.") for each in names):
                del sys.modules[name]

    try:
        forget(set(before))
        with pytest.MonkeyPatch.context() as patched:
            yield patched
    finally:
        forget(set(sys.modules) - set(before))
        sys.modules.update(before)


def put(patched: pytest.MonkeyPatch, name: str, content: dict[str, Any]) -> None:
    """A module of this content, and the packages above it."""
    parent, _, last = name.rpartition(".")
    if parent and parent not in sys.modules:
        put(patched, parent, {})
    made = sys.modules.get(name) or ModuleType(name)
    made.__spec__, made.__path__ = ModuleSpec(name, None, is_package=True), []
    vars(made).update(content)
    patched.setitem(sys.modules, name, made)
    if parent:
        setattr(sys.modules[parent], last, made)
