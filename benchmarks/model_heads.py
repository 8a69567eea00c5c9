"""Head shapes of ten real models: what the table of s* is computed for.

DeepSeek's MLA has heads of 192 for Q and K (128 + 64 with the rotary part) and of 128 for V; it stands here as
multi-head attention with these widths: K and V travel, not the latent (576 a token for all heads).

Of diffusion models the heads are those of the joint or the self-attention, over text and image together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from tokenring.sequence.workload import Workload


@dataclass(frozen=True)
class ModelHeads:
    """The attention of one layer. value_dim: elements of a head of V; None: as many as of q and k."""

    name: str
    title: str
    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    causal: bool
    source: str
    dtype: torch.dtype = torch.bfloat16
    value_dim: int | None = None

    def workload(self, tokens: int, batch: int = 1) -> Workload:
        """Return the workload of one layer's attention over so many tokens of all ranks together."""
        heads = self.q_heads, self.kv_heads, self.head_dim
        return Workload(batch, tokens, tokens, *heads, self.dtype, self.value_dim or self.head_dim)


def _config(name: str, keys: str) -> str:
    return f"config.json of {name}: {keys}"


def _transformer(name: str, keys: str) -> str:
    return f"transformer/config.json of {name}: {keys}"


_GQA = "num_attention_heads, num_key_value_heads, hidden_size"
_DIT = "num_attention_heads, attention_head_dim, num_layers"
_ALL = (
    ModelHeads("llama-3-8b", "Llama 3 8B", 32, 8, 128, 32, True, _config("Meta-Llama-3-8B", _GQA)),
    ModelHeads("llama-3-405b", "Llama 3.1 405B", 128, 8, 128, 126, True,
               _config("Llama-3.1-405B", f"{_GQA}; params.json has n_kv_heads 8")),
    ModelHeads("qwen2.5-7b", "Qwen2.5 7B", 28, 4, 128, 28, True, _config("Qwen2.5-7B", _GQA)),
    ModelHeads("deepseek-v3", "DeepSeek-V3 (MLA)", 128, 128, 192, 61, True,
               _config("DeepSeek-V3", "num_attention_heads, qk_nope_head_dim 128, qk_rope_head_dim 64, v_head_dim"),
               value_dim=128),
    ModelHeads("sd3.5-large", "Stable Diffusion 3.5 Large", 38, 38, 64, 38, False,
               _transformer("stable-diffusion-3.5-large", _DIT)),
    ModelHeads("cogvideox-2b", "CogVideoX 2B", 30, 30, 64, 30, False, _transformer("CogVideoX-2b", _DIT),
               torch.float16),
    ModelHeads("flux.1", "FLUX.1", 24, 24, 128, 57, False,
               "FluxParams of FLUX.1-dev: num_heads 24, hidden_size 3072, depth 19 + depth_single_blocks 38"),
    ModelHeads("wan2.1-14b", "Wan 2.1 14B", 40, 40, 128, 40, False,
               "wan_t2v_14B.py of Wan 2.1: num_heads 40, dim 5120, num_layers 40"),
    ModelHeads("glm-4-9b", "GLM-4 9B", 32, 2, 128, 40, True,
               _config("glm-4-9b", "num_attention_heads, multi_query_group_num 2, kv_channels 128, num_layers")),
    ModelHeads("mixtral-8x7b", "Mixtral 8x7B", 32, 8, 128, 32, True,
               _config("Mixtral-8x7B-v0.1", f"{_GQA}; sliding_window is null")),
)  # fmt: skip

MODELS: Mapping[str, ModelHeads] = MappingProxyType({each.name: each for each in _ALL})
