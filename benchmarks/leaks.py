"""Open and close many contexts and groups, one after the other, and see that processes hold no more than before.

    python benchmarks/leaks.py [--count 1000]

Contexts over both transports that are closed, that are just dropped, and that have a new process group each.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

FOLDERS = (".", "tests/support", "tests/fakes", "tests/api")
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / each) for each in FOLDERS]

from ranks import RankPools  # noqa: E402
from test_leaks import check  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    pools = RankPools()
    try:
        for name, (close, new_groups) in itertools.product(
            ("shm", "gloo"), ((True, False), (False, False), (True, True))
        ):
            how = ("closed" if close else "dropped") + (", each with a new process group" if new_groups else "")
            print(f"{options.count} contexts over {name}, {how}")
            print("\n".join(check(pools, name, options.count, close, new_groups)), flush=True)
    finally:
        pools.close()


if __name__ == "__main__":
    main()
