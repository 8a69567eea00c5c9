#!/usr/bin/env python3
"""The merge kernel on one GPU: first that it merges right there, each time alike, then its GB/s against a copy's.

    hardware/gpu/gpu_merge.py [--rows 8192] [--heads 32] [--head-dim 128] [--sweep]
    hardware/gpu/gpu_merge.py --device cpu --rows 64          # a dry run of the script: torch's merge

Partials come in bf16 as a kernel makes them; the accumulators in fp32 lie as a call's outputs do, and as the pool's
records do. Bytes: out and lse are read and written, what comes is read. Exit code 1 where it is wrong, or slower than
85% of the copy. `measure` and `verdict` are for ci/gpu.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_clock import in_turn

from tokenring.backends.interfaces import Merger
from tokenring.backends.merging.choice import choose_merger, trial

ENOUGH = 0.85  # of a copy's bandwidth
CALLS, ROUNDS = 20, 9  # calls between two looks at the clock; the median of so many rounds counts


class Rate(NamedTuple):
    """Of one layout: GB/s of the merge, of a copy that moves as many bytes, and of torch's own merge."""

    layout: str
    merge_gbs: float
    copy_gbs: float
    torch_gbs: float

    @property
    def share(self) -> float:
        return self.merge_gbs / self.copy_gbs


class Sizes(NamedTuple):
    """Of the accumulators: rows (of one entry of a batch), heads, elements of a head."""

    rows: int
    heads: int
    head_dim: int


def measure(device: torch.device, sizes: Sizes, merger: Merger | None = None) -> list[Rate]:
    """Each layout; the merger that the device gets, unless another is given."""
    from tokenring.backends.merging.torch_merger import TorchMerger

    merger = choose_merger(device, sizes.head_dim).merger if merger is None else merger
    plain, made = TorchMerger(), []
    for layout, make in LAYOUTS.items():
        out, lse = make(device, sizes)
        rows, heads, head_dim = sizes
        new_out = torch.randn(1, rows, heads, head_dim, device=device, dtype=torch.bfloat16).transpose(0, 1)
        new_lse = torch.zeros(1, heads, rows, device=device).permute(2, 0, 1)  # as kernels give it
        given = (out, lse, new_out, new_lse, torch.empty(2, *lse.shape, device=device))
        nbytes = 2 * 4 * out.numel() + 2 * new_out.numel() + 3 * 4 * lse.numel()
        source = torch.zeros(nbytes // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        calls = {
            "merge": partial(merger.merge_, *given),
            "copy": partial(target.copy_, source),
            "torch": partial(plain.merge_, *given),
        }
        seconds = in_turn(calls, device, ROUNDS, CALLS)
        made.append(Rate(layout, *(nbytes / seconds[name] / 1e9 for name in ("merge", "copy", "torch"))))
    return made


def _outputs(device: torch.device, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """As a call's results in fp32 are accumulated."""
    rows, heads, head_dim = sizes
    out = torch.randn(1, rows, heads, head_dim, device=device).transpose(0, 1)
    return out, torch.zeros(1, rows, heads, device=device).transpose(0, 1)


def _records(device: torch.device, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """As in the pool: lse and out of a token beside each other."""
    rows, heads, head_dim = sizes
    records = torch.randn(rows, heads * (1 + head_dim), device=device)
    return records[:, heads:].view(rows, 1, heads, head_dim), records[:, :heads].view(rows, 1, heads)


LAYOUTS: dict[str, Callable[[torch.device, Sizes], tuple[torch.Tensor, torch.Tensor]]] = {
    "outputs": _outputs,
    "records": _records,
}


def repeated(device: torch.device, sizes: Sizes, times: int = 20) -> str | None:
    """None, or what is wrong: many rows are merged right, and to the bit alike each time.

    A kernel whose warps overtake each other is wrong in some rows and in some runs, which a trial of few rows misses.
    """
    from tokenring.backends.merging.torch_merger import TorchMerger

    merger, rows = choose_merger(device, sizes.head_dim).merger, sizes.rows
    generator = torch.Generator(device).manual_seed(0)
    shape = (rows, 1, sizes.heads, sizes.head_dim)
    new_out = torch.randn(shape, device=device, generator=generator).bfloat16()
    start, new_lse = (torch.randn(shape[:3], device=device, generator=generator) for _ in range(2))
    scratch = torch.empty(2, *start.shape, device=device)
    for layout, make in LAYOUTS.items():
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for each in (TorchMerger(), *[merger] * times):
            out, lse = make(device, sizes)
            out.fill_(1.0)
            lse.copy_(start)
            each.merge_(out, lse, new_out, new_lse, scratch)
            found.append((out, lse))
        right, first = found[:2]
        for name, mine, wanted in zip(("out", "lse"), first, right, strict=True):
            if not (error := float((mine - wanted).abs().max())) < 1e-5:  # NaN too
                return f"{name} of {rows} rows ({layout}) is off by {error:.1e}"
        if wrong := sum(not torch.equal(a, b) for made in found[2:] for a, b in zip(made, first, strict=True)):
            return f"{wrong} of {2 * (times - 1)} results for {rows} rows ({layout}) differ from the first"
    return None


def verdict(device: torch.device, sizes: Sizes) -> tuple[bool, str]:
    """Whether the merge is right and fast enough, and a line that says so."""
    made = choose_merger(device, sizes.head_dim)
    if device.type == "cuda" and made.merger.name != "triton":
        return False, f"merge: no Triton kernel: {'; '.join(why for _, why in made.others)}"
    wrong = trial(made.merger, device, sizes.head_dim) or repeated(device, sizes)
    if wrong is not None:
        return False, f"merge: {wrong}"
    rates = measure(device, sizes)
    text = "; ".join(
        f"{rate.layout}: {rate.merge_gbs:.0f} GB/s, {rate.share:.0%} of a copy's {rate.copy_gbs:.0f} "
        f"(torch's operators: {rate.torch_gbs:.0f})"
        for rate in rates
    )
    return all(rate.share >= ENOUGH for rate in rates), f"merge by {made.merger.name}: {text}"


def run(report: Callable[[str, str, str, bool | None], None]) -> None:
    """For ci/gpu."""
    well, line = verdict(torch.device("cuda"), Sizes(8192, 32, 128))
    report("merging, by bandwidth", line, f">= {ENOUGH:.0%} of a copy", well)


def sweep(device: torch.device, sizes: Sizes) -> list[str]:
    """Other blocks: a line for each."""
    from tokenring.backends.merging.triton import TritonMerger

    lines = []
    for elements in (1024, 2048, 4096, 8192, 16384):
        for warps in (2, 4, 8):
            rates = measure(device, sizes, TritonMerger(elements, warps))
            shown = ", ".join(f"{rate.layout} {rate.share:.1%}" for rate in rates)
            lines.append(f"  {elements:>6} elements, {warps} warps: {shown}")
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--sweep", action="store_true", help="also other sizes of a block")
    asked = parser.parse_args(arguments)
    device, sizes = torch.device(asked.device), Sizes(asked.rows, asked.heads, asked.head_dim)
    well, line = verdict(device, sizes)
    print(line)
    if asked.sweep:
        print("\n".join(sweep(device, sizes)))
    return 0 if well or device.type == "cpu" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
