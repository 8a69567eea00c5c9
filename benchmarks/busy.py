"""Run pytest beside busy workers of its own priority: a test that fails there is a defect, of it or of the product.

    python benchmarks/busy.py -m waits              # every test that starts processes or sockets, or waits
    python benchmarks/busy.py --workers 8 tests/backends/control/test_faults.py

Workers belong to the session of the tests, so that the scheduler's autogroups keep none of them apart. Whatever is
not an option of this script goes to pytest. Exits with pytest's code.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import subprocess
import sys

WORKERS = 30


def spin() -> None:
    """Use a core until the parent is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(100_000))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="N", help=f"busy processes ({WORKERS})")
    options, given = parser.parse_known_args()
    context = mp.get_context("spawn")
    workers = [context.Process(target=spin, daemon=True) for _ in range(options.workers)]
    for each in workers:
        each.start()
    try:
        return subprocess.call([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *given])
    finally:
        for each in workers:
            each.kill()


if __name__ == "__main__":
    sys.exit(main())
