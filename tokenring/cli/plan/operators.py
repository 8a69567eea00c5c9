"""`tokenring plan --operator NAME`: the schedules of a linear layer or a collective, ranked by predicted time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isqrt

from tokenring.cli.operator_names import COLLECTIVES, operator_name
from tokenring.cli.plan.options import DTYPES, PASSES, first_ranks, several_hosts, where
from tokenring.display.units import mb_text, time_text
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.ir.wire_formats import (
    ENCODED,
    added_error,
    check_smaller,
    check_width,
    codecs_of,
    collected,
    encodings,
    padded,
    wire_report,
)  # fmt: skip
from tokenring.planner.choosing.linear import (
    CANDIDATES,
    FEW_RANKS,
    MOST_PIECES,
    RankedSchedule,
    ranked,
    unfused_seconds,
)
from tokenring.planner.simulation.predict import Setting
from tokenring.schedule.families.registry import is_known, parse
from tokenring.sequence.sizes import read_size
from tokenring.sequence.workload import Workload
from tokenring.tables.rates import Machine

SEQ, FEATURES, WIDTH, BYTES = "8k", "28k", "8k", "16M"
OF_ATTENTION = {  # options that say nothing of a linear layer, by their names in the parser
    "heads", "kv_heads", "dim", "value_dim", "batch", "mask", "layout", "tp", "cached", "decode", "tokens", "latents",
    "model", "sweep", "svg", "mask_svg", "explain", "timeline", "save", "memory_limit", "max_error", "transport", "all",
    "no_cache",
}  # fmt: skip
OF_LAYERS, OF_COLLECTIVES = {"seq", "features", "width", "passes"}, {"bytes"}
MOST_RANKS = 64  # above, nothing is simulated
STAYS = {"Q": "weights", "KV": "tokens"}
FORMAT, VERSION = "tokenring-operator-plan", 1
UNFUSED = {"tokenring": "unfused, over a ring", "direct-q": "unfused, direct"}


@dataclass(frozen=True)
class OperatorCall:
    """A layer or collective to plan for.

    kind: the schedules' operator. nbytes: of a collective's whole tensor. wire: the format of what travels.
    """

    operator: str
    kind: str
    setting: Setting
    names: tuple[str, ...]
    nbytes: int | None = None
    wire: str | None = None


def check_given(name: str, given: argparse.Namespace) -> None:
    """Raise ConfigurationError for options of attention, or of the other kind of operator.

    given: the options without their defaults.
    """
    stray = OF_ATTENTION | (OF_LAYERS if name in COLLECTIVES else OF_COLLECTIVES)
    sizes = "--bytes" if name in COLLECTIVES else "--seq, --features, --width"
    refuse_given(given, sorted(stray), f"--operator {name}, whose sizes are {sizes}")


def refuse_given(given: argparse.Namespace, names: Iterable[str], what: str) -> None:
    """Raise ConfigurationError for the first of these options that is among those given: it does not go with what."""
    for each in names:
        if getattr(given, each, None) not in (None, False):
            spelled = "pass" if each == "passes" else each.replace("_", "-")
            raise ConfigurationError(f"--{spelled} does not go with {what}")


def at_rates_of_products(machine: Machine) -> Machine:
    """Return the machine as linear layers find it: both passes are plain products.

    The rate of attention's forward is the nearest to theirs that is known.
    """
    return replace(machine, rates=replace(machine.rates, backward=machine.rates.forward))


def operator_call(options: argparse.Namespace, given: argparse.Namespace) -> OperatorCall:
    """Return the options as a call. Raises ConfigurationError for what cannot be planned."""
    name = operator_name(options.operator)
    check_given(name, given)
    dtype = DTYPES[options.dtype]
    if options.dtype == "fp16":
        raise UnsupportedError(f"--dtype fp16: --operator {name} takes fp32 and bf16")
    topology, notes = several_hosts(options.topology, options.ranks)
    net, machine = where(topology, dtype, options)
    net = first_ranks(replace(net, notes=(*notes, *net.notes)), options.ranks)
    machine = at_rates_of_products(machine)
    ranks, nbytes = net.world_size, None
    if ranks > MOST_RANKS:
        raise ConfigurationError(
            f"--operator {name} over {ranks} ranks: {MOST_RANKS} at most are simulated; say --ranks N of one group"
        )
    if options.wire is not None:
        check_smaller(options.wire, dtype)
    if name in COLLECTIVES:
        nbytes = read_size("--bytes", options.bytes or BYTES)
        rows = ranks * MOST_PIECES
        width = -(-nbytes // (dtype.itemsize * rows))
        width = width if options.wire is None else padded(options.wire, width)
        kind, passes, size = "reduce", COLLECTIVES[name], Workload(1, rows, ranks, 1, 1, width, dtype)
        names: Sequence[str] = (*CANDIDATES["weights"], *_grids(ranks, "mesh-q"))
    else:
        tokens, features, width = (
            read_size(f"--{each}", getattr(options, each) or default)
            for each, default in (("seq", SEQ), ("features", FEATURES), ("width", WIDTH))
        )
        for each, count in (("seq", tokens), ("features", features)):
            if count % ranks:
                raise ConfigurationError(f"--{each} {count}: {ranks} ranks do not divide it")
        if options.wire is not None:
            check_width(options.wire, width)
        kind, passes, size = name, PASSES[options.passes], Workload(1, tokens, features, 1, 1, width, dtype)
        names = (*CANDIDATES["weights"], *CANDIDATES["tokens"], *_grids(ranks, "tiles"))
    if ranks > FEW_RANKS:
        names = [each for each in names if "/pieces" not in each]
        net = replace(net, notes=(*net.notes, f"above {FEW_RANKS} ranks schedules in pieces are left out: name them"))
    if options.schedules:
        names = _asked(options.schedules, kind)
    return OperatorCall(name, kind, Setting(size, net, machine, passes), tuple(names), nbytes, options.wire)


def _grids(ranks: int, family: str) -> list[str]:
    """Return tiles/AxB, or mesh-q/AxB, of all ways to lay out the ranks in two dimensions."""
    sides = [each for each in range(2, isqrt(ranks) + 1) if ranks % each == 0]
    return [f"{family}/{each}x{ranks // each}" for each in sides] + [
        f"{family}/{ranks // each}x{each}" for each in reversed(sides) if each * each != ranks
    ]


def _asked(text: str, kind: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if not is_known(name):
            raise ConfigurationError(f"--schedules {text}: {name!r} is not the name of a schedule (docs/layer.md)")
        if kind == "reduce" and parse(name).family.moves != "Q":
            raise ConfigurationError(f"--schedules {text}: rows of a collective move, and those of {name!r} do not")
    return names


def planned(call: OperatorCall) -> list[RankedSchedule]:
    """Return the schedules, the fastest first. Raises ConfigurationError where none fits."""
    codecs = codecs_of(call.wire, call.setting.workload.dtype, ENCODED)
    return ranked(call.kind, call.setting, call.names, codecs)


def unfused(call: OperatorCall, found: Sequence[RankedSchedule]) -> dict[str, float]:
    """Return the seconds of a layer whose collectives and products follow one another, by name; none of collectives."""
    if call.kind == "reduce":
        return {}
    computing = min(each.prediction.compute_seconds for each in found)
    return {text: unfused_seconds(call.kind, call.setting, by, computing) for by, text in UNFUSED.items()}


def stays(name: str) -> str:
    """Return what stays under a schedule: weights, tokens or neither."""
    return STAYS.get(parse(name).family.moves, "neither")


def operator_json(call: OperatorCall, found: Sequence[RankedSchedule]) -> str:
    """Return the schedules as JSON, the fastest first."""
    size, setting = call.setting.workload, call.setting
    sizes = {"bytes": call.nbytes} if call.nbytes else {
        "tokens": size.q_length, "features": size.kv_length, "width": size.head_dim,
    }  # fmt: skip
    data = {
        "format": FORMAT, "version": VERSION, "operator": call.operator, "interconnect": setting.interconnect.name,
        "ranks": setting.interconnect.world_size, **sizes, "dtype": str(size.dtype).removeprefix("torch."),
        **({} if call.wire is None else {"wire": call.wire}),
        "passes": list(setting.passes), "rates": setting.machine.source,
        "schedules": [
            {
                "name": each.name, "stays": stays(each.name), "seconds": each.prediction.seconds,
                "compute_seconds": each.prediction.compute_seconds, "exposed_seconds": each.prediction.exposed_seconds,
                "busiest_wire": each.prediction.wires.worst, "busiest_wire_bytes": each.prediction.wires.worst_bytes,
                "peak_bytes": each.prediction.peak_bytes,
                **({} if call.wire is None else {"added_error": _errors(call, each)}),
            }
            for each in found
        ],
        "unfused_seconds": unfused(call, found),
    }  # fmt: skip
    return json.dumps(data, indent=1) + "\n"


def operator_report(call: OperatorCall, found: Sequence[RankedSchedule]) -> str:
    """Return the schedules as a table, the fastest first, and what the layer takes unfused."""
    setting = call.setting
    net, apart = setting.interconnect, unfused(call, found)
    rows: list[tuple[str, ...]] = [("schedule", "stays", "predicted", "products", "exposed", "busiest wire", "memory")]
    for each in found:
        cost = each.prediction
        rows.append((
            each.name, stays(each.name), *map(time_text, (cost.seconds, cost.compute_seconds, cost.exposed_seconds)),
            f"{mb_text(cost.wires.worst_bytes)} {cost.wires.worst}", mb_text(cost.peak_bytes),
        ))  # fmt: skip
    computing = min(each.prediction.compute_seconds for each in found)
    for text, seconds in apart.items():
        rows.append((text, "weights", *map(time_text, (seconds, computing, seconds - computing)), "", ""))
    if call.kind == "reduce":
        rows = [(row[0], *row[2:3], *row[5:]) for row in rows]
    best = found[0]
    lines = [
        f"{call.operator}: {_sizes(call)}",
        f"on {net.name}: {net.world_size} ranks; {setting.machine.source}",
        _why(call, found, apart),
        "",
        *aligned(rows, 2 if len(rows[0]) > 4 else 1),
        "",
    ]
    lines += _by_what_stays(found)
    lines += wire_report(best.schedule, setting.passes)
    if best.schedule.formats:
        lines.append("encoding and decoding are predicted as one pass over memory each, which is the least they take")
    wire = "" if call.wire is None else f', wire="{call.wire}"'
    program = f'tr.TensorParallel(schedule="{best.name}"{wire})'
    lines.append(f"in a program: {program}; all times are predicted, none is measured")
    if call.nbytes is None:
        lines.append("products are taken to run at the rate of attention's forward kernels")
    return "\n".join([*lines, *net.notes])


def _errors(call: OperatorCall, each: RankedSchedule) -> dict[str, float]:
    """Return the relative error that wire formats add to each result, by its name."""
    if call.kind == "reduce":
        return {"out": added_error(collected(each.schedule, call.setting.passes))}
    return {
        result: added_error(forms)
        for direction in call.setting.passes
        for result, forms in encodings(each.schedule, direction).items()
    }


def _sizes(call: OperatorCall) -> str:
    size = call.setting.workload
    dtype = str(size.dtype).removeprefix("torch.")
    if call.nbytes is not None:
        return f"a tensor of {mb_text(call.nbytes)}, {dtype}"
    sizes = f"{size.q_length:,} tokens × {size.kv_length:,} features of width {size.head_dim:,}"
    return f"{sizes}, {dtype}, {' + '.join(call.setting.passes)}"


def _by_what_stays(found: Sequence[RankedSchedule]) -> list[str]:
    """Return a line with the fastest schedule for each of weights, tokens and neither, if there are several kinds."""
    firsts: dict[str, str] = {}
    for each in found:
        firsts.setdefault(stays(each.name), each.name)
    said = (f"{name} where {kind} {'stays' if kind == 'neither' else 'stay'}" for kind, name in firsts.items())
    return [f"the fastest: {', '.join(said)}"] if len(firsts) > 1 else []


def _why(call: OperatorCall, found: Sequence[RankedSchedule], apart: dict[str, float]) -> str:
    best = found[0]
    text = f"{best.name}: {time_text(best.prediction.seconds)}"
    others = [f"{seconds / best.prediction.seconds:.2f} × as fast as {name}" for name, seconds in apart.items()]
    ring = next((each for each in found if each.name == "tokenring"), None)
    if call.kind == "reduce" and ring is not None and ring is not best:
        others = [f"{ring.prediction.seconds / best.prediction.seconds:.2f} × as fast as a ring"]
    return ", ".join([text, *others])


def aligned(rows: Sequence[Sequence[str]], texts: int) -> list[str]:
    """Return rows as lines with cells below each other: as many columns of text, then numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) if at < texts else cell.rjust(width)
                  for at, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip
