"""FSDP2 with context parallelism: a small GPT on a DeviceMesh of data × context parallel ranks.

    torchrun --standalone --nproc-per-node 4 examples/fsdp2_device_mesh.py --cp 2

Every rank of a context-parallel group holds a part of the same sequences. FSDP shards the parameters over all ranks and
averages gradients over them: that is right here, since each rank's loss is a mean over equally many tokens.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import tokenring as tr

VOCABULARY, WIDTH, HEADS, LAYERS = 256, 64, 4, 2
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, T, H, D] -> [B, T, H, D]


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [B, T, H, D], by the place of each token in the whole sequence."""
    rates = 10000.0 ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angles = (positions[:, None] * rates)[None, :, None]
    even, odd = x[..., ::2], x[..., 1::2]
    turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
    return torch.stack(turned, -1).flatten(-2)


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        mixed: Tensor = x + self.out(attend(rotated(q, positions), rotated(k, positions), v).flatten(2))
        return mixed + self.mlp(mixed)  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Tokens and labels [B, T] to their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions, attend)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def in_one_process(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sequence")
    args = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    world = dist.get_world_size()
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(kind, (world // args.cp, args.cp), mesh_dim_names=("dp", "cp"))
    cp = tr.ContextParallel(mesh["cp"])

    torch.manual_seed(0)  # the same model and text on every rank, to compare with one process
    model = Gpt().to(kind)
    whole = copy.deepcopy(model)
    text = torch.randint(0, VOCABULARY, (2 * mesh["dp"].size(), args.seq + 1), device=kind)
    tokens, labels = text[:, :-1], text[:, 1:]  # labels are shifted before the sequence is split

    sharded = init_device_mesh(kind, (world,), mesh_dim_names=("fsdp",))
    for block in model.blocks:
        fully_shard(block, mesh=sharded)
    fully_shard(model, mesh=sharded)
    assert isinstance(model, FSDPModule)

    mine = slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2)  # this group's sequences
    part, part_labels = tr.shard(tokens[mine], cp, dim=1), tr.shard(labels[mine], cp, dim=1)
    places = tr.positions(cp, args.seq, kind)
    loss = model(part, part_labels, places, lambda q, k, v: tr.attention(q, k, v, cp, is_causal=True))
    torch.autograd.backward(loss)

    torch.autograd.backward(whole(tokens, labels, torch.arange(args.seq, device=kind), in_one_process))
    found, wanted = [], []
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor) and theirs.grad is not None
        found.append(ours.grad.full_tensor().flatten())
        wanted.append(theirs.grad.flatten())
    error = (torch.cat(found) - torch.cat(wanted)).norm() / torch.cat(wanted).norm()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"FSDP over {world} ranks, data parallel {world // args.cp} × context parallel {args.cp}, {cp}")
        print(f"loss {loss.item() / world:.4f}; gradients, relative error against one process: {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
