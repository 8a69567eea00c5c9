"""Run an ordinary script many times, with contexts closed or not, collected or not, and see that each rank ends well.

    python benchmarks/exits.py [--runs 200] [--only "left open"]

Three ranks over Gloo: contexts, attention, unshard, destroy_process_group, exit. Prints runs and failures by
variant, and what a rank said that failed. Fails if any did. With a C compiler, every other run holds up the
threads of torch's Gloo groups for 20 ms, as a busy machine may: then what happens now and then happens each time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from itertools import cycle, islice, product
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / each) for each in (".", "tests/support", "tests/fakes")]

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of ranks that have ended first

from exit_ranks import VARIANTS, held_up, run  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="in all")
    parser.add_argument("--only", choices=VARIANTS)
    options = parser.parse_args()
    made: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        first = held_up(Path(folder))
        ways = [None] if first is None else [None, first]
        plays = product([options.only] if options.only else VARIANTS, ways)
        for variant, library in islice(cycle(plays), options.runs):
            name = variant if library is None else f"{variant}, late threads"
            (ended,) = run([variant], library)
            made[name] += 1
            failed[name] += any(code != 0 for code, _ in ended)
            for rank, (code, said) in enumerate(ended):
                if code != 0:
                    print(f"{name}: rank {rank} ended with {code}: {said}", flush=True)
    print("variant                         runs  failures")
    for name, runs in made.items():
        print(f"{name:30} {runs:5} {failed[name]:9}")
    print(f"{'all':30} {made.total():5} {failed.total():9}")
    sys.exit(failed.total() > 0)


if __name__ == "__main__":
    main()
