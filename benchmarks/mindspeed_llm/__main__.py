"""MindSpeed-LLM's launch scripts with context parallelism, on emulated NPUs with tokenring's attention.

    MINDSPEED_LLM_SRC=.../MindSpeed-LLM MINDSPEED_SRC=.../MindSpeed MEGATRON_SRC=.../Megatron-LM \\
        python benchmarks/mindspeed_llm [NAME ...] [--ranks 4] [--schedule auto] [--also "FLAG VALUE"] [--latents]
        [--beside tp2+sp pp2+vpp2 ep2 ...]

Each script is run with launchers that note its flags. Sizes are shrunk, and flags dropped that have nothing to do with
attention (llm_scripts.py). Then, in processes of their own, MindSpeed-LLM's real adaptor, parser, model and cut of
batches make one step in fp32 over the ranks, with tokenring, and one on one rank without context parallelism. With
`--beside` there is a step for each of these other splits, on tp x pp times as many ranks, by Megatron's own schedule of
microbatches. Prints for each what was replaced and the largest relative error of a gradient, or the message with which
it was refused.
Exit code 1 if a gradient is off by more than 1e-5. Without the sources it says so.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import pairwise
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), *map(str, (REPO / "tests" / "support", REPO / "tests" / "fakes", Path(__file__).parent))]

import llm_step  # noqa: E402
import torch  # noqa: E402
from ascend.ranks import NpuPools  # noqa: E402
from llm_scripts import flags_of, scripts, shrunk  # noqa: E402
from llm_splits import Splits, splits_of  # noqa: E402
from ranks import RankError  # noqa: E402

SOURCES = ("MINDSPEED_LLM_SRC", "MINDSPEED_SRC", "MEGATRON_SRC")
LIMIT = 1e-5
SECONDS = 400.0  # of one script: its imports take most of it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of scripts (default: all)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--also", default="", help="flags behind those of the scripts, as another algorithm")
    parser.add_argument("--latents", action="store_true", help="send latents: scripts with multi-latent attention only")
    parser.add_argument(
        "--beside", nargs="+", default=["none"], metavar="SPLITS", help="other splits, as tp2+sp, pp2+vpp2, ep2"
    )
    parser.add_argument("--verbose", action="store_true", help="whole errors")
    asked = parser.parse_args()
    if missing := [name for name in SOURCES if not os.environ.get(name)]:
        print(f"nothing was run: {', '.join(missing)} must name checkouts")
        return 0
    llm = Path(os.environ["MINDSPEED_LLM_SRC"])
    wrong = ran = 0
    found = [path for path in scripts(llm) if not asked.names or any(name in path.name for name in asked.names)]
    for path in found:
        flags = [*flags_of(path), *asked.also.split()]
        named = [value for flag, value in pairwise(flags) if flag == "--context-parallel-algo"]
        algorithm = named[-1] if named else "megatron_cp_algo"
        packed = ", packed" if "--reset-attention-mask" in flags else ""
        tokenrings = ["--tokenring-schedule", asked.schedule, *(["--tokenring-latents"] if asked.latents else [])]
        for beside in asked.beside:
            error, text = of_script(flags, asked.ranks, splits_of(beside), tokenrings, asked.verbose)
            ran += error is not None
            wrong += error is not None and not error <= LIMIT
            how = f"{algorithm}{packed}" if beside == "none" else f"{algorithm}{packed}, {beside}"
            print(f"{path.relative_to(llm / 'examples')} ({how}): {text}", flush=True)
    steps = f"{ran} of {len(found) * len(asked.beside)} steps of {len(found)} scripts"
    print(f"{steps} ran, {wrong} with gradients off by more than {LIMIT}")
    return 1 if wrong else 0


def of_script(
    flags: list[str], ranks: int, splits: Splits, tokenrings: list[str], verbose: bool
) -> tuple[float | None, str]:
    """Return the largest relative error of a gradient, None where it did not run, and what to print."""
    sources = [os.environ[name] for name in SOURCES]
    pools = NpuPools()
    try:
        with pools.expendable(ranks * splits.ranks) as several:
            ours = [*shrunk(flags, ranks, splits.flags()), *tokenrings]
            replaced = several.within(SECONDS, llm_step.start, sources, ours, True)[0]
            with pools.expendable(1) as one:
                one.within(SECONDS, llm_step.start, sources, shrunk(flags, 1, splits.flags_of_whole()), False)
                (wanted,) = one.within(SECONDS, llm_step.whole)
            of_ranks = several.within(SECONDS, llm_step.errors, wanted)
            latents = several(llm_step.latent_layers)[0]
    except RankError as error:
        return None, str(error) if verbose else said(error)
    finally:
        pools.close()
    errors = [(error, name) for of_rank in of_ranks for name, error in of_rank.items()]
    error, worst = max(errors)
    both = all("TokenRingAttention" in classes for classes in replaced.values())
    text = f"{'both attentions replaced' if both else replaced}; {worst} off by {error:.1e}"
    return error, text + (f"; latents of {latents} layers travel" if latents else "")


def said(error: RankError) -> str:
    """Return the last line of an error with text in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "tokenring" in line or "Error" in line]
    return f"refused: {(told or lines)[-1]}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
