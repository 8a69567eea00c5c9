"""Measure what a mean that all keys share does to attention in a wire format, and what it does once it is taken away.

    torchrun --nproc-per-node 2 benchmarks/key_means.py --wire mxfp8 --means 0 1 4 16 64

k is normally distributed, plus one vector a head, which is as well and is multiplied by the mean. Prints the error of
out, dq, dk and dv against float64, relative to their size: without a format, with it, and with it on centered keys.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from float64_errors import causal_float64, relative_errors

import tokenring as tr
from tokenring.backends.interfaces import Transport

BATCH, LENGTH, HEADS, DIM = 1, 512, 8, 64
NAMES = ("out", "dq", "dk", "dv")
Errors = dict[str, float]


def given(mean: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return q, k, v and the gradient of out, whole: [B, T, H, D]."""
    random = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(BATCH, LENGTH, HEADS, DIM, generator=random) for _ in range(4))
    k = k + mean * torch.randn(1, 1, HEADS, DIM, generator=random)
    return [each.to(dtype) for each in (q, k, v, dout)]


def errors(
    mean: float, dtype: torch.dtype, transport: Transport, schedule: str, wire: str | None, center: bool = False
) -> Errors:
    """Return the relative error of each result over all ranks. center: take the mean of keys away first."""
    whole = given(mean, dtype)
    with tr.ContextParallel(schedule=schedule, transport=transport, wire=wire) as cp:
        q, k, v, dout = (tr.shard(each, cp, dim=1).detach() for each in whole)
        own = [each.requires_grad_() for each in (q, k, v)]
        made = tr.attention(q, tr.centered(k, cp) if center else k, v, cp, is_causal=True)
        found = [made.detach(), *torch.autograd.grad(made, own, dout)]
        right = [tr.shard(each, cp, dim=1) for each in causal_float64(whole)]
    return dict(zip(NAMES, relative_errors(found, right), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", default="mxfp8", help="a format of docs/layer.md")
    parser.add_argument("--means", type=float, nargs="+", default=[0, 1, 4, 16, 64], help="over the spread of keys")
    spec = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tr.ContextParallel() as base:
        assert base.transport is not None, "give it two ranks or more, with torchrun"
        for mean in spec.means:
            for name, options in {
                "no format": ("direct-kv", None, False), f"{spec.wire}, k moves": ("direct-kv", spec.wire, False),
                f"{spec.wire}, q moves": ("tokenring", spec.wire, False),
                f"{spec.wire}, centered": ("direct-kv", spec.wire, True),
            }.items():  # fmt: skip
                found = errors(mean, torch.bfloat16, base.transport, *options)
                if base.rank == 0:
                    said = "  ".join(f"{each} {error:.4f}" for each, error in found.items())
                    print(f"mean {mean:4g}  {name:18} {said}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
