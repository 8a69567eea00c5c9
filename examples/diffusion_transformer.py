"""A diffusion transformer over text and image together, the joint sequence split over all ranks.

    torchrun --standalone --nproc-per-node 2 examples/diffusion_transformer.py

77 text tokens and the patches of an image are one sequence, as in Flux and Stable Diffusion 3. It divides by no number
of ranks: the last rank holds some tokens fewer than the others.

The model is a small one in plain torch, in the style of diffusers. In diffusers itself exchange dispatch_attention_fn
in the model's module: its q, k and v are [B, T, H, D], as here (tests/project/test_more_examples.py does so for Flux).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tokenring as tr

WIDTH, HEADS, LAYERS, CHANNELS = 64, 4, 3, 16
TEXT, SIDE = 77, 20  # tokens of the text; patches of the image along a side
Processor = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, T, H, D] -> [B, T, H, D]


# ---------- what a user adds


class TokenRingProcessor:
    """Attention over the parts that all ranks hold of a sequence."""

    def __init__(self, cp: tr.ContextParallel) -> None:
        self.cp = cp

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tr.attention(q, k, v, self.cp)


def denoise_split(model: Dit, cp: tr.ContextParallel, text: Tensor, image: Tensor, time: Tensor) -> Tensor:
    """What `model.denoise` gives, computed by all ranks together; the whole image comes back on every rank."""
    tokens, places = model.embedded(text, image), model.places(text, image)
    part, part_places = tr.shard(tokens, cp, dim=1), tr.shard(places, cp, dim=0)
    out = model.blocks_of(part, part_places, time, TokenRingProcessor(cp))
    return model.to_pixels(tr.unshard(out, cp, dim=1)[:, text.shape[1] :])


# ---------- a model in the style of diffusers


class DitBlock(nn.Module):
    """A single-stream block: attention and MLP side by side, both modulated by the time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)
        self.qkv, self.mlp_in, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(5 * WIDTH, WIDTH),
        )  # fmt: skip

    def forward(self, x: Tensor, turn: Tensor, time: Tensor, processor: Processor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(time))[:, None].chunk(3, -1)
        normed = self.norm(x) * (1 + scale) + shift
        q, k, v = self.qkv(normed).unflatten(-1, (3, HEADS, -1)).unbind(2)
        attended = processor(rotated(q, turn), rotated(k, turn), v).flatten(2)
        return x + gate * self.out(torch.cat((attended, F.gelu(self.mlp_in(normed))), -1))  # type: ignore[no-any-return]


class Dit(nn.Module):
    """Text [B, T, C] and a noisy image [B, patches, C] to the noise in it."""

    def __init__(self) -> None:
        super().__init__()
        self.text_in, self.image_in, self.pixels = (
            nn.Linear(CHANNELS, WIDTH), nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, CHANNELS),
        )  # fmt: skip
        self.time_in = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(DitBlock() for _ in range(LAYERS))

    def embedded(self, text: Tensor, image: Tensor) -> Tensor:
        """The joint sequence."""
        return torch.cat((self.text_in(text), self.image_in(image)), 1)

    @staticmethod
    def places(text: Tensor, image: Tensor) -> Tensor:
        """Row and column of each token [T, 2]; text is at 0, 0."""
        grid = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij"), -1).flatten(0, 1)
        return torch.cat((torch.zeros(text.shape[1], 2), grid.float())).to(image.device)

    def blocks_of(self, x: Tensor, places: Tensor, time: Tensor, processor: Processor) -> Tensor:
        """All blocks, on the tokens at hand."""
        rates = 100.0 ** (-torch.arange(WIDTH // HEADS // 4, device=x.device) / (WIDTH // HEADS // 4))
        turn = (places[:, :, None] * rates).flatten(1)[None, :, None]
        embedded = self.time_in(time[:, None])
        for block in self.blocks:
            x = block(x, turn, embedded, processor)
        return x

    def to_pixels(self, x: Tensor) -> Tensor:
        return self.pixels(x)  # type: ignore[no-any-return]

    def denoise(self, text: Tensor, image: Tensor, time: Tensor) -> Tensor:
        """In one process."""
        x = self.blocks_of(self.embedded(text, image), self.places(text, image), time, in_one_process)
        return self.to_pixels(x[:, text.shape[1] :])


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    turned = even * turn.cos() - odd * turn.sin(), even * turn.sin() + odd * turn.cos()
    return torch.stack(turned, -1).flatten(-2)


def in_one_process(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def main() -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    cp = tr.ContextParallel(layout="contiguous")  # nothing is causal: nothing to balance
    torch.manual_seed(0)  # the same everywhere
    model = Dit().to(kind).requires_grad_(False)
    text, image = torch.randn(1, TEXT, CHANNELS, device=kind), torch.randn(1, SIDE * SIDE, CHANNELS, device=kind)
    steps = 4
    split, whole = image, image
    for step in range(steps):
        time = torch.full((1,), 1 - step / steps, device=kind)
        split = split - denoise_split(model, cp, text, split, time) / steps
        whole = whole - model.denoise(text, whole, time) / steps
    if cp.rank == 0:
        print(f"{TEXT} text tokens and {SIDE * SIDE} patches, {steps} steps of denoising, {cp}")
        print(f"the image, relative error against one process: {(split - whole).norm() / whole.norm():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
