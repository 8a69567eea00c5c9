"""An MLP split over ranks: tokens and features, by two linear layers whose messages hide behind their products.

    torchrun --nproc-per-node 4 examples/tensor_parallel_mlp.py

Prints the largest difference from the same MLP in one piece.
"""

import torch
import torch.distributed as dist

import tokenring as tr

BATCH, TOKENS, WIDTH, FEATURES = 1, 256, 64, 256


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights and tokens on every rank
    x, w_in, w_out = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(FEATURES, WIDTH), torch.randn(WIDTH, FEATURES)
    with tr.TensorParallel() as tp:
        mine = x.chunk(tp.world_size, 1)[tp.rank].contiguous().requires_grad_()
        h = tr.column_linear(mine, tp.shard(w_in, 0), tp)  # [B, T, N/P]
        y = tr.row_linear(torch.nn.functional.gelu(h), tp.shard(w_out, 1), tp)  # [B, T/P, D]
        y.square().mean().backward()  # type: ignore[no-untyped-call]
        whole = torch.nn.functional.gelu(x @ w_in.t()) @ w_out.t()
        error = (y - whole.chunk(tp.world_size, 1)[tp.rank]).abs().max().detach() / whole.abs().max()
        worst = tr.all_reduce(error, tp) / tp.world_size
        if tp.rank == 0:
            assert mine.grad is not None
            print(f"{tp.world_size} ranks, relative difference {worst.item():.1e}, x.grad {list(mine.grad.shape)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
