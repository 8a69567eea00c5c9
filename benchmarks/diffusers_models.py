"""Tiny Flux, Wan and QwenImage of diffusers over ranks: errors of both passes, and bytes beside `ulysses_anything`.

    python benchmarks/diffusers_models.py errors [--models flux,wan] [--ranks 2 3 4] [--heads 4 5]
    python benchmarks/diffusers_models.py bytes [--ranks 2 3 4] [--heads 4 7] [--schedule auto]

errors: output and gradients against one process in float64, with those of diffusers' own float32 in one process beside;
lengths of the joint sequence have every residue modulo the ranks. bytes: what all ranks send in one forward pass of a
model as in a pipeline, without gradients, for attention and for gathering the output; and what diffusers' own sends,
with its gathers of sizes. Its enable_parallelism asks for an accelerator: the count of devices is set to one for it.
Ends with 1 if anything is wrong. Needs diffusers; docs/diffusers.md names versions.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / each) for each in (".", "tests/support", "tests/fakes")]

import pytest  # noqa: E402
import torch  # noqa: E402
from gradient_errors import largest_error  # noqa: E402
from ranks import Here, RankPools  # noqa: E402
from tiny_diffusers import MODELS, is_exact, make_inputs, make_model, results, split  # noqa: E402

CALL_SECONDS = 300.0
TEXT, IMAGE = 7, 24


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("errors", "bytes"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--heads", type=int, nargs="+", default=[4, 7])
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--text", type=int, default=TEXT, help="tokens")
    parser.add_argument("--image", type=int, default=IMAGE, help="tokens; bytes: of one more")
    given = parser.parse_args()
    pools = RankPools()
    import diffusers

    print(f"diffusers {diffusers.__version__}, torch {torch.__version__}, float32\n")
    try:
        return (errors if given.what == "errors" else bytes_sent)(given, pools)
    finally:
        pools.close()


def errors(given: argparse.Namespace, pools: RankPools) -> int:
    print("| model | heads | ranks | text + image | largest relative error | one process | of |")
    print("|---|---|---|---|---|---|---|")
    worst, wrong = 0.0, 0
    for name, heads, ranks in itertools.product(given.models.split(","), given.heads, given.ranks):
        for more in range(ranks):
            text, image = given.text, given.image + more
            found = pools(ranks).within(CALL_SECONDS, split, name, text, image, given.schedule, False, 1, heads)
            error, alone, what = max(found)
            print(f"| {name} | {heads} | {ranks} | {text} + {image} | {error:.1e} | {alone:.1e} | {what} |")
            sys.stdout.flush()
            worst, wrong = max(worst, error), wrong + (math.isnan(error) or not is_exact(error, alone))
    print(f"\nlargest error {worst:.1e}; wrong or refused: {wrong}")
    return 1 if wrong else 0


def bytes_sent(given: argparse.Namespace, pools: RankPools) -> int:
    print("| model | heads | ranks | text + image | schedule | tokenring | ulysses_anything | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    more = 0
    for name, heads, ranks in itertools.product(given.models.split(","), given.heads, given.ranks):
        case = (name, heads, given.text, given.image + 1)
        ours = pools(ranks).within(CALL_SECONDS, our_bytes, *case, given.schedule)
        theirs = pools(ranks).within(CALL_SECONDS, their_bytes, *case)
        sent, their_sent = sum(each[0] for each in ours), [each for each in theirs if isinstance(each, int)]
        if len(their_sent) == ranks:
            compared = f"{sum(their_sent):,} | {sent / sum(their_sent):.3f}"
            more += sent > sum(their_sent)
        else:
            compared = f"{theirs[0]} | –"
        print(
            f"| {name} | {heads} | {ranks} | {case[2]} + {case[3]} | {ours[0][1]} | {sent:,} | {compared} |", flush=True
        )
    print(f"\nmore bytes than ulysses_anything: {more}")
    return 1 if more else 0


def our_bytes(here: Here, name: str, heads: int, text: int, image: int, schedule: str) -> tuple[int, str]:
    from tokenring.integrations.diffusers import gathering, use_tokenring

    sent, names = 0, set()
    with quiet() as patched, torch.no_grad():
        cp = here.cp(schedule=schedule)
        model, plan = use_tokenring(make_model(name, heads).eval(), cp), type(cp).plan  # as in a pipeline
        patched.setattr(type(cp), "plan", lambda self, request: names.add((found := plan(self, request)).name) or found)
        assert cp.transport is not None
        counted = gathering.dist.all_to_all_single

        def counting(out: Any, x: Any, of_out: Any, of_x: list[int], **more: Any) -> Any:
            nonlocal sent
            sent += (sum(of_x) - of_x[here.rank]) * x[0].numel() * x.element_size()
            return counted(out, x, of_out, of_x, **more)

        patched.setattr(gathering.dist, "all_to_all_single", counting)
        before = sum(cp.transport.sent_bytes.values())
        inputs = make_inputs(name, text, image)
        found = results(model, inputs)
        sent += sum(cp.transport.sent_bytes.values()) - before
        assert largest_error(found, results(make_model(name, heads), inputs), zeros_may_lack=True)[0] < 1e-4
    return sent, " ".join(sorted(names))


def their_bytes(here: Here, name: str, heads: int, text: int, image: int) -> int | str:
    """Bytes that this rank sends in diffusers' own ulysses_anything: all-to-alls, and gathers, also those of sizes."""
    import diffusers.models.attention_dispatch as dispatch
    from diffusers import ContextParallelConfig

    sent = 0
    with quiet() as patched, torch.no_grad():
        patched.setattr(torch.accelerator, "device_count", lambda: 1)
        all_to_all, all_gather = dispatch.funcol.all_to_all_single, torch.distributed.all_gather

        def counting(x: Any, of_out: Any, of_x: list[int], group: Any) -> Any:
            nonlocal sent
            sent += (sum(of_x) - of_x[here.rank]) * x[0].numel() * x.element_size()
            return all_to_all(x, of_out, of_x, group)

        def gathering(out: list[Any], x: Any, **more: Any) -> Any:
            nonlocal sent
            sent += x.numel() * x.element_size() * (here.world_size - 1)
            if x.numel() == 1:
                return all_gather(out, x, **more)
            return uneven_all_gather(out, x)

        patched.setattr(dispatch.funcol, "all_to_all_single", counting)
        patched.setattr(torch.distributed, "all_gather", gathering)
        model = make_model(name, heads)
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=here.world_size, ulysses_anything=True))
        inputs = make_inputs(name, text, image)
        try:
            found = results(model, inputs)
        except AssertionError as error:
            return f"refused ({error})"
        if (error := largest_error(found, results(make_model(name, heads), inputs), zeros_may_lack=True)[0]) > 1e-4:
            return f"wrong: {error:.1e}"
    return sent


def uneven_all_gather(out: list[Any], x: Any) -> None:
    """Gloo gathers equal parts alone; NCCL any."""
    for rank, part in enumerate(out):
        if rank == torch.distributed.get_rank():
            part.copy_(x)
        torch.distributed.broadcast(part, rank)


class quiet(pytest.MonkeyPatch):
    """Patches that are undone at the end, and no warnings inside."""

    def __enter__(self) -> pytest.MonkeyPatch:
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("ignore")
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()
        self._caught.__exit__(*error)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
