"""A published row in the planner's terms: its schedule, machine and passes, and what the planner says of it.

Nothing here is fitted. What a row's system does was read from its code; `EXCUSES` says which rows cannot be
expressed, docs/published-compared.md where our programs differ from the system's. (Used by published.py.)
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Any

import torch

from tokenring.cli.plan.options import first_ranks
from tokenring.ir.schedule_data import Pass
from tokenring.planner.choosing.auto import CallToPlan
from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.interconnects.wiring import interconnect_of
from tokenring.planner.machines.devices import DeviceFigures, device_figures
from tokenring.planner.machines.machine import device_rates, machine_of_preset
from tokenring.planner.machines.presets import find, preset
from tokenring.planner.simulation.predict import Setting, predict
from tokenring.planner.simulation.simulate import Outcome
from tokenring.schedule import routes
from tokenring.schedule.families.basic import GRADIENT_SLACK, at_key
from tokenring.schedule.families.registry import parse
from tokenring.schedule.routes import Hop, Origin
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import Scheme, build
from tokenring.sequence.layout import Layout, Positions, make_layout
from tokenring.sequence.mask import Causal, Documents, Full, Mask
from tokenring.sequence.region import Patch
from tokenring.sequence.workload import Workload
from tokenring.tables.rates import Machine, Rates

Row = dict[str, Any]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PASSES: dict[str, tuple[Pass, ...]] = {
    "forward": ("forward",), "backward": ("backward",), "forward+backward": ("forward", "backward")
}  # fmt: skip
FLOPS = {"forward": 4, "backward": 10}
PACKINGS = ((8192,), (256, 7648, 8192), (4096, 8192), (3104, 6304, 7904, 8064, 8192))  # ends, in eighths of a call
FA3 = "baselines in MagiAttention's benchmark"  # whose kernel is FlashAttention-3; all others call FlashAttention-2
EXCUSES = {
    "rfa-.*-varlen-zigzag-.*": "zigzag inside each document: chunks of several lengths, which a Layout does not have",
}


@dataclass(frozen=True)
class Predicted:
    """seconds: with the fixed figures. own_seconds: with the source's own rate of one device, where it gives one."""

    seconds: float
    own_seconds: float | None


def excuse(row: Row) -> str | None:
    """Why a row is not predicted."""
    return next((why for name, why in EXCUSES.items() if re.fullmatch(name, row["id"])), None)


def published_seconds(row: Row) -> float:
    """The time that was measured; of a rate, from the FLOPs as its page counts them."""
    if row["quantity"] == "seconds":
        return float(row["value"])
    pairs = row["seq_len"] ** 2 / (2 if row["mask"] == "causal" else 1)
    flops = sum(FLOPS[each] for each in PASSES[row["passes"]]) * pairs * row["q_heads"] * row["head_dim"]
    return float(row["batch"] * flops / row["world_size"] / (row["value"] * 1e12))


def predict_row(row: Row, given: dict[str, Any]) -> Predicted:
    """What the planner says. Raises ConfigurationError where the schedule does not fit."""
    net, machine = _where(row)
    own = own_rates(row, given, machine.rates)
    seconds = _seconds(row, net, machine)
    return Predicted(seconds, None if own is None else _seconds(row, net, replace(machine, rates=own)))


# ---------- the machine


@cache
def _net(name: str) -> Interconnect:
    return interconnect_of(preset(name))


def device_of(row: Row) -> DeviceFigures:
    """The accelerator, with the kernel that the system calls."""
    name = find(row["hardware"])[0].device
    older = name == "h100-sxm" and row["system"] != FA3
    return device_figures("h100-sxm-fa2" if older else name)


def _where(row: Row) -> tuple[Interconnect, Machine]:
    dtype = DTYPES[row["dtype"]]
    machine = machine_of_preset(row["hardware"], dtype)
    return _net(row["hardware"]), replace(machine, rates=device_rates(device_of(row), dtype))


def own_rates(row: Row, given: dict[str, Any], rates: Rates) -> Rates | None:
    """Ours, times what the source's own kernel alone reaches over ours in the same call; None if it gives nothing."""
    found = row["compute"]
    if found is None:
        return None
    passes = PASSES[row["passes"]]
    if (see := found.get("see")) is None:
        length = row["seq_len"] if "seconds" in found else 8192
        seconds = found["seconds"] if "seconds" in found else 1 / found["iter_per_second"]
        masks = [_packed(row, ends) for ends in PACKINGS] if "documents" in row["mask"] else [_mask(row)]
        ours = mean(_alone(row, rates, length, mask, passes) for mask in masks)
        return _scaled(rates, ours / seconds, ours / seconds)
    table = given[see]["compute"]
    match = re.search("ulysses(?:=([0-9]+))?", row["schedule"])
    heads = 1 if match is None else int(match[1] or row["world_size"])
    local = row["seq_len"] // row["world_size"] * heads
    factors = [_factor(row, rates, table, min(local, 32768), each) for each in ("forward", "backward")]
    return _scaled(rates, *factors)


def _factor(row: Row, rates: Rates, table: dict[str, Any], local: int, direction: str) -> float:
    """By the table's entry of the length that is nearest to the tile's; UltraAttn lists seconds, others TFLOP/s."""
    in_seconds = "order" in table
    entries = table[row["mask"]] if in_seconds else table[direction][row["mask"]]
    lengths = {name: int(name.removesuffix("k")) * (1024 if name.endswith("k") else 1) for name in entries}
    name = min(lengths, key=lambda each: abs(lengths[each] - local))
    ours = _alone(row, rates, lengths[name], _mask(row), (direction,))
    if in_seconds:
        return float(ours / entries[name][table["order"].index(direction)])
    pairs = lengths[name] ** 2 / (2 if row["mask"] == "causal" else 1)
    return float(ours * entries[name] * 1e12 / (FLOPS[direction] * pairs * row["q_heads"] * row["head_dim"]))


def _alone(row: Row, rates: Rates, length: int, mask: Mask, passes: tuple[Any, ...]) -> float:
    """One device's own time for a call of this length."""
    patches = mask.region(Positions(0, length), Positions(0, length))
    heads, dim, batch = row["q_heads"], row["head_dim"], row["batch"]
    return sum(rates.kernel_seconds(patch, heads, dim, batch, each) for patch in patches for each in passes)


def _scaled(rates: Rates, forward: float, backward: float) -> Rates:
    return replace(
        rates,
        forward=tuple((side, rate * forward) for side, rate in rates.forward),
        backward=tuple((side, rate * backward) for side, rate in rates.backward),
    )


# ---------- the call


def _mask(row: Row) -> Mask:
    return Full() if row["mask"] == "full" else Causal()


def _packed(row: Row, ends: tuple[int, ...], times: int = 1) -> Mask:
    return Causal() & Documents([0, *(end * times for end in ends)])


def _seconds(row: Row, net: Interconnect, machine: Machine) -> float:
    if "documents" in row["mask"]:
        masks = [_packed(row, ends, row["seq_len"] // 8192) for ends in PACKINGS]
        return mean(_call(row, net, machine, mask) for mask in masks)
    return _call(row, net, machine, _mask(row))


def _call(row: Row, net: Interconnect, machine: Machine, mask: Mask) -> float:
    size = _size(row)
    step = re.search(r"one step(?: \(([0-9 and]+)\))?", row["measured"])
    total = 0.0
    for direction in PASSES[row["passes"]]:
        setting = Setting(size, net, machine, (direction,), _any_patch)
        found = predict(schedule_of(row, direction, mask), setting, record=step is not None)
        total += found.seconds
        if step is not None:
            return step_seconds(found.outcomes[0], [int(each) for each in re.findall("[0-9]+", step[1] or "")])
    return total


def call_of(row: Row) -> CallToPlan:
    """The row's call as `tokenring plan` and `tokenring advise` have it, in the row's layout."""
    net, machine = _where(row)
    net = first_ranks(net, row["world_size"])
    setting = Setting(_size(row), net, machine, PASSES[row["passes"]], _any_patch)
    layout = layout_of(row)
    return CallToPlan(setting, layout, layout, _mask(row))


def _size(row: Row) -> Workload:
    return Workload(
        row["batch"], row["seq_len"], row["seq_len"], row["q_heads"], row["kv_heads"], row["head_dim"],
        DTYPES[row["dtype"]],
    )  # fmt: skip


def _any_patch(patch: Patch) -> str | None:
    """Each patch is one call, as flash kernels on GPUs take what occurs here: full, causal, and a stripe's diagonal."""
    return None


def step_seconds(outcome: Outcome, steps: list[int]) -> float:
    """The mean over ranks and steps, from the begin of one step's first kernel to that of the next; all steps if none
    is named.
    """
    begins: dict[int, dict[int, float]] = defaultdict(dict)
    for span in outcome.spans:
        if span.what == "kernel":
            begins[span.rank].setdefault(span.step, span.begin_seconds)
    last = max(max(of_rank) for of_rank in begins.values())
    return mean(
        of_rank[step + 1] - of_rank[step] for of_rank in begins.values() for step in steps or range(last)
    )  # fmt: skip


# ---------- the schedule


def schedule_of(row: Row, direction: Pass, mask: Mask) -> Schedule:
    """The row's schedule in this pass."""
    layout = layout_of(row)
    return build(scheme_of(row, direction), layout, layout, mask)


def scheme_of(row: Row, direction: Pass) -> Scheme:
    """Rings pass on to rank + 1; USP keeps what its exchange of Q gave."""
    said, world = row["schedule"], row["world_size"]
    if match := re.fullmatch(r"usp ulysses=([0-9]+) ring=[0-9]+", said):
        return replace(parse(f"usp/{match[1]}").make(world), keep=frozenset({"q"}))
    if match := re.fullmatch(r"ulysses=([0-9]+) x double ring of ([0-9]+)", said):
        return _loongtrain(world, int(match[1]), int(match[2]))
    if said.startswith("ring; backward circulates Q"):
        return parse("ring").make(world) if direction == "forward" else _burst_backward()
    if said == "all-gather-kv" and "*" in row["hardware"]:  # NCCL gathers across nodes once, over all NICs
        return replace(parse("relay/8").make(world), together=True)
    return parse(said).make(world)


def _loongtrain(world: int, heads: int, around: int) -> Scheme:
    """USP whose ring is a double one, of inner rings of 2 (what MagiAttention's script takes)."""
    inner = 2
    usp = parse(f"usp/{heads}").make(world)
    ring = parse(f"double-ring/{inner}").make(around)

    def gather_kv(origin: Origin) -> tuple[Hop, ...]:
        group = origin.owner // heads
        here = group * heads + origin.heads
        first = () if here == origin.owner else (Hop(0, origin.owner, here),)
        hops = ring.gather_kv(origin._replace(owner=group, world_size=around))
        moved = (Hop(hop.step + 1, hop.src * heads + origin.heads, hop.dst * heads + origin.heads) for hop in hops)
        return (*first, *moved)

    def due(group: int) -> dict[int, int]:
        return {hop.dst: hop.arrival for hop in ring.gather_kv(Origin(group, around))}

    arrivals = [due(group) for group in range(around)]
    return replace(
        usp,
        name="loongtrain",
        gather_kv=gather_kv if around > inner else usp.gather_kv,
        when=lambda pair, _: (
            1 + arrivals[pair.kv_owner // heads].get(pair.q_owner // heads, 0)
            if around > inner
            else 1 + (pair.q_owner // heads - pair.kv_owner // heads) % around
        ),
    )


def _burst_backward() -> Scheme:
    """KV stays; Q, dO and the statistics go round, dQ follows them."""
    gather = routes.ring(1)
    return Scheme("burst", at_key, gather_q=gather, return_q=routes.follow(gather), slack=GRADIENT_SLACK)


def layout_of(row: Row) -> Layout:
    """Where a system does not care: contiguous. Stripes of USP are those of its ring's ranks."""
    name = "contiguous" if row["layout"] == "any" else row["layout"]
    world, length = row["world_size"], row["seq_len"]
    match = re.fullmatch(r"usp ulysses=([0-9]+) ring=([0-9]+)", row["schedule"])
    if name == "striped" and match:
        return _striped_groups(world, length, int(match[1]), int(match[2]))
    return make_layout(name, world, length)


def _striped_groups(world: int, length: int, heads: int, ring: int) -> Layout:
    """Ring rank r has positions r, r + ring, ...; the ranks of its Ulysses group have runs of these."""

    def chunks() -> Iterator[tuple[Positions, int]]:
        run = length // world * ring
        for place in range(heads):
            for rank in range(ring):
                start = place * run + rank
                yield Positions(start, start + run - ring + 1, ring), rank * heads + place

    found = sorted(chunks())
    return Layout("striped groups", world, length, tuple(each for each, _ in found), tuple(at for _, at in found))
