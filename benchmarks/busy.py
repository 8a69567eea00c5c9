"""Run pytest beside busy workers of its own priority: a test that fails there is a defect, of it or of the product.

    python benchmarks/busy.py -m waits              # every test that starts processes or sockets, or waits: hours
    python benchmarks/busy.py -m waits --lanes 14   # the same in 14 runs of pytest beside each other
    python benchmarks/busy.py --workers 8 tests/backends/control/test_faults.py

Workers belong to the session of the tests, so that the scheduler's autogroups keep none of them apart. Lanes are whole
modules each, those that are to be alone in one; each writes to a file of its own. None is niced, as xdist's
workers are. Whatever is not an option of this script goes to pytest. Exits with pytest's code, the largest of lanes.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
WORKERS = 30
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]


def spin() -> None:
    """Use a core until the parent is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(100_000))


def divided(given: list[str], lanes: int) -> list[list[str]]:
    """Divide the modules with tests that pytest would take, by their number of tests."""
    sys.path[:0] = [str(REPO / each) for each in ("tests", "tests/support", "tests/fakes")]
    from conftest import ALONE, module_of

    listed = subprocess.run([*PYTEST, "--collect-only", "-q", *given], capture_output=True, text=True, check=False)
    tests = Counter(line.partition("::")[0] for line in listed.stdout.splitlines() if "::" in line)
    alone = [each for each in tests if module_of(Path(each)) in ALONE]
    found, sizes = [alone, *([] for _ in range(lanes - 1))], [sum(tests[each] for each in alone), *[0] * (lanes - 1)]
    for module, number in tests.most_common():
        if module not in alone:
            least = sizes.index(min(sizes))
            found[least].append(module)
            sizes[least] += number
    return [each for each in found if each]


def run_lanes(given: list[str], lanes: list[list[str]], folder: Path) -> int:
    """Run each lane, and print how it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    options = [each for each in given if not Path(each.partition("::")[0]).exists()]
    files = [folder / f"{number}.log" for number in range(len(lanes))]
    running = []
    for modules, file in zip(lanes, files, strict=True):
        with open(file, "w", encoding="utf-8") as log:
            command = [*PYTEST, "-v", *options, *modules]
            running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    codes = [each.wait() for each in running]
    for file, code in zip(files, codes, strict=True):
        print(f"{file}: code {code}: {file.read_text(encoding='utf-8').rstrip().rpartition(chr(10))[2]}")
    return max(codes, default=5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workers", type=int, default=WORKERS, metavar="N", help=f"busy processes ({WORKERS})")
    add("--lanes", type=int, default=1, metavar="N", help="runs of pytest beside each other (1)")
    add("--logs", type=Path, default=REPO / "build" / "busy", metavar="FOLDER", help="of lanes (build/busy)")
    options, given = parser.parse_known_args()
    lanes = divided(given, options.lanes) if options.lanes > 1 else []
    context = mp.get_context("spawn")
    workers = [context.Process(target=spin, daemon=True) for _ in range(options.workers)]
    for each in workers:
        each.start()
    try:
        if lanes:
            return run_lanes(given, lanes, options.logs)
        return subprocess.call([*PYTEST, *given])
    finally:
        for each in workers:
            each.kill()


if __name__ == "__main__":
    sys.exit(main())
