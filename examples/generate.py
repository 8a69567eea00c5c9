"""Generate text tokens over a KV cache that is dealt over all ranks, and compare with one process.

    torchrun --standalone --nproc-per-node 2 examples/generate.py --prompt 2048 --new 64

Where transformers is installed the model is its Llama, small and with random weights, and `generate()` does the rest;
else the one below, which calls tokenring itself. Either way the tokens are compared with those of one process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tokenring as tr

VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS = 512, 256, 8, 2, 3
SIZE = WIDTH // HEADS
Generate = Callable[[Tensor, int, tr.ContextParallel], Tensor]  # from a prompt [1, T] to all tokens [1, T + new]


# ---------- with transformers


def with_transformers() -> Generate:
    """generate() of transformers; `with serve_with_tokenring(model, cp)` is all that a user adds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tokenring.integrations.transformers.serving import serve_with_tokenring

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=1 << 17, eos_token_id=None,
    )  # fmt: skip
    model: Any = spread(LlamaForCausalLM(config).eval())

    def generate(ids: Tensor, new: int, cp: tr.ContextParallel) -> Tensor:
        with serve_with_tokenring(model, cp):
            found: Tensor = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
            )
        return found

    return generate


# ---------- with the cache alone


class SmallLayer(nn.Module):
    """Norm, attention over the cache, norm, MLP."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv_proj = nn.Linear(WIDTH, 2 * KV_HEADS * SIZE, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: tr.KVCache) -> Tensor:
        normed = self.norm(x)
        q = self.q_proj(normed).unflatten(-1, (HEADS, SIZE))
        k, v = self.kv_proj(normed).unflatten(-1, (2 * KV_HEADS, SIZE)).split(KV_HEADS, dim=2)
        q, k = (y * cos + torch.cat((-y[..., SIZE // 2 :], y[..., : SIZE // 2]), -1) * sin for y in (q, k))
        x = x + self.o_proj(tr.cached_attention(q, k, v, cache, self.number).flatten(2))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class SmallLlama(nn.Module):
    """Gives the logits of the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(SmallLayer(number) for number in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, places: Tensor, cache: tr.KVCache) -> Tensor:
        """Hidden states of ids [1, T], at these places [T] of the text."""
        rates = 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
        angles = (places[:, None, None] * rates).repeat(1, 1, 2)[None]
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), cache)
        return self.norm(x)  # type: ignore[no-any-return]


def by_hand() -> Generate:
    """A prompt cut over the ranks, what does not divide on all of them, and then one token at a time."""
    model = spread(SmallLlama())

    def generate(ids: Tensor, new: int, cp: tr.ContextParallel) -> Tensor:
        length = ids.shape[1]
        cache = tr.KVCache(cp, layers=LAYERS, kv_heads=KV_HEADS, head_dim=SIZE, capacity=length + new)
        part = length - length % (2 * cp.world_size)  # of two chunks a rank
        hidden = torch.empty(0)
        if part:
            places = tr.positions(cp, part)
            with cache.step(ids[:, :part], "tokens"):
                hidden = tr.unshard(model(ids[:, places], places, cache), cp)
        if part < length:
            with cache.step(ids[:, part:]):
                hidden = model(ids[:, part:], torch.arange(part, length), cache)
        for at in range(length, length + new):
            token = model.head(hidden[:, -1]).argmax(-1, keepdim=True)
            ids = torch.cat((ids, token), 1)
            if at < length + new - 1:
                with cache.step(token):  # ranks whose tokens differ are refused
                    hidden = model(token, torch.tensor([at]), cache)
        return ids

    return generate


# ---------- both


def spread(model: Any) -> Any:
    """Weights that make texts of many different tokens."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.08)
    return model.requires_grad_(False)


class Told(NamedTuple):
    """Of one call: all tokens, seconds to the first new one and for each other, bytes that this rank sent for them."""

    ids: Tensor
    first_seconds: float
    each_seconds: float
    first_bytes: int
    each_bytes: float


def timed(generate: Generate, ids: Tensor, new: int, cp: tr.ContextParallel) -> Told:
    generate(ids, 2, cp)  # connects
    marks = []
    for count in (1, new):
        before, began = sent(cp), time.perf_counter()
        found = generate(ids, count, cp)
        marks.append((time.perf_counter() - began, sent(cp) - before))
    (first, first_bytes), (all_seconds, all_bytes) = marks
    others = max(1, new - 1)
    return Told(found, first, max(1e-9, all_seconds - first) / others, first_bytes, (all_bytes - first_bytes) / others)


def sent(cp: tr.ContextParallel) -> int:
    """Bytes that this rank has sent so far."""
    return 0 if cp.transport is None else sum(cp.transport.sent_bytes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights and prompt on every rank
    cp = tr.ContextParallel()
    try:
        generate, by = with_transformers(), "transformers' Llama"
    except ImportError:
        generate, by = by_hand(), "a small Llama of its own"
    ids = torch.randint(1, VOCABULARY, (1, options.prompt))
    with torch.inference_mode():
        found = timed(generate, ids, options.new, cp)
        dist.barrier()
        if cp.rank == 0:
            alone = timed(generate, ids, options.new, tr.ContextParallel("self"))
            print(f"{by}, prompt of {options.prompt} tokens, {options.new} new ones, {LAYERS} layers")
            for name, told in ((f"{cp.world_size} ranks", found), ("one process", alone)):
                rate = 1 / told.each_seconds
                print(f"{name}: {told.first_seconds:.2f} s to the first token, then {rate:.0f} tokens/s")
            print(f"sent by a rank: {found.first_bytes} bytes for the prompt, {found.each_bytes:.0f} for a token")
            apart, kinds = (found.ids != alone.ids).float().mean(), len(set(found.ids[0, options.prompt :].tolist()))
            print(f"the same tokens: {torch.equal(found.ids, alone.ids)}; {kinds} kinds among the new ones")
            print(f"tokens that differ, relative error against one process: {apart:.1e}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
