"""A Hugging Face model with its sequences split over all ranks: one line, and one for the gradients.

    torchrun --standalone --nproc-per-node 2 examples/huggingface_model.py

Where transformers is installed the model is its Llama, small and with random weights. Else it is the one below, which
calls an attention function as transformers' models do: what to add to a model of your own. Either way loss and
gradients are compared with one process.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tokenring as tr
from tokenring.integrations.transformers.training import add_up_gradients, use_tokenring

VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS, TOKENS = 256, 64, 4, 2, 2, 512


class Step(NamedTuple):
    """Loss and gradients over the ranks, and in one process."""

    model: str
    loss: Tensor
    gradients: Tensor
    loss_alone: Tensor
    gradients_alone: Tensor


# ---------- a model of transformers


def step_of_transformers(cp: tr.ContextParallel, text: Tensor) -> Step:
    """Raises ImportError where transformers is not installed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=TOKENS + 1,
    )).to(text.device)  # fmt: skip
    whole = deepcopy(model)

    use_tokenring(model, cp)  # the one line
    loss = model(input_ids=text, labels=text).loss  # whole sequences in; the loss of all of them, on every rank
    loss.backward()
    add_up_gradients(model, cp)  # unless DDP or FSDP joins them: then say gradients="mean" above

    alone = whole(input_ids=text, labels=text).loss
    alone.backward()
    return Step(f"transformers' {type(model).__name__}", loss, gradients(model), alone, gradients(whole))


# ---------- a model of one's own


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


def sdpa(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **named: Any) -> tuple[Tensor, None]:
    """What one process does."""
    scale = named.get("scaling")
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2), None


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


def step_of_own(cp: tr.ContextParallel, text: Tensor) -> Step:
    model = SmallLlama(TokenRingAttention(cp)).to(text.device)
    whole = SmallLlama(sdpa).to(text.device)
    whole.load_state_dict(model.state_dict())

    loss = split_loss(model, cp, text)
    torch.autograd.backward(loss)
    found = gradients(model) / cp.world_size  # each rank's loss is a mean over equally many tokens
    dist.all_reduce(found)
    dist.all_reduce(loss)

    alone = split_loss(whole, tr.ContextParallel("self"), text)
    torch.autograd.backward(alone)
    return Step(type(model).__name__, loss / cp.world_size, found, alone, gradients(whole))


# ---------- both


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def main() -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    cp = tr.ContextParallel()
    torch.manual_seed(0)  # the same weights and text on every rank
    text = torch.randint(0, VOCABULARY, (2, TOKENS + 1), device=kind)
    try:
        step = step_of_transformers(cp, text)
    except ImportError:
        step = step_of_own(cp, text)
    if cp.rank == 0:
        error = (step.gradients - step.gradients_alone).norm() / step.gradients_alone.norm()
        print(f"{step.model}, {cp}")
        print(f"loss {step.loss.item():.5f}, in one process {step.loss_alone.item():.5f}")
        print(f"gradients, relative error against one process: {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
