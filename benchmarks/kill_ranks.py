"""Lose ranks at random and see what the others say. Fails if any survivor is late, raises anything else, or
names a living rank; or if fewer than 95% of them name the right one.

    python benchmarks/kill_ranks.py [--cases 100] [--seed 0] [--only shm]

Prints outcomes by transport and kind, the share of right names and the slowest answer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / each) for each in (".", "tests/support", "tests/fakes")]

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of every lost connection

from faults import WITHIN_SECONDS, Case, Found, Outcome, run_cases  # noqa: E402


def show(found: Found) -> None:
    for text in found.troubles(WITHIN_SECONDS):
        print(text, flush=True)
    for each in found.outcomes:
        if each.named is None and each.error == "PeerLost":
            print(f"{found.case}: rank {each.rank} names nobody: {each.text}", flush=True)


def table(found: list[Found]) -> None:
    rows: dict[tuple[str, str], list[tuple[Found, Outcome]]] = defaultdict(list)
    for case in found:
        for each in case.outcomes:
            rows[case.case.transport, case.case.kind].append((case, each))
            rows["all", ""].append((case, each))
    print("transport  kind          survivors  right name  certain  median s  slowest s")
    for (transport, kind), some in sorted(rows.items(), key=lambda row: (row[0][0] == "all", row[0])):
        seconds = sorted(each.seconds for _, each in some)
        right = sum(each.named == case.case.victim for case, each in some)
        certain = sum(each.certain for _, each in some)
        numbers = f"{100 * right / len(some):9.1f}% {100 * certain / len(some):7.1f}%"
        print(f"{transport:10} {kind:13} {len(some):9} {numbers} {seconds[len(some) // 2]:9.2f} {seconds[-1]:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one transport")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + 100 * options.cases)
    drawn = (Case.random(seed, reform=seed % 5 == 0) for seed in seeds)
    cases = [case for case in drawn if options.only in (None, case.transport)][: options.cases]
    found = run_cases(cases, show)
    table(found)
    outcomes = [(case.case.victim, each) for case in found for each in case.outcomes]
    right = sum(each.named == victim for victim, each in outcomes)
    sys.exit(any(case.troubles(WITHIN_SECONDS) for case in found) or right < 0.95 * len(outcomes))


if __name__ == "__main__":
    main()
