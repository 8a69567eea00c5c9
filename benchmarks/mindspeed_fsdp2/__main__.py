"""Real functions of MindSpeed-LLM's and -MM's FSDP2 trainers on CPU ranks, with tokenring's attention and theirs.

    python benchmarks/mindspeed_fsdp2 MINDSPEED_LLM MINDSPEED_MM MINDSPEED [--ranks 4] [--only llm|mm]

The three are checkouts; transformers and einops must be installed. Real are the trainers' meshes, cuts of batches,
manager of context parallelism, attention functions, exchanges of heads, rings, Wan's self-attention, and small models
of transformers; stand-ins are torch_npu's operators (in float64, on CPU tensors) and packages that none of this uses.
Prints for each call the largest relative error of out and the gradients against one process in float64, by whose
attention. Exit code 1 if tokenring is off by more than 1e-5, or a cut is not the one that it takes it to be.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FOLDERS = (REPO / "tests" / "support", REPO / "tests" / "fakes", REPO / "benchmarks" / "mindspeed_llm")
sys.path[:0] = [str(REPO), *map(str, FOLDERS), str(Path(__file__).parent)]

import fsdp2_sources as sources  # noqa: E402
import torch  # noqa: E402
from fsdp2_calls import Case  # noqa: E402
from ranks import RankError, RankPools  # noqa: E402

LIMIT = 1e-5
SECONDS = 300.0
PACK = (5, 6, 23, 40, 48)


def llm_calls() -> list[Case]:
    """Calls of layers of MindSpeed-LLM's models."""
    return [
        Case("ulysses"),
        Case("ulysses", ends=PACK),
        Case("ulysses", window=9, sinks=True),
        Case("ulysses", heads=(4, 4), dims=(12, 8), batch=2),
        Case("ring", batch=2),
        Case("ring", causal=False),
        Case("ring", ends=PACK),
        Case("kvallgather"),
    ]


def mm_calls(ranks: int) -> list[Case]:
    """Calls of layers of MindSpeed-MM's models."""
    half = ranks // 2
    return [
        Case((1, ranks), tokens=50, ends=(7, 8, 31, 50)),
        Case((1, ranks), tokens=51, causal=False, ends=(20, 26, 51)),
        Case((1, ranks), tokens=51, causal=False, ends=(17, 34, 51)),
        Case((1, ranks), tokens=50, causal=False, batch=2, layout="BSND"),
        Case((1, ranks), tokens=48, causal=False, kv=16, batch=2, layout="BNSD"),
        Case((ranks, 1), batch=2, layout="BNSD"),
        Case((ranks, 1), tokens=51, causal=False, ends=(20, 26, 51), each_document=True),
        *([Case((half, 2), batch=2, layout="BNSD")] if half > 1 else []),
        *([Case((half, 2), tokens=51, causal=False, ends=(20, 26, 51), each_document=True)] if half > 1 else []),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llm", type=Path, help="a checkout of MindSpeed-LLM")
    parser.add_argument("mm", type=Path, help="a checkout of MindSpeed-MM")
    parser.add_argument("mindspeed", type=Path, help="a checkout of MindSpeed, whose exchange of heads both use")
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4, 8))
    parser.add_argument("--only", choices=("llm", "mm"))
    asked = parser.parse_args()
    paths = [str(path.resolve()) for path in (asked.llm, asked.mm, asked.mindspeed)]
    wrong = 0
    for name, calls in (("llm", llm_calls()), ("mm", mm_calls(asked.ranks))):
        if asked.only in (None, name):
            wrong += of_trainer(name, calls, paths, asked.ranks)
    print(f"{wrong} results of tokenring are off by more than {LIMIT}")
    return 1 if wrong else 0


def of_trainer(name: str, calls: list[Case], paths: list[str], ranks: int) -> int:
    """Run all of one trainer and print it; returns how much of it was wrong."""
    pools, wrong = RankPools(), 0
    try:
        several = pools(ranks)
        several.within(SECONDS, sources.start, paths)
        one_call, others = (sources.llm_call, ["models"]) if name == "llm" else (sources.mm_call, ["wan"])
        for case in calls:
            found = several.within(SECONDS, one_call, case)
            ours = max(each[0] for each in found)
            theirs = {each[1] for each in found if isinstance(each[1], str)} or {
                f"{max(each[1] for each in found):.1e}"
            }
            wrong += not ours <= LIMIT
            print(
                f"{name} {shown(case)}: tokenring {ours:.1e}, theirs {' / '.join(sorted(map(str, theirs)))}", flush=True
            )
        for other in others:
            for what, error, is_ours in several.within(SECONDS, getattr(sources, other))[0]:
                wrong += is_ours and not error <= LIMIT
                print(f"{name} {what}: {error:.1e}", flush=True)
    except RankError as error:
        print(f"{name}: {error}", flush=True)
        wrong += 1
    finally:
        pools.close()
    return wrong


def shown(case: Case) -> str:
    """A call in a few words."""
    cut = case.cut if isinstance(case.cut, str) else f"ring {case.cut[0]} x ulysses {case.cut[1]}"
    kind = "causal" if case.causal else "full"
    more = [f"documents of {', '.join(map(str, case.documents))}"] if case.ends else []
    more += [f"window {case.window}"] if case.window else []
    more += ["sinks"] if case.sinks else []
    more += [f"keys of {case.kv} tokens"] if case.kv else []
    more += [f"head dims {case.dims}"] if case.dims[0] != case.dims[1] else []
    return ", ".join([f"{cut}", f"{case.batch} x {case.tokens} tokens", kind, *more])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
