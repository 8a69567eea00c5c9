"""Break topology fixtures at random: each must give an answer or our own error, quickly and in little memory.

    python benchmarks/mutations.py [--count 100000] [--seed 1000] [--save FOLDER]

Prints how often each answer came, the slowest text and the most memory that the process ever held. A text
that gives anything else is saved and named. Fails if there is one, if one took a second, or above 200 MB.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / each) for each in (".", "tests/support", "tests/fakes")]

from broken_dumps import Broken, broken, fixtures, mutate  # noqa: E402

MOST_SECONDS = 1.0
MOST_BYTES = 200_000_000
SHOW_EVERY_SECONDS = 30.0


def held_bytes() -> int:
    """The most that this process has ever held, Python and its modules included."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def save(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    print(f"saved as {folder / name}", flush=True)


def run(count: int, seed: int, folder: Path) -> bool:
    """One generator for each mutation, so that any of them can be made again alone."""
    texts = fixtures()
    answers: Counter[str] = Counter()
    slowest, slowest_at, told, bad = Broken("", 0.0, ""), 0, time.monotonic(), 0
    for index in range(count):
        try:
            made = mutate(texts, random.Random(seed + index))
        except Exception:
            bad += 1
            traceback.print_exc()
            chance = random.Random(seed + index)
            save(folder, f"mutation-{seed + index}.txt", broken(chance.choice(texts), chance))
            continue
        answers[made.answer] += 1
        if made.seconds > slowest.seconds:
            slowest, slowest_at = made, seed + index
        if time.monotonic() - told > SHOW_EVERY_SECONDS:
            told = time.monotonic()
            print(f"{index + 1} of {count}, {bad} bad, {held_bytes() / 1e6:.0f} MB", flush=True)
    print("\n".join(f"{number:8} {name}" for name, number in answers.most_common()))
    print(f"{bad} of {count} gave anything but an answer or our own error")
    print(f"slowest: {slowest.seconds:.3f} s, mutation {slowest_at}, {slowest.answer}, {len(slowest.text)} characters")
    print(f"most memory: {held_bytes() / 1e6:.0f} MB, Python and its modules included (torch is not among them)")
    if slowest.seconds >= MOST_SECONDS:
        save(folder, f"slow-{slowest_at}.txt", slowest.text)
    return not bad and slowest.seconds < MOST_SECONDS and held_bytes() <= MOST_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1000, help="of the first mutation; each next one has the next")
    parser.add_argument("--save", type=Path, default=Path("mutations"), help="where texts go that fail")
    options = parser.parse_args()
    sys.exit(0 if run(options.count, options.seed, options.save) else 1)


if __name__ == "__main__":
    main()
