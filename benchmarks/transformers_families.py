"""Gradients of tiny transformers models, cut over ranks, against one process; or the refusal. One line each.

    python benchmarks/transformers_families.py [--families llama,gemma2] [--ranks 2 4] [--layouts zigzag auto]

One process is transformers' own eager code, each document a call of its own. Ends with 1 if anything is silently wrong.
Needs transformers; see docs/transformers.md for versions.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / each) for each in (".", "tests/support", "tests/fakes")]

from hf_families import FAMILIES, KINDS, split  # noqa: E402
from ranks import RankPools  # noqa: E402

LIMIT = 1e-5
CALL_SECONDS = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layouts", nargs="+", default=["zigzag", "auto"])
    options = parser.parse_args()
    pools, worst, wrong, refused = RankPools(), 0.0, 0, 0
    print("| family | batch | ranks | layout | largest relative error | of |\n|---|---|---|---|---|---|")
    try:
        for case in itertools.product(options.families.split(","), KINDS, options.ranks, options.layouts):
            family, kind, world_size, layout = case
            error, name = max(pools(world_size).within(CALL_SECONDS, split, family, kind, layout))
            print(f"| {family} | {kind} | {world_size} | {layout} | {error:.1e} | {name} |", flush=True)
            refused += math.isinf(error)
            if not math.isinf(error):
                worst, wrong = max(worst, error), wrong + (not error <= LIMIT)
    finally:
        pools.close()
    print(f"\nlargest error {worst:.1e}; above {LIMIT:g}: {wrong}; refused by name: {refused}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
