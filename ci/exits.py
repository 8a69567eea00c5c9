"""Run an ordinary script many times, with contexts closed or not, collected or not, and see that each rank ends well.

    python ci/exits.py [--runs 200] [--only "left open"]

Three ranks over Gloo: contexts, attention, unshard, destroy_process_group, exit. Prints runs and failures by
variant, and what a rank said that failed. Fails if any did.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in (".", "tests")]

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of ranks that have ended first

from exit_ranks import VARIANTS, run  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="in all")
    parser.add_argument("--only", choices=VARIANTS)
    options = parser.parse_args()
    made: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for variant in islice(cycle([options.only] if options.only else VARIANTS), options.runs):
        ended = run(variant)
        made[variant] += 1
        failed[variant] += any(code != 0 for code, _ in ended)
        for rank, (code, said) in enumerate(ended):
            if code != 0:
                print(f"{variant}: rank {rank} ended with {code}: {said}", flush=True)
    print("variant             runs  failures")
    for variant, runs in made.items():
        print(f"{variant:18} {runs:5} {failed[variant]:9}")
    print(f"{'all':18} {made.total():5} {failed.total():9}")
    sys.exit(failed.total() > 0)


if __name__ == "__main__":
    main()
