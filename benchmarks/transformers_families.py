"""Gradients of tiny transformers models, cut over ranks, against one process; or the refusal. One line each.

    python benchmarks/transformers_families.py [--families llama,gemma2] [--ranks 2 4] [--layouts zigzag auto]
    python benchmarks/transformers_families.py --peers accelerate ringmaster-ulysses ringmaster-ring [--ranks 2 4]

One process is transformers' own eager code, each document a call of its own. --peers: beside the context parallelism
of others (benchmarks/hf_peers.py says how it is called), in a length that all of them can cut; ours with layout "auto".
Ends with 1 if anything of ours is silently wrong. Needs transformers, for --peers accelerate and axolotl-ringmaster;
see docs/transformers.md for versions.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / each) for each in (".", "tests/support", "tests/fakes")]

from hf_families import FAMILIES, KINDS, split  # noqa: E402
from hf_peers import PEERS, REFUSED, peer_error  # noqa: E402
from ranks import RankError, RankPools  # noqa: E402

LIMIT = 1e-5
CALL_SECONDS = 300.0
PEERS_LENGTH = 48  # divides by twice the ranks, which torch's balancer wants


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layouts", nargs="+", default=["zigzag", "auto"])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[])
    options = parser.parse_args()
    pools = RankPools()
    try:
        return beside_peers(options, pools) if options.peers else ours(options, pools)
    finally:
        pools.close()


def ours(options: argparse.Namespace, pools: RankPools) -> int:
    worst, wrong, refused = 0.0, 0, 0
    print("| family | batch | ranks | layout | largest relative error | of |\n|---|---|---|---|---|---|")
    for case in itertools.product(options.families.split(","), KINDS, options.ranks, options.layouts):
        family, kind, world_size, layout = case
        error, name = max(pools(world_size).within(CALL_SECONDS, split, family, kind, layout))
        print(f"| {family} | {kind} | {world_size} | {layout} | {error:.1e} | {name} |", flush=True)
        refused += math.isinf(error)
        if not math.isinf(error):
            worst, wrong = max(worst, error), wrong + (not error <= LIMIT)
    print(f"\nlargest error {worst:.1e}; above {LIMIT:g}: {wrong}; refused by name: {refused}")
    return 1 if wrong else 0


def beside_peers(options: argparse.Namespace, pools: RankPools) -> int:
    names = ("tokenring", *options.peers)
    counted: dict[str, Counter[str]] = {name: Counter() for name in names}
    said: dict[str, int] = {}
    print(f"{PEERS_LENGTH} tokens a row\n\n| family | batch | ranks | {' | '.join(names)} |")
    print(f"|---|---|---|{'---|' * len(names)}")
    for case in itertools.product(options.families.split(","), KINDS, options.ranks):
        family, kind, world_size = case
        cells = []
        for name in names:
            error, what = answer(pools, world_size, name, family, kind)
            found = "refuses" if error < 0 else "right" if error <= LIMIT else "**wrong**"
            counted[name][found] += 1
            number = said.setdefault(what, len(said) + 1) if found == "refuses" else 0
            cells.append({"refuses": f"refuses ({number})", "right": f"{error:.0e}"}.get(found, f"{found} {error:.0e}"))
        print(f"| {family} | {kind} | {world_size} | {' | '.join(cells)} |", flush=True)
    print(f"\n| | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for found in ("right", "refuses", "**wrong**"):
        print(f"| {found} | {' | '.join(str(counted[name][found]) for name in names)} |")
    print("\n" + "\n".join(f"{number}. {what}" for what, number in said.items()))
    return 1 if counted["tokenring"]["**wrong**"] else 0


def answer(pools: RankPools, world_size: int, name: str, family: str, kind: str) -> tuple[float, str]:
    """Return the largest error of all ranks, or REFUSED and why."""
    call: Callable[..., list[tuple[float, str]]] = pools(world_size).within  # type: ignore[assignment]
    if name == "tokenring":
        error, what = max(call(CALL_SECONDS, split, family, kind, "auto", PEERS_LENGTH))
        return (REFUSED, what) if math.isinf(error) else (error, what)
    try:
        found = call(CALL_SECONDS, peer_error, name, family, kind, PEERS_LENGTH)
    except RankError as error:
        return REFUSED, f"fails: {str(error).splitlines()[-1]}"
    return min(found) if min(found)[0] < 0 else max(found)


if __name__ == "__main__":
    sys.exit(main())
