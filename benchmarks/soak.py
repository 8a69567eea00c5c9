"""Make random calls for a while, check each against float64, and see that ranks hold no more at the end than before.

    python benchmarks/soak.py [--minutes 30] [--seed 0] [--ranks 4]

Prints how many calls of which kind were made, the largest errors, and what each rank held after the
warm-up and at the end. Fails at the first wrong result, and if anything has grown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / each) for each in (".", "tests/support", "tests/fakes")]

from faults import lasting_names  # noqa: E402
from random_calls import Soaked, soak  # noqa: E402
from ranks import RankPools  # noqa: E402


def show(made: Soaked) -> None:
    print(f"{len(made.held)} rounds")
    print("\n".join(f"{count:8} {name}" for name, count in sorted(made.calls.items())))
    for name, (value, drawn) in sorted(made.worst.items()):
        print(f"largest {name}: {value:.3g}  ({drawn})")
    for rank in range(len(made.held[0])):
        for when, held in zip(("after the warm-up", "at the end"), made.ends(rank), strict=True):
            print(f"rank {rank} {when}: {held}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    pools = RankPools()
    try:
        made = soak(pools, 60 * options.minutes, options.seed, options.ranks, show=lambda text: print(text, flush=True))
    except AssertionError as error:
        sys.exit(str(error).partition("\nrank 1: ")[0])
    finally:
        pools.close()
    show(made)
    grown = [*made.growth(), *(f"left in /dev/shm: {name}" for name in lasting_names())]
    print("\n".join(grown) or "nothing has grown")
    sys.exit(bool(grown))


if __name__ == "__main__":
    main()
