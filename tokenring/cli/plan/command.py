"""`tokenring plan`: the fastest schedule for a workload on a topology, the time that it takes, and why.

Exit codes: 0 a plan; 2 a wrong option, a file that cannot be read, or nothing that fits.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from tokenring.cli.models import ALSO, KNOWN, sizes_of
from tokenring.cli.plan.cached import ONE_TOKEN, UNUSED, cached_call, cached_json, cached_report, check_tokens
from tokenring.cli.plan.layouts import planned_in_layouts
from tokenring.cli.plan.mask_picture import mask_svg
from tokenring.cli.plan.options import Asked, ask
from tokenring.cli.plan.report import explained, heading, table, with_baseline
from tokenring.cli.plan.sweep import sweep, sweep_svg, sweep_table
from tokenring.cli.spelling import SIZES_TEXT, add_heads, add_mask, add_passes
from tokenring.cli.trace.predicted import drawn, timeline
from tokenring.display.console import Console, Parser, check_suffix, read_options, write_file
from tokenring.errors import ConfigurationError
from tokenring.gc_pause import no_collection
from tokenring.planner.choosing.auto import CallToPlan, call_bound, make, with_simulated
from tokenring.planner.choosing.candidates import SHOWN
from tokenring.planner.choosing.checks import check_made
from tokenring.planner.choosing.kept_plans import plan_or_forecast_kept
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.machines.presets import PRESETS
from tokenring.planner.simulation.predict import predict
from tokenring.sequence.layout import AUTO
from tokenring.sequence.sizes import read_size
from tokenring.tables.kept_files import OFF, PLAN_CACHE

SUFFIXES = {"save": (".json",), "timeline": (".svg", ".json"), "svg": (".svg",), "mask-svg": (".svg",)}


def main(argv: list[str]) -> int:
    """Plan, and print and write what the options ask for; return the exit code. Raises ConfigurationError."""
    parser = options_parser()
    options = read_options(parser.parse_args, argv)
    if isinstance(options, int):
        return options
    if options.model is not None:  # its sizes are the defaults
        parser.set_defaults(**sizes_of(options.model))
        options = parser.parse_args(argv)
    for name, known in SUFFIXES.items():
        check_suffix(f"--{name}", getattr(options, name.replace("-", "_")), *known)
    console = Console(sys.stdout, sys.stderr, os.environ)
    if options.layer is not None:
        return _layer(options, given_options(parser, argv), console)
    if options.cp is not None:
        raise ConfigurationError("--cp goes with --layer; of attention alone say --ranks, and --tp of them share heads")
    if options.operator is not None:
        return _operator(options, given_options(parser, argv), console)
    for name in ("features", "width", "bytes"):
        if getattr(options, name) is not None:
            raise ConfigurationError(f"--{name} is a size of --operator NAME, and attention has none")
    if options.wire is not None:
        raise ConfigurationError("--wire goes with --operator NAME: for attention say --max-error")
    check_tokens(options)
    if options.cached is not None:
        given = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(UNUSED)))
        return _cached(options, given, console)
    if options.latents:
        raise ConfigurationError("--latents says what a cache holds: it goes with --cached N")
    if options.max_error is not None:
        _check_max_error(options)
    if options.sweep is not None:
        return _sweep(options, console)
    if options.svg is not None:
        raise ConfigurationError("--svg draws a --sweep or --layer; for one plan say --timeline or --mask-svg FILE.svg")
    with no_collection():
        asked = ask(options)
    for name in ("explain", "timeline"):
        if getattr(options, name) is not None:
            check_made(asked.call.setting.interconnect, f"--{name}")
    if options.explain is not None:
        return _explain(options, asked, console)
    console.status(f"planning for {asked.call.setting.interconnect.world_size} ranks")  # for many it takes a while
    environment = {PLAN_CACHE: OFF} if options.no_cache else os.environ
    others = ""
    if options.layout == AUTO:
        asked, found, others = planned_in_layouts(asked, environment)
    else:
        found = plan_or_forecast_kept(asked.call, environment)
    if options.max_error is not None:
        from tokenring.planner.formats.error_budget import OF_MANY_RANKS, within_error

        if isinstance(found, Plan):
            found = within_error(found, asked.call, options.max_error)
        else:
            found = replace(found, reason=f"{found.reason}; {OF_MANY_RANKS}")
    plan = found
    if options.json:
        console.clear()
        print(plan.to_json(), end="")
    else:
        call = asked.call.in_mode(plan.transport)
        if isinstance(plan, Plan) and not plan.schedule.formats:
            simulated = with_simulated(call, plan, SHOWN)
            plan = simulated if options.max_error is None else replace(simulated, reason=plan.reason)
        candidates = with_baseline(plan, call)
        console.clear()
        console.say(table(plan, asked, candidates, options.all))
        if others:
            console.say(others)
    if options.save is not None:
        write_file(options.save, found.to_json())
    if options.mask_svg is not None:
        _draw_mask(options.mask_svg, asked)
    if options.timeline is not None:
        _timeline(options.timeline, plan.candidates[0].name, asked.call.in_mode(plan.transport))
    return 0


def _check_max_error(options: argparse.Namespace) -> None:
    """Raise ConfigurationError unless it is a number above 0, of one plan whose schedule is chosen."""
    if not 0 < options.max_error < math.inf:
        raise ConfigurationError(f"--max-error {options.max_error:g}: give a number above 0, as 0.05")
    for name in ("explain", "timeline", "sweep"):
        if getattr(options, name) is not None:
            raise ConfigurationError(f"--{name} shows schedules without wire formats: leave out --max-error")


def _cached(options: argparse.Namespace, given: argparse.Namespace, console: Console) -> int:
    """Print how new tokens attend to a cache."""
    call = cached_call(options, given)
    if options.json:
        console.data(cached_json(call))
    else:
        console.say(cached_report(call))
    return 0


def _operator(options: argparse.Namespace, given: argparse.Namespace, console: Console) -> int:
    """Print the schedules of a linear layer or a collective."""
    from tokenring.cli.plan.operators import operator_call, operator_json, operator_report, planned

    with no_collection():
        call = operator_call(options, given)
        console.status(f"planning for {call.setting.interconnect.world_size} ranks")
        found = planned(call)
    console.clear()
    if options.json:
        console.data(operator_json(call, found))
    else:
        console.say(operator_report(call, found))
    return 0


def _layer(options: argparse.Namespace, given: argparse.Namespace, console: Console) -> int:
    """Print, and draw if asked, the operators of a transformer layer."""
    from tokenring.cli.plan.layer import planned_layer
    from tokenring.cli.plan.layer_picture import layer_svg
    from tokenring.cli.plan.layer_report import layer_json, layer_report

    console.status("planning the operators of a layer")
    with no_collection():
        found = planned_layer(options, given, {PLAN_CACHE: OFF} if options.no_cache else os.environ)
    console.clear()
    if options.json:
        console.data(layer_json(found))
    else:
        console.say(layer_report(found))
    if options.svg is not None:
        write_file(options.svg, layer_svg(found))
    return 0


def _explain(options: argparse.Namespace, asked: Asked, console: Console) -> int:
    """Print one schedule alone: what it costs, and where the time goes."""
    schedule = make(asked.call, options.explain)
    prediction = predict(schedule, asked.call.setting, record=True)
    console.say(explained(options.explain, schedule, prediction, asked, call_bound(asked.call)))
    if options.timeline is not None:
        _timeline(options.timeline, options.explain, asked.call)
    return 0


def _draw_mask(path: str, asked: Asked) -> None:
    title, *about = heading(asked).splitlines()
    write_file(path, mask_svg(asked.call.mask, asked.call.q_layout, asked.call.kv_layout, title, about))


def _timeline(path: str, name: str, call: CallToPlan) -> None:
    prediction = predict(make(call, name), call.setting, record=True)
    write_file(path, drawn(path, timeline(name, call.setting, prediction)))


def _sweep(options: argparse.Namespace, console: Console) -> int:
    """Print, and draw if asked, which schedule wins at which length. Raises ConfigurationError for a wrong range."""
    single = ("json", "save", "timeline", "explain", "mask-svg")
    stray = [name for name in single if getattr(options, name.replace("-", "_")) not in (None, False)]
    if stray:
        raise ConfigurationError(f"--{stray[0]} is for one plan, and --sweep makes one for every length: leave one out")
    what, _, ends = options.sweep.partition("=")
    first, dots, last = ends.partition("..")
    if what != "seq" or not dots:
        raise ConfigurationError(
            f"--sweep {options.sweep}: write seq=8k..1M, every power of two from the one to the other"
        )
    points, skipped = sweep(options, read_size("--sweep", first), read_size("--sweep", last), console.status)
    console.say(sweep_table(points, skipped))
    if options.svg is not None:
        write_file(options.svg, sweep_svg(points, options))
    return 0


def given_options(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the options without their defaults: None where one was not given."""
    return parser.parse_args(argv, argparse.Namespace(**{action.dest: None for action in parser._actions}))


def options_parser() -> Parser:
    """Return the parser of this command's options."""
    parser = Parser(
        prog="tokenring plan",
        description="Which schedule of attention, of a linear layer, or of both in a layer, is fastest on a topology.",
        epilog=f"Presets: {', '.join(PRESETS)} (docs/presets.md). Models by name: {', '.join([*KNOWN, *ALSO])}. "
        "docs/planner.md describes how times are predicted.",
    )
    add = parser.add_argument
    add("--topology", metavar="TOPOLOGY", required=True,
        help="preset:NAME, preset:NAME*4 (four over their NICs), a saved topology, a dump, or `measured`")  # fmt: skip
    add("--seq", metavar="N", help=f"tokens of the whole sequence (128k; of --operator 8k), {SIZES_TEXT}")
    add("--operator", metavar="NAME",
        help="plan column, row, all-reduce, reduce-scatter or all-gather, not attention (docs/layer.md)")  # fmt: skip
    add("--layer", metavar="MODEL", help="plan all operators of one layer, of a config.json or a name (docs/layer.md)")
    add("--features", metavar="N", help="of column and row: output features of all ranks (28k)")
    add("--width", metavar="N", help="of column and row: elements of a token (8k)")
    add("--wire", metavar="FORMAT", help="of an operator: a format of what travels, as mxfp8 (docs/layer.md)")
    add("--bytes", metavar="N", help="of a collective: the whole tensor (16M)")
    add("--cached", metavar="N", help="plan inference: new tokens over a KV cache of so many (docs/inference.md)")
    add("--decode", action="store_true", help="plan a decode step: one new token over --cached")
    add("--tokens", default=ONE_TOKEN, metavar="N", help="new tokens over --cached (1: decode)")
    add("--latents", action="store_true",
        help="--cached is of latents, --dim wide: --value-dim of them are values (DeepSeek: 576 and 512)")  # fmt: skip
    add("--model", metavar="FILE", help="take heads, dimensions and mask of a config.json, or of a name (below)")
    add_heads(parser, 32, 128, "bf16")
    add_mask(parser, "causal")
    add("--layout", metavar="NAME", help="auto, contiguous, zigzag, striped, or finer: zigzag/2 (zigzag if causal)")
    add_passes(parser)
    add("--ranks", type=int, metavar="N", help="ranks in all (every accelerator); of a preset also a multiple")
    add("--tp", type=int, default=1, metavar="N", help="neighbours that share the heads by tensor parallelism (1)")
    add("--cp", type=int, metavar="N", help="of --layer: ranks that share the sequence (1); in all there are tp × cp")
    add("--schedules", metavar="NAMES", help="only these families or schedules, separated by commas")
    add("--memory-limit", metavar="N",
        help="bytes a rank for buffers, communicators and what forward keeps, such as 8G")  # fmt: skip
    add("--max-error", type=float, metavar="E",
        help="of attention: take a wire format that adds no larger an error, where one is faster")  # fmt: skip
    add("--device", metavar="NAME", help="use this device's figures (docs/presets.md)")
    add("--tflops", type=float, metavar="N", help="use this rate of attention, whatever the device")
    add("--rates", metavar="FILE", help="use a table that `tokenring rates` made")
    add("--transport", metavar="NAME",
        help="whose queues and communicators count: hccl, hccl/channel, ... (hccl on Ascend)")  # fmt: skip
    add("--all", action="store_true", help="simulate and show also what cannot win")
    add("--no-cache", action="store_true", help="plan anew: read and write no kept plan (docs/planner.md)")
    add("--json", action="store_true", help="the plan as JSON: of a sequence, for schedule=Plan.load(...)")
    add("--save", metavar="FILE", help="write the plan's JSON to a file")
    add("--explain", metavar="SCHEDULE", help="one schedule: where its time goes")
    add("--timeline", metavar="FILE", help="draw the simulation: .svg, or .json for Perfetto")
    add("--mask-svg", metavar="FILE", help="draw the mask: which rank owns and computes what, and how evenly")
    add("--sweep", metavar="seq=A..B", help="which schedule wins at every power of two from A to B")
    add("--svg", metavar="FILE", help="of the sweep, or of --layer: draw it")
    return parser
