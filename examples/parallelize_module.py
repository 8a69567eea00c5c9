"""A torch-native model by parallelize_module: FSDP2 with context parallelism, packed documents, no change of the model.

    torchrun --standalone --nproc-per-node 4 examples/parallelize_module.py --cp 2

The model calls torch's scaled_dot_product_attention and knows of no ranks. `ContextParallelAttention` takes those calls
over in the modules that the plan names.
"""

from __future__ import annotations

import argparse
import copy
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import tokenring as tr
from tokenring.integrations.torch_parallel_style import ContextParallelAttention

VOCABULARY, WIDTH, HEADS, LAYERS = 256, 64, 4, 2


class Attention(nn.Module):
    """Causal attention within a whole sequence, as one process computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Tokens, labels and places [B, T] to the sum of their losses."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(most, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor, places: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.place(places)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--documents", type=int, nargs="+", default=[200, 56, 130, 126], help="tokens of each")
    args = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    dp, length = dist.get_world_size() // args.cp, sum(args.documents)
    mesh = init_device_mesh(kind, (dp, args.cp), mesh_dim_names=("dp", "cp"))

    torch.manual_seed(0)  # the same model and text on every rank, to compare with one process
    model = Gpt(length).to(kind)
    whole = copy.deepcopy(model)
    text = torch.randint(0, VOCABULARY, (dp, length + 1), device=kind)
    places = torch.cat([torch.arange(each, device=kind) for each in args.documents]).expand(dp, -1)
    ends = [sum(args.documents[:at]) for at in range(len(args.documents) + 1)]

    cp = tr.ContextParallel(mesh["cp"], layout="auto")
    style = ContextParallelAttention(cp, tr.Causal() & tr.Documents(ends))  # style.mask = ... for the next pack
    parallelize_module(model, mesh["cp"], {"layers.*.attention": style})
    flat = mesh._flatten("fsdp")
    for each in (*model.layers, model):
        fully_shard(each, mesh=flat)
    assert isinstance(model, FSDPModule)

    mine = slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)  # this group's sequence
    parts = (tr.shard(x[mine], cp, mask=style.mask) for x in (text[:, :-1], text[:, 1:], places))
    loss = model(*parts) * dist.get_world_size() / (dp * length)  # FSDP takes the mean over ranks
    torch.autograd.backward(loss)

    for start, stop in pairwise(ends):  # one process, document by document
        cut = slice(start, stop)
        torch.autograd.backward(whole(text[:, :-1][:, cut], text[:, 1:][:, cut], places[:, cut]) / (dp * length))
    found, wanted = [], []
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor) and theirs.grad is not None
        found.append(ours.grad.full_tensor().flatten())
        wanted.append(theirs.grad.flatten())
    error = (torch.cat(found) - torch.cat(wanted)).norm() / torch.cat(wanted).norm()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"FSDP over {dist.get_world_size()} ranks, data parallel {dp} × context parallel {args.cp}, {cp}")
        print(f"loss {loss.item() / dist.get_world_size():.4f}; "
              f"gradients, relative error against one process: {error:.1e}")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
