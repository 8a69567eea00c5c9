"""A layer whose sequence is split over all ranks: forward, backward, and the same gradients as in one process.

    torchrun --standalone --nproc-per-node 2 examples/torchrun_20_lines.py
"""

import torch
import torch.distributed as dist

import tokenring as tr

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
cp = tr.ContextParallel()  # over all ranks; print(cp) says how
torch.manual_seed(0)  # the same weights and, to have something to compare with, the same sequence everywhere
layer, x = torch.nn.Linear(256, 3 * 256).to(device), torch.randn(1, 2048, 256, device=device)  # [B, T, C]

q, k, v = layer(tr.shard(x, cp, dim=1)).unflatten(-1, (3, 4, 64)).unbind(2)  # [B, T of this rank, H, D] each
out = tr.attention(q, k, v, cp, is_causal=True)
(split,) = torch.autograd.grad(out.square().mean(), [layer.weight])
dist.all_reduce(split)  # a mean over equal parts: sum, then divide by how many there are
split /= cp.world_size

q, k, v = layer(x).unflatten(-1, (3, 4, 64)).transpose(1, 3).unbind(2)  # one process, [B, H, T, D]
whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()
(wanted,) = torch.autograd.grad(whole, [layer.weight])
if cp.rank == 0:
    print(f"{cp}: relative error against one process: {(split - wanted).norm() / wanted.norm():.1e}")
dist.destroy_process_group()
