"""Attention over a sequence that four ranks hold together.

    torchrun --standalone --nproc-per-node 4 examples/split_attention.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import tokenring as tr


def main() -> None:
    dist.init_process_group("gloo")
    cp = tr.ContextParallel(layout="zigzag", schedule="auto")
    torch.manual_seed(0)  # every rank makes the same whole sequence, only to have something to compare with
    x = torch.randn(1, 1024, 8, 64)  # B batch, T tokens, N heads, H head dim

    local = tr.shard(x, cp, dim=1).requires_grad_()
    out = tr.attention(local, local, local, cp, mask=tr.Causal())
    torch.autograd.backward(out.square().mean())

    whole = tr.unshard(out.detach(), cp)
    heads_first = x.transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(heads_first, heads_first, heads_first, is_causal=True)
    error = (whole - expected.transpose(1, 2)).norm() / expected.norm()
    if cp.rank == 0:
        plan = tr.plan(local, local, local, cp, tr.Causal())
        print(plan)
        print(f"relative error against one process: {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
