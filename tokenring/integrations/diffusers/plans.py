"""The places of tokens in diffusers' models: what is cut before their blocks, and what is gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stream = Literal["text", "image"]  # a sequence that is cut by itself; the attention joins what a rank holds of both


@dataclass(frozen=True)
class TensorPlace:
    """A tensor with a dimension of tokens: an argument of a module by its name, or an output by its index.

    module: its path in the model; "" is the model, "*" each of a list. dim: of the tokens. dims: how many the tensor
    has. optional: with another number of dimensions it holds no tokens, and stays whole.
    """

    module: str
    where: str | int
    dim: int
    dims: int
    stream: Stream = "image"
    optional: bool = False


@dataclass(frozen=True)
class ModelPlan:
    """The tensors of a model that are cut, the module whose output [B, tokens, C] is gathered, and its streams."""

    places: tuple[TensorPlace, ...]
    gathered: str = "proj_out"
    streams: tuple[Stream, ...] = ("text", "image")

    @property
    def cut_modules(self) -> tuple[str, ...]:
        """Paths of the modules inside the model whose arguments or outputs are cut."""
        return tuple(dict.fromkeys(each.module for each in self.places if each.module))

    def at(self, module: str) -> tuple[TensorPlace, ...]:
        """Return the places of a module."""
        return tuple(each for each in self.places if each.module == module)


PLANS = {
    "FluxTransformer2DModel": ModelPlan((
        TensorPlace("", "encoder_hidden_states", 1, 3, "text"),
        TensorPlace("", "hidden_states", 1, 3),
        TensorPlace("", "txt_ids", 0, 2, "text"),
        TensorPlace("", "img_ids", 0, 2),
    )),
    "QwenImageTransformer2DModel": ModelPlan((
        TensorPlace("pos_embed", 0, 0, 2),
        TensorPlace("pos_embed", 1, 0, 2, "text"),
        TensorPlace("transformer_blocks.0", "encoder_hidden_states", 1, 3, "text"),
        TensorPlace("transformer_blocks.0", "hidden_states", 1, 3),
        TensorPlace("transformer_blocks.*", "modulate_index", 1, 2),
    )),
    "WanTransformer3DModel": ModelPlan(
        (
            TensorPlace("", "timestep", 1, 2, optional=True),  # of each token, in Wan 2.2's TI2V
            TensorPlace("rope", 0, 1, 4),
            TensorPlace("rope", 1, 1, 4),
            TensorPlace("blocks.0", "hidden_states", 1, 3),
        ),
        streams=("image",),  # text is seen by cross-attention, whole on every rank
    ),
}  # fmt: skip
