"""`tokenring advise`: which flags of another engine to take for a model on a topology, and what tokenring would do.

Exit codes: 0 advice; 2 a wrong option, a file that cannot be read, or a model that cannot be planned.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from typing import Any

from tokenring.cli.advise.choices import Choice, Engine, Job
from tokenring.cli.advise.engines import ENGINES
from tokenring.cli.advise.pricing import as_run, choice_seconds, with_heads
from tokenring.cli.models import FULL_LAYER, KNOWN, ModelFacts, read_model
from tokenring.cli.plan.options import Asked, ask
from tokenring.cli.spelling import SIZES_TEXT, add_dtype, add_passes
from tokenring.display.console import Console, Parser, read_options
from tokenring.display.units import time_text
from tokenring.errors import ConfigurationError
from tokenring.gc_pause import no_collection
from tokenring.nearest import hint
from tokenring.planner.choosing.kept_plans import plan_or_forecast_kept
from tokenring.planner.choosing.plan import Forecast
from tokenring.planner.machines.presets import PRESETS
from tokenring.sequence.sizes import read_size

FORMAT, VERSION = "tokenring-advice", 1


@dataclass(frozen=True)
class Priced:
    """An option with the predicted time of all layers' attention; None: it cannot be taken, or not be priced."""

    option: Choice
    seconds: float | None
    reason: str = ""


def main(argv: list[str]) -> int:
    """Print the advice; return the exit code. Raises ConfigurationError."""
    options = read_options(_parser().parse_args, argv)
    if isinstance(options, int):
        return options
    if options.engine not in ENGINES:
        like = hint(options.engine, ENGINES)
        raise ConfigurationError(f"--engine {options.engine}: choose one of {', '.join(ENGINES)}{like}")
    model, engine = read_model(options.model), ENGINES[options.engine]
    console = Console(sys.stdout, sys.stderr, os.environ)
    with no_collection():
        asked = _asked(options, model, engine)
        ranks = next(iter(asked.values())).call.setting.interconnect.world_size
        if ranks < 2:
            raise ConfigurationError("one rank shares no sequence: give --ranks, or a smaller --tp")
        job = Job(model, ranks, read_size("--seq", options.seq), options.passes == "training", options.tp)
        console.status(f"predicting for {ranks} ranks")
        priced = sorted(_priced(engine, job, asked), key=_rank)
        own = _own(asked, model)
        console.clear()
    if options.json:
        console.data(json.dumps(as_data(options.engine, job, priced, own), indent=1) + "\n")
    else:
        console.say("\n".join(advice(engine, job, priced, own)))
    return 0


def as_data(engine: str, job: Job, priced: list[Priced], own: tuple[str, float | None]) -> dict[str, Any]:
    """Return the advice as data: the choices, the fastest first, and what tokenring would take."""
    choices = [
        {"flags": each.option.flags, "schedule": each.option.schedule, "seconds": each.seconds, "reason": each.reason}
        for each in priced
    ]
    return {
        "format": FORMAT, "version": VERSION, "engine": engine, "model": job.model.name, "ranks": job.ranks,
        "tokens": job.length, "passes": ["forward", "backward"] if job.training else ["forward"],
        "choices": choices, "tokenring": {"schedule": own[0], "seconds": own[1]},
    }  # fmt: skip


def _rank(each: Priced) -> float:
    return float("inf") if each.seconds is None else each.seconds


def _asked(options: argparse.Namespace, model: ModelFacts, engine: Engine) -> dict[str, Asked]:
    """Return a call to plan for of each kind of the model's layers."""
    sizes = {
        "heads": model.heads, "kv_heads": model.kv_heads, "dim": model.head_dim, "value_dim": model.value_dim,
        "layout": engine.layout, "schedules": None, "all": False, "rates": None, "transport": None,
    }  # fmt: skip
    found = {}
    for kind in model.layers:
        asked = ask(argparse.Namespace(**{**vars(options), **sizes, "mask": model.mask_of(kind)}))
        found[kind] = replace(asked, call=as_run(asked.call))
    return found


def _priced(engine: Engine, job: Job, asked: dict[str, Asked]) -> list[Priced]:
    found = []
    for each in engine.options(job):
        if each.reason is not None:
            found.append(Priced(each, None, each.reason))
            continue
        try:
            calls = {kind: with_heads(asked[kind].call, each.heads) for kind in asked}
            of_kinds = {kind: choice_seconds(calls[kind], each.schedule, each.merging) for kind in asked}
            found.append(Priced(each, sum(job.model.layers[kind] * of_kinds[kind] for kind in asked)))
        except ConfigurationError as error:
            found.append(Priced(each, None, f"can be taken, but is not priced: {' '.join(str(error).split())}"))
    return found


def _own(asked: dict[str, Asked], model: ModelFacts) -> tuple[str, float | None]:
    """Return what tokenring itself would do: schedules, and the time of all layers."""
    names, total = [], 0.0
    for kind, each in asked.items():
        plan = plan_or_forecast_kept(each.call, os.environ)
        best = plan.candidates[0]
        of = "" if len(asked) == 1 else f" ({'full' if kind == FULL_LAYER else kind.partition('_')[0]} layers)"
        names.append(f"{best.name}{of}")
        total += model.layers[kind] * (best.predicted_seconds or 0.0)
        if isinstance(plan, Forecast) and best.predicted_seconds is None:
            return ", ".join(names), None
    return ", ".join(names), total


def advice(engine: Engine, job: Job, priced: list[Priced], own: tuple[str, float | None]) -> list[str]:
    """Return the lines of the advice: the best flags, why, the others with their costs, and tokenring's own."""
    model = job.model
    layers = sum(model.layers.values())
    what = "forward and backward" if job.training else "forward"
    lines = [
        f"{model.name}: {model.heads} heads, {model.kv_heads} of kv, head dim {model.head_dim}, {layers} layers; "
        f"{job.length:,} tokens over {job.ranks} ranks; attention of all layers, {what}",
        f"flags of {engine.version}",
        "",
    ]
    fitting = [each for each in priced if each.seconds is not None]
    if fitting:
        best = fitting[0]
        lines += [f"take: {best.option.flags}", f"  {_why(best, fitting)}"]
    else:
        lines.append("take: nothing that it ships computes this model; the reasons are below")
    if (padding := engine.lengths(job)) is not None:
        lines.append(f"  {padding}")
    lines.append("")
    lines += [_row(each) for each in priced]
    name, seconds = own
    lines += ["", f"tokenring itself: {name}, {'no forecast' if seconds is None else time_text(seconds)}"]
    if model.softcap or model.sinks or model.window or model.chunk:
        lines.append("it computes windows, chunks and sinks with every schedule, soft-capping where the kernel does")
    return lines


def _why(best: Priced, fitting: list[Priced]) -> str:
    assert best.seconds is not None
    others = [each for each in fitting[1:] if each.seconds is not None]
    if not others:
        return f"{time_text(best.seconds)}: the only choice that computes this model"
    slower = (others[0].seconds or 0.0) / best.seconds - 1
    close = "; within the error of predictions, so measure both" if slower < 0.05 else ""
    return f"{time_text(best.seconds)}: the next, {others[0].option.flags}, takes {slower:.0%} longer{close}"


def _row(each: Priced) -> str:
    cost = "      no" if each.seconds is None else f"{time_text(each.seconds):>8}"
    heads = "" if each.option.heads is None else " of {} heads of q and {} of kv".format(*each.option.heads)
    after = each.reason if each.seconds is None else f"moves blocks as {each.option.schedule}{heads}"
    return f"  {cost}  {each.option.flags}: {after}"


def _parser() -> Parser:
    parser = Parser(
        prog="tokenring advise",
        description="Which flags for context parallelism to give another engine, for a model on a topology.",
        epilog=f"Models by name: {', '.join(KNOWN)}. Presets: {', '.join(PRESETS)} (docs/presets.md).",
    )
    add = parser.add_argument
    add("--engine", required=True, metavar="NAME", help=f"whose flags: {', '.join(ENGINES)}")
    add("--model", required=True, metavar="FILE", help="the model's config.json or its folder, or a name (below)")
    add("--topology", required=True, metavar="TOPOLOGY", help="as of `tokenring plan`: preset:NAME, a saved file, ...")
    add("--seq", default="128k", metavar="N", help=f"tokens of the whole sequence (128k), {SIZES_TEXT}")
    add("--batch", type=int, default=1, metavar="N", help="sequences (1)")
    add("--ranks", type=int, metavar="N", help="ranks in all (every accelerator)")
    add("--tp", type=int, default=1, metavar="N", help="neighbours that share the heads by tensor parallelism (1)")
    add_dtype(parser, "bf16")
    add_passes(parser, "--passes")
    add("--device", metavar="NAME", help="use this device's figures (docs/presets.md)")
    add("--tflops", type=float, metavar="N", help="use this rate of attention, whatever the device")
    add("--memory-limit", metavar="N", help="bytes a rank for what tokenring itself would need")
    add("--json", action="store_true", help="the advice as JSON (docs/advise.md)")
    return parser
