"""The stand-ins of FSDP2 trainers against the sources of MindSpeed-LLM and -MM: names and parameters, by their text.

MINDSPEED_LLM_SRC and MINDSPEED_MM_SRC name checkouts; without them the tests skip. Nothing of the sources is imported.
"""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path
from typing import Any

import mindspeed_fsdp2_like as like
import pytest

from tokenring.integrations.mindspeed_fsdp2 import llm, mm, wan

CP = "mindspeed_llm/fsdp2/distributed/context_parallel"
MOVES = "mindspeed_mm/fsdp/distributed/context_parallel/communication.py"
WAN = "mindspeed_mm/fsdp/models/wan2_2/modeling_wan2_2.py"
STATE = "mindspeed_mm/fsdp/distributed/parallel_state.py"
OF_LLM = [
    (f"{CP}/context_parallel_functions.py", llm.NAME, like.context_parallel_attention_forward, llm.PARAMETERS),
    (
        f"{CP}/context_parallel_manager.py", llm.MAPPINGS, like.ContextParallelMappingManager.get_model_cp_mappings,
        ("self", "model_id", "cp_type_config"),
    ),
    (
        f"{CP}/context_parallel_manager.py", "ContextParallelMappingManager.apply_transformers_modules",
        like.ContextParallelMappingManager.apply_transformers_modules, ("self", "modules", "cp_type_config"),
    ),
]  # fmt: skip
OF_MM = [
    ("mindspeed_mm/fsdp/ops/flash_attn/flash_attn.py", mm.NAME, like.flash_attention_forward, mm.PARAMETERS),
    (MOVES, "split_forward_gather_backward", like.split_forward_gather_backward, wan.SPLIT),
    (MOVES, "gather_forward_split_backward", like.gather_forward_split_backward, wan.GATHER),
    (WAN, wan.NAME, like.WanSelfAttention.forward, ("self", "x", "seq_lens", "grid_sizes", "freqs")),
    (WAN, "rope_apply", like.rope_apply, ("x", "grid_sizes", "freqs")),
]


def source(variable: str) -> Path:
    """A checkout; skips where none is named."""
    if not (named := os.environ.get(variable)):
        pytest.skip(f"{variable} names no checkout")
    return Path(named)


def definition(tree: ast.Module, dotted: str) -> ast.FunctionDef:
    """A function or method of a module."""
    found: Any = tree
    for name in dotted.split("."):
        found = next(each for each in found.body if getattr(each, "name", None) == name)
    assert isinstance(found, ast.FunctionDef)
    return found


def parameters(function: ast.FunctionDef) -> dict[str, Any]:
    """Names in their order, with defaults; those without have Parameter.empty."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    none: list[Any] = [inspect.Parameter.empty] * (len(positional) - len(given.defaults))
    defaults = none + [ast.literal_eval(each) for each in given.defaults]
    found = {each.arg: default for each, default in zip(positional, defaults, strict=True)}
    assert not given.kwonlyargs and given.vararg is None
    return found | ({given.kwarg.arg: inspect.Parameter.empty} if given.kwarg else {})


def check(path: Path, dotted: str, stand_in: Any, known: tuple[str, ...]) -> None:
    """That the source, the stand-in and what the integration asks of a release agree."""
    theirs = parameters(definition(ast.parse(path.read_text()), dotted))
    ours = {name: each.default for name, each in inspect.signature(stand_in).parameters.items()}
    assert list(theirs) == list(known)
    assert ours == theirs


@pytest.mark.parametrize(("file", "name", "stand_in", "known"), OF_LLM)
def test_mindspeed_llm(file: str, name: str, stand_in: Any, known: tuple[str, ...]) -> None:
    check(source("MINDSPEED_LLM_SRC") / file, name, stand_in, known)


def test_models_of_mindspeed_llm_whose_patches_are_not_ours() -> None:
    """The table has the stand-in's models, and ours is what the models without DSA get."""
    text = (source("MINDSPEED_LLM_SRC") / CP / "context_parallel_mappings.py").read_text()
    names: dict[str, Any] = {}
    tree = ast.parse(text)
    for each in tree.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value is not None:
            names[each.target.id] = ast.literal_eval(each.value)
    groups = names["MODEL_CP_CONFIG"]
    for model_id, stands_for in like.ContextParallelMappingManager.MODELS.items():
        group = next(each for each in groups.values() if model_id in each["models"])
        common = [names["COMMON_CP_MAPPINGS"][each] for each in group["cp_to_att_template"]]
        pairs = [pair for each in common for pair in (each if isinstance(each, list) else [each])]
        patches = [patch for _, patch in [*pairs, *group["model_specific"].get(model_id, [])]]
        ours = f"{llm.HOME}.{llm.NAME}" in patches
        assert ours == any(patch.endswith(llm.NAME) for _, patch in stands_for), model_id
        assert all(any(patch.endswith(mine) for patch in patches) for _, mine in stands_for), model_id
    text = (source("MINDSPEED_LLM_SRC") / CP / "context_parallel_functions.py").read_text()
    assert "import ParallelState" in text and "import get_args" in text  # by which ours finds both


@pytest.mark.parametrize(("file", "name", "stand_in", "known"), OF_MM)
def test_mindspeed_mm(file: str, name: str, stand_in: Any, known: tuple[str, ...]) -> None:
    check(source("MINDSPEED_MM_SRC") / file, name, stand_in, known)


def test_mesh_of_mindspeed_mm() -> None:
    """The ring runs fastest in the group "cp", and the methods that the integration calls are made for its meshes."""
    text = (source("MINDSPEED_MM_SRC") / STATE).read_text()
    assert '("dp_replicate", "dp_shard", "ulysses", "ring", "tp")' in text
    assert 'self.device_mesh[("ulysses", "ring")]._flatten(mesh_dim_name="cp")' in text
    assert 'self.register_funcs(self.device_mesh, ["dp", "cp", "ulysses", "ring", "tp"])' in text
    for method in ("is_{}_enable", "get_{}_group", "get_{}_group_size"):
        assert f"setattr(self, '{method}'.format(mesh_name)" in text
    for name in ("is_cp_enable", "is_ring_enable", "get_cp_group", "get_ring_group_size", "get_ulysses_group_size"):
        assert hasattr(like.State, name)


def test_registration_of_mindspeed_mm() -> None:
    """Its function is looked up by name when it is registered, in the registry that the module holds."""
    path = source("MINDSPEED_MM_SRC") / "mindspeed_mm/fsdp/ops/flash_attn/flash_attn.py"
    tree = ast.parse(path.read_text())
    nodes = ast.walk(definition(tree, "apply_transformers_attention_patch"))
    said = [ast.unparse(each) for each in nodes if isinstance(each, ast.Call)]
    assert said == [f"ALL_ATTENTION_FUNCTIONS.register('{name}', flash_attention_forward)" for name in mm.REGISTERED]
