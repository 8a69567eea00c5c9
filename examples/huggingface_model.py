"""A Hugging Face model with its sequence split over all ranks: one attention function, and five lines around the call.

    torchrun --standalone --nproc-per-node 2 examples/huggingface_model.py

Where transformers is installed the model is its Llama, small and with random weights; else the one below, which calls
its attention function as transformers' models do. Either way loss and gradients are compared with one process.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tokenring as tr

VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS, TOKENS = 256, 64, 4, 2, 2, 512


# ---------- what a user adds


class TokenRingAttention:
    """An attention function as transformers wants it: q, k and v as [B, H, T, D], the result as [B, T, H, D]."""

    def __init__(self, cp: tr.ContextParallel) -> None:
        self.cp = cp

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if attention_mask is not None:
            raise ValueError("padding is not seen here: lay texts end to end, and give tr.Documents(cu_seqlens)")
        mask = tr.Causal() if getattr(module, "is_causal", True) else tr.Full()
        if sliding_window is not None:
            mask &= tr.SlidingWindow(sliding_window - 1)  # transformers count the token itself
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return tr.attention(q, k, v, self.cp, mask, scaling, dropout_p=dropout), None


def split_loss(model: nn.Module, cp: tr.ContextParallel, text: Tensor) -> Tensor:
    """The mean loss of this rank's tokens. Labels are shifted before the sequence is split, and places go with it."""
    tokens, labels = tr.shard(text[:, :-1], cp, dim=1), tr.shard(text[:, 1:], cp, dim=1)
    places = tr.positions(cp, text.shape[1] - 1, text.device)[None].expand(len(text), -1)
    logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# ---------- a model: transformers' own, or one in its style


def sdpa(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **named: Any) -> tuple[Tensor, None]:
    """What one process does."""
    scale = named.get("scaling")
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2), None


def make_model(attention: Callable[..., Any]) -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    try:
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    except ImportError:
        return SmallLlama(attention)
    name = f"attention of {type(attention).__name__}"
    AttentionInterface.register(name, attention)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=TOKENS,
        attn_implementation=name,
    )  # fmt: skip
    made: nn.Module = LlamaForCausalLM(config)
    return made


class SmallLayer(nn.Module):
    """Norm, attention by the function that the model was given, norm, MLP."""

    is_causal = True

    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.attention, self.size = attention, size
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KV_HEADS * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            each(normed).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (y * cos + torch.cat((-y[..., self.size // 2 :], y[..., : self.size // 2]), -1) * sin for y in (q, k))
        out, _ = self.attention(self, q, k, v, None, scaling=self.size**-0.5, dropout=0.0)
        x = x + self.o_proj(out.flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))  # type: ignore[no-any-return]


class SmallLlama(nn.Module):
    """Called as transformers' models for causal language are."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(SmallLayer(attention) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        size = WIDTH // HEADS
        rates = 10000.0 ** (-torch.arange(0, size, 2, device=input_ids.device) / size)
        angles = (position_ids[:, None, :, None] * rates).repeat(1, 1, 1, 2)
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return SimpleNamespace(logits=self.head(self.norm(x)))


# ---------- loss and gradients, split and in one process


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def main() -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    cp = tr.ContextParallel()
    model, whole = make_model(TokenRingAttention(cp)).to(kind), make_model(sdpa).to(kind)
    text = torch.randint(0, VOCABULARY, (2, TOKENS + 1), device=kind)

    loss = split_loss(model, cp, text)
    torch.autograd.backward(loss)
    found = gradients(model) / cp.world_size  # each rank's loss is a mean over equally many tokens
    dist.all_reduce(found)

    alone = split_loss(whole, tr.ContextParallel("self"), text)
    torch.autograd.backward(alone)
    wanted = gradients(whole)
    dist.all_reduce(loss)
    if cp.rank == 0:
        error = (found - wanted).norm() / wanted.norm()
        print(f"{type(model).__module__}.{type(model).__name__}, {cp}")
        print(f"loss {loss.item() / cp.world_size:.5f}, in one process {alone.item():.5f}")
        print(f"gradients, relative error against one process: {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
