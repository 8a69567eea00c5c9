"""Tiny transformers of diffusers with random weights, their inputs, and one process in float64 to compare with.

Needs diffusers; `need` skips a test without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from typing import Any

import pytest
import torch
from gradient_errors import largest_error
from ranks import Here

from tokenring.errors import TokenRingError

HEADS, HEAD_DIM, TEXT_WIDTH, CHANNELS = 4, 16, 24, 8
AXES = (4, 6, 6)  # of the head dim, by axis of the rotary embedding
# module, class, its sizes; heads are given by who makes it
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flux": (
        "transformer_flux", "FluxTransformer2DModel",
        {"in_channels": CHANNELS, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": TEXT_WIDTH,
         "pooled_projection_dim": 12, "axes_dims_rope": AXES},
    ),
    "wan": (
        "transformer_wan", "WanTransformer3DModel",
        {"in_channels": CHANNELS, "out_channels": CHANNELS, "text_dim": TEXT_WIDTH, "freq_dim": 16, "ffn_dim": 48,
         "num_layers": 2, "cross_attn_norm": True},
    ),
    "qwenimage": (
        "transformer_qwenimage", "QwenImageTransformer2DModel",
        {"in_channels": CHANNELS, "out_channels": CHANNELS, "patch_size": 1, "num_layers": 2,
         "joint_attention_dim": TEXT_WIDTH, "axes_dims_rope": AXES},
    ),
}  # fmt: skip


def need() -> None:
    """Skip where diffusers is not there, which no other test wants."""
    if importlib.util.find_spec("diffusers") is None:
        pytest.skip("diffusers is not installed: pip install 'diffusers>=0.37,<0.43'", allow_module_level=True)


def make_model(name: str, heads: int = HEADS, **more: Any) -> Any:
    """The same weights each time, in float32, large enough that attention shows."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    module, kind, sizes = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = getattr(importlib.import_module(f"diffusers.models.transformers.{module}"), kind)
        torch.manual_seed(11)
        model = made(**{**sizes, "attention_head_dim": HEAD_DIM, "num_attention_heads": heads, **more})
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(1.0, 0.1) if each.dim() == 1 else each.normal_(0.0, 1.0 / each[0].numel() ** 0.5)
    return model.float()


def make_inputs(name: str, text: int, image: int, batch: int = 1) -> dict[str, Any]:
    """Make what a call of the model takes, of so many tokens of text and of the image (or video)."""
    made = torch.Generator().manual_seed(5)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=made)

    time, words = torch.rand(batch, generator=made), normal(batch, text, TEXT_WIDTH)
    if name == "wan":
        return {"hidden_states": normal(batch, CHANNELS, 1, 2, 2 * image), "timestep": time,
                "encoder_hidden_states": words}  # fmt: skip
    found = {"hidden_states": normal(batch, image, CHANNELS), "encoder_hidden_states": words, "timestep": time}
    if name == "qwenimage":
        return {**found, "img_shapes": [[(1, 1, image)]] * batch}
    places = torch.stack([torch.zeros(image), torch.arange(image) // 5, torch.arange(image) % 5], 1)
    return {**found, "pooled_projections": normal(batch, 12), "txt_ids": torch.zeros(text, 3), "img_ids": places}


def as_double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


Results = dict[str, torch.Tensor]


def results(model: Any, inputs: dict[str, Any]) -> Results:
    """The output, and with gradients enabled those of all parameters and of the latents, of one loss."""
    latents = inputs["hidden_states"].detach().clone().requires_grad_(torch.is_grad_enabled())
    model.zero_grad()
    out = model(**{**inputs, "hidden_states": latents}, return_dict=False)[0]
    found = {"output": out.detach().clone()}
    if torch.is_grad_enabled():
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
        (out * weights).sum().backward()
        found["gradient of latents"] = latents.grad.clone()
        found |= {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return found


def in_double(name: str, inputs: dict[str, Any], heads: int = HEADS) -> Results:
    """One process in float64, by diffusers' own code; where that says .float(), too."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        return results(make_model(name, heads).double(), as_double(inputs))


# ---------- on ranks


def split(
    here: Here, name: str, text: int, image: int, schedule: str = "auto", compiled: bool = False, batch: int = 1,
    heads: int = HEADS,
) -> tuple[float, float, str]:  # fmt: skip
    """The largest relative error against float64, that of one process in float32, and of what; or a refusal."""
    from tokenring.integrations.diffusers import add_up_gradients, use_tokenring

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs, cp = make_inputs(name, text, image, batch), here.cp(schedule=schedule)
        wanted, alone = in_double(name, inputs, heads), results(make_model(name, heads), inputs)
        model = use_tokenring(make_model(name, heads), cp)
        called = torch.compile(model, backend="aot_eager") if compiled else model
        try:
            found = results(called, inputs)
        except TokenRingError as error:
            return float("inf"), 0.0, f"refused: {error}"
        add_up_gradients(model, cp)
        found |= {each: x.grad.clone() for each, x in model.named_parameters() if x.grad is not None}
        if cp.world_size > 1:
            torch.distributed.all_reduce(found["gradient of latents"], group=cp.group)
    worst, what = largest_error(found, wanted, zeros_may_lack=True)
    return worst, largest_error(alone, wanted, zeros_may_lack=True)[0], what


EXACT = 1e-5


def is_exact(error: float, alone: float) -> bool:
    """Return True for an error below EXACT, or below twice that of diffusers' own float32 in one process."""
    return error <= max(EXACT, 2 * alone)
