"""generate() over a cache that is dealt over ranks, against one process: every model, number of ranks, prompt and page.

    python benchmarks/generate_grid.py [--kinds beams padded] [--minutes 20] [--seed 0] [--after 0] [--only WORD]

Greedy search, three beams, and a batch of three rows that is padded on its left, of tiny random models in fp32: 240
cells of each kind, in an order of the seed, 256 new tokens each. Prints each cell that is wrong, and at the end how
many ran and how far the scores (the logits, of beams their logarithms of probability) are from those of one process at
most. Where two ways on are as good to rounding, which one is taken is chance: a row that takes another is compared up
to there, and counted as tied. Ends with 1 if another token differs or a score is further away than 1e-4. Needs
transformers.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / each) for each in (".", "tests/support")]

import torch  # noqa: E402
from beam_replay import Replayed, replayed, rows_of  # noqa: E402
from ranks import Here, RankError, RankPools  # noqa: E402
from serving_cases import MODELS, Case, beams_of, generated, make_model, served, whole_grid  # noqa: E402

BEAMS, ROWS = 3, 3
CALL_SECONDS = 300.0
KINDS = ("greedy", "beams", "padded")
Found = tuple[torch.Tensor, torch.Tensor]


class Cell(NamedTuple):
    """A case and its kind."""

    kind: str
    case: Case

    def __str__(self) -> str:
        case = self.case
        return f"{self.kind} {case.model} ranks={case.ranks} prompt={case.prompt} page={case.page}"


def cells(kinds: list[str], only: str, seed: int) -> list[Cell]:
    """Return the cells in the order of the seed."""
    found = [Cell(kind, of_kind(kind, case)) for kind in kinds for case in whole_grid()]
    random.Random(seed).shuffle(found)
    return [cell for cell in found if only in str(cell)]


def of_kind(kind: str, case: Case) -> Case:
    if kind == "beams":
        return case._replace(options=(("num_beams", BEAMS),))
    if kind == "padded":
        return case._replace(lengths=tuple(max(1, case.prompt * row // ROWS) for row in range(ROWS, 0, -1)))
    return case


def model_of(here: Here, name: str) -> Any:
    """Return the model that this process has kept."""
    return here.memory.setdefault("models", {}).get(name) or here.memory["models"].setdefault(name, make_model(name))


def alone(here: Here, case: Case) -> Found:
    """Return what one process generates."""
    warnings.simplefilter("ignore")
    return generated(model_of(here, case.model), case)


def over_ranks(here: Here, case: Case, wanted: Found) -> list[tuple[bool, Replayed]]:
    """Return of each row whether its tokens are those of one process, and what the two searches have in common."""
    warnings.simplefilter("ignore")
    ids, scores = served(here, model_of(here, case.model), case)
    rows = zip(*(rows_of(each, beams_of(case)) for each in (scores, wanted[1])), strict=True)
    same = [torch.equal(*each) for each in zip(ids, wanted[0], strict=True)]
    return list(zip(same, (replayed(*each) for each in rows), strict=True))


def is_right(same: bool, found: Replayed) -> bool:
    """Return whether a row is: it never parts, or after two ways on that are as good."""
    return found.parted is None and (same or found.tied is not None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--after", type=int, default=0, help="cells of this order that ran before, and are left out")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    options = parser.parse_args()
    waiting, began, wrong = cells(options.kinds, options.only, options.seed)[options.after :], time.monotonic(), 0
    ran, tied, of_kinds, worst = 0, 0, Counter[str](), dict.fromkeys(options.kinds, 0.0)
    wanted: dict[Case, Found] = {}
    pools = RankPools()
    try:
        for cell in waiting:
            if time.monotonic() - began > 60 * options.minutes:
                break
            ran += 1
            of_kinds[cell.kind] += 1
            one = cell.case._replace(ranks=1, page=1)  # one process has no pages
            try:
                if one not in wanted:
                    wanted[one] = pools(1).within(CALL_SECONDS, alone, one)[0]
                found = pools(cell.case.ranks).within(CALL_SECONDS, over_ranks, cell.case, wanted[one])
            except RankError as error:
                print(f"{cell}: {str(error).rstrip().splitlines()[-1]}", flush=True)
                wrong, worst[cell.kind] = wrong + 1, float("inf")
                continue
            rows = [row for each in found for row in each]
            worst[cell.kind] = max(worst[cell.kind], *(row.error for _, row in rows))
            tied += any(row.tied is not None for _, row in rows)
            if not all(is_right(*row) for row in rows):
                wrong += 1
                print(f"{cell}: {[(same, row) for same, row in rows if not is_right(same, row)]}", flush=True)
    finally:
        pools.close()
    minutes = (time.monotonic() - began) / 60
    print(f"transformers, models {', '.join(MODELS)}; seed {options.seed}; {minutes:.1f} minutes")
    for kind in options.kinds:
        print(f"{kind}: {of_kinds[kind]} of {sum(each.kind == kind for each in waiting)} cells, scores at most "
              f"{worst[kind]:.1e} apart")  # fmt: skip
    print(f"{ran} of {len(waiting)} cells ran, {wrong} wrong, {tied} in part compared up to a tie")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
