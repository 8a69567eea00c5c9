"""Examples beyond two ranks; and with transformers and diffusers themselves, where they are installed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ranks import Here, RankPools
from test_examples import FOLDER, output_of

import tokenring as tr

IN_LINES = FOLDER / "torchrun_20_lines.py"


def error_of(said: str) -> float:
    found = re.search(r"relative error against one process: (\S+)", said)
    assert found is not None, said
    return float(found[1])


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_twenty_lines_are_no_more() -> None:
    tree = ast.parse(IN_LINES.read_text(encoding="utf-8"))
    lines = {line for each in tree.body[1:] for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    assert len(lines) <= 20


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("cp", [2, 4])
def test_fsdp_on_a_mesh(cp: int, tmp_path: Path, warm: str) -> None:
    said = output_of(warm, FOLDER / "fsdp2_device_mesh.py", 4, "--cp", str(cp), "--seq", "256", TMPDIR=str(tmp_path))
    assert f"data parallel {4 // cp} × context parallel {cp}, ContextParallel(" in said
    assert error_of(said) < 2e-6


@pytest.mark.slow
@pytest.mark.waits
def test_a_joint_sequence_that_divides_by_nothing(tmp_path: Path, warm: str) -> None:
    assert error_of(output_of(warm, FOLDER / "diffusion_transformer.py", 3, TMPDIR=str(tmp_path))) < 2e-6


@pytest.mark.slow
@pytest.mark.waits
def test_with_transformers_itself(tmp_path: Path, warm: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: the example ran with its own model")
    said = output_of(warm, FOLDER / "huggingface_model.py", 2, TMPDIR=str(tmp_path))
    assert "LlamaForCausalLM" in said and error_of(said) < 2e-6


# ---------- the attention function that the Hugging Face example adds

Q, KV = torch.randn(1, 4, 32, 16), torch.randn(1, 2, 32, 16)


class Module(torch.nn.Module):
    is_causal = True


def test_what_the_attention_function_says_of_masks() -> None:
    attend = example("huggingface_model").TokenRingAttention(tr.ContextParallel())
    q, k = Q.transpose(1, 2), KV.transpose(1, 2)
    out, nothing = attend(Module(), Q, KV, KV, None, sliding_window=8)
    assert nothing is None
    assert torch.equal(out, tr.attention(q, k, k, attend.cp, tr.SlidingWindow(7)))
    assert torch.equal(attend(torch.nn.Identity(), Q, KV, KV, None)[0], tr.attention(q, k, k, attend.cp, "causal"))
    with pytest.raises(ValueError, match="lay texts end to end"):
        attend(Module(), Q, KV, KV, torch.ones(1, 1, 32, 32))
    with pytest.raises(tr.UnsupportedError, match="dropout_p"):
        attend(Module(), Q, KV, KV, None, dropout=0.1)


# ---------- Flux of diffusers, with its attention put on the ranks as the example says


def flux(here: Here) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("diffusers.models.transformers.transformer_flux")
    torch.manual_seed(0)
    model = module.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).requires_grad_(False)  # fmt: skip
    text, image, pooled = torch.randn(1, 12, 32), torch.randn(1, 64, 16), torch.randn(1, 32)
    text_ids, image_ids = torch.zeros(12, 3), torch.randn(64, 3).round()
    cp = here.cp(layout="contiguous", schedule="ring")

    def call(*parts: torch.Tensor) -> torch.Tensor:
        names = ("encoder_hidden_states", "hidden_states", "txt_ids", "img_ids")
        found = model(**dict(zip(names, parts, strict=True)), pooled_projections=pooled, timestep=torch.ones(1))
        out: torch.Tensor = found.sample
        return out

    whole = call(text, image, text_ids, image_ids)
    with pytest.MonkeyPatch.context() as patched:
        # Under Full the order of keys does not matter: each rank has a part of the text, then one of the image.
        patched.setattr(module, "dispatch_attention_fn", lambda q, k, v, **_: tr.attention(q, k, v, cp))
        sides = tr.shard(text, cp), tr.shard(image, cp), tr.shard(text_ids, cp, dim=0), tr.shard(image_ids, cp, dim=0)
        split = tr.unshard(call(*sides), cp)
    return float((split - whole).norm() / whole.norm())


@pytest.mark.slow
def test_flux_of_diffusers(ranks: RankPools) -> None:
    if importlib.util.find_spec("diffusers") is None:
        pytest.skip("diffusers is not installed: the example runs with its own model")
    assert max(ranks(2)(flux)) < 2e-6
