"""A small decoder-only transformer, as the field builds them.

It has RMSNorm before each part, rotary positions, grouped-query attention, SwiGLU.
How attention is computed is an argument, so one model runs split over ranks and whole on one.
B batch, T tokens held here, H heads, D head dim, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # q, k, v [B, T, H, D] → out
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of the model; its width is q_heads · head_dim."""

    vocabulary: int = 256
    layers: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 352

    @property
    def width(self) -> int:
        """The width of the residual stream, q_heads · head_dim."""
        return self.q_heads * self.head_dim


class TransformerBlock(nn.Module):
    """Attention and SwiGLU, each on the normalised residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attention_norm = nn.RMSNorm(config.width)
        self.query = nn.Linear(config.width, config.q_heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x_BTE: torch.Tensor, angles_TD: torch.Tensor, attend: Attention) -> torch.Tensor:
        """Return the residual stream [B, T, E] after attention and SwiGLU; angles_TD as `rotary_angles` makes them."""
        normal = self.attention_norm(x_BTE)
        q, k, v = (part(normal).unflatten(-1, (-1, self.head_dim)) for part in (self.query, self.key, self.value))
        mixed = attend(rotate(q, angles_TD), rotate(k, angles_TD), v)
        x_BTE = x_BTE + self.output(mixed.flatten(-2))
        normal = self.mlp_norm(x_BTE)
        gated: torch.Tensor = self.down(F.silu(self.gate(normal)) * self.up(normal))
        return x_BTE + gated


class Transformer(nn.Module):
    """A model with bytes in, and logits of the next byte out."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.unembedding = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def forward(self, tokens_BT: torch.Tensor, positions_T: torch.Tensor, attend: Attention) -> torch.Tensor:
        """Return logits [B, T, vocabulary]. positions_T: the position of each token in the whole sequence."""
        angles_TD = rotary_angles(positions_T, self.config.head_dim)
        x_BTE = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTE = block(x_BTE, angles_TD, attend)
        logits: torch.Tensor = self.unembedding(self.norm(x_BTE))
        return logits

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Set equal weights on all ranks. Embeddings have size 1: normalised, they tell bytes apart from the start."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            scale = float(parameter.shape[1]) ** -0.5
            if name.startswith("embedding"):
                scale = 1.0
            elif name.startswith("unembedding"):
                scale = 0.02  # the first loss is that of a uniform guess
            elif name.endswith(("output.weight", "down.weight")):
                scale /= (2 * self.config.layers) ** 0.5  # what adds to the residual stream begins smaller (GPT-2)
            parameter.normal_(0.0, scale, generator=generator)


def rotary_angles(positions_T: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the angle of each position and pair of head elements: [T, D / 2]."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return (positions_T.double()[:, None] * frequencies).float()


def rotate(x_BTHD: torch.Tensor, angles_TD: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to the two halves of each head."""
    cos, sin = angles_TD.cos()[:, None], angles_TD.sin()[:, None]
    first, second = x_BTHD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def whole_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute causal attention by torch alone, on the whole sequence: the split one is compared with it."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
