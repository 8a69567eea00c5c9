"""The options of `tokenring plan`, as a call to plan for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tokenring.api.arguments import check_name
from tokenring.cli.spelling import check_counts
from tokenring.errors import ConfigurationError, TokenRingError
from tokenring.ir.schedule_data import Pass
from tokenring.lowering.backend_names import TRANSPORTS, bounded, kernel_class, transport_target
from tokenring.lowering.calls import anything
from tokenring.lowering.target import IDEAL
from tokenring.planner.choosing.auto import CallToPlan
from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.interconnects.rank_order import context_parallel_group, heads_of_group
from tokenring.planner.interconnects.wiring import interconnect_of
from tokenring.planner.layouts.balanced import layout_of
from tokenring.planner.machines.machine import machine_of_device, machine_of_preset, machine_of_topology, messages_of
from tokenring.planner.machines.presets import PREFIX, find, preset
from tokenring.planner.simulation.predict import Setting
from tokenring.sequence.mask import parse_mask
from tokenring.sequence.sizes import read_size
from tokenring.sequence.workload import Workload
from tokenring.tables.kernel_rates import read_table
from tokenring.tables.rates import Machine, Rates, constant

WHOLE = "128k"  # tokens of the sequence, where none are given
MOST_HEADS = 1 << 16
MOST_TFLOPS = 1e6  # of one device; none has a hundredth of it
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PASSES: dict[str, tuple[Pass, ...]] = {"forward": ("forward",), "training": ("forward", "backward")}


@dataclass(frozen=True)
class Asked:
    """A call to plan for, with the names and sizes that it was derived from."""

    call: CallToPlan
    topology: str
    tensor_parallel: int


def ask(options: argparse.Namespace) -> Asked:
    """Return the options as a call. Raises ConfigurationError for what cannot be planned."""
    dtype = DTYPES[options.dtype]
    name, notes = several_hosts(options.topology, options.ranks)
    net, machine = where(name, dtype, options)
    net = replace(net, notes=(*notes, *net.notes))
    transport = _transport(options.transport, machine)
    target = IDEAL if transport is None else transport_target(transport)
    net = context_parallel_group(first_ranks(net, options.ranks), options.tp)
    length = read_size("--seq", WHOLE if options.seq is None else options.seq)
    check_counts(options)
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    if options.heads > MOST_HEADS:
        raise ConfigurationError(f"--heads {options.heads}: give {MOST_HEADS} at most; each way to split them is tried")
    sizes = options.batch, length, length, options.heads, kv_heads, options.dim, dtype
    whole = Workload(*sizes, options.value_dim)
    mask = parse_mask(options.mask)
    mask.check_length(length)
    named = options.layout or ("zigzag" if "causal" in str(mask) else "contiguous")
    layout = layout_of(named, net.world_size, length, mask, net.port_links)
    heads, passes = heads_of_group(whole, options.tp), PASSES[options.passes]
    supports = anything if machine.kernel is None else kernel_class(machine.kernel).supports_patch
    setting = Setting(heads, net, machine.over(target), passes, supports, target)
    limit = None if options.memory_limit is None else read_size("--memory-limit", options.memory_limit)
    families = tuple(options.schedules.split(",")) if options.schedules else ()
    modes = {} if options.transport not in (None, "auto") or transport is None else bounded(transport)
    call = CallToPlan(
        setting, layout, layout, mask, families, limit, options.all, modes, wants_lse="backward" in passes
    )  # fmt: skip
    return Asked(call, name, options.tp)


def _transport(asked: str | None, machine: Machine) -> str | None:
    """Return the transport that was asked for, else the one of such devices; None: none is known for them."""
    if asked is not None:
        check_name("transport", asked, TRANSPORTS, "")
    own = machine.transport
    if asked in (None, "auto"):
        return own
    if own is not None and asked.partition("/")[0] != own:
        fitting = ", ".join(name for name in TRANSPORTS if name.partition("/")[0] == own)
        raise ConfigurationError(f"transport {asked!r} does not move tensors between these devices; use {fitting}")
    return asked


def several_hosts(name: str, ranks: int | None) -> tuple[str, tuple[str, ...]]:
    """Return the topology that a name means with so many ranks, and a note where that says more than the name.

    For one machine's preset, a multiple of its ranks means so many of these machines over their NICs.
    """
    if not name.startswith(PREFIX) or "*" in name or ranks is None:
        return name, ()
    found, _ = find(name)
    hosts, rest = divmod(ranks, found.server.count)
    if rest or hosts < 2:
        return name, ()
    note = f"{ranks} ranks are {hosts} of {found.name} over their NICs"
    return f"{PREFIX}{found.name}*{hosts}", (note,)


def where(name: str, dtype: torch.dtype, options: argparse.Namespace) -> tuple[Interconnect, Machine]:
    """Return the interconnect of a topology by its name, and the machine with which its ranks compute."""
    if name.startswith(PREFIX):
        net = replace(interconnect_of(preset(name)), name=name.removeprefix(PREFIX))
        return net, _machine(options, dtype, lambda: machine_of_preset(name, dtype))
    from tokenring.planner.machines.topology_file import read_topology

    topology = read_topology(name)
    return interconnect_of(topology), _machine(options, dtype, lambda: machine_of_topology(topology, dtype))


def _machine(options: argparse.Namespace, dtype: torch.dtype, known: Callable[[], Machine]) -> Machine:
    """Return the machine that options ask for; else the topology's. Raises ConfigurationError if they conflict."""
    asked = [name for name in ("tflops", "device", "rates") if getattr(options, name) is not None]
    if len(asked) > 1:
        raise ConfigurationError(f"--{asked[0]} and --{asked[1]} both say how fast kernels are: leave one out")
    if options.tflops is not None:
        if not 1 / MOST_TFLOPS <= options.tflops <= MOST_TFLOPS:
            span = f"from {1 / MOST_TFLOPS:g} to {MOST_TFLOPS:g}"
            raise ConfigurationError(f"--tflops {options.tflops}: give a rate above 0, {span}")
        return _with_rates(known, constant(options.tflops, f"{options.tflops:g} TFLOP/s, as given"))
    if options.device is not None:
        return machine_of_device(options.device, dtype)
    return known() if options.rates is None else _with_rates(known, _table(options))


def _with_rates(known: Callable[[], Machine], rates: Rates) -> Machine:
    """Return the topology's machine, with these rates of kernels."""
    try:
        return replace(known(), rates=rates)
    except TokenRingError:  # nothing is known of these accelerators, and nothing but a message's cost is needed
        return Machine(rates, messages_of(None))


def _table(options: argparse.Namespace) -> Rates:
    """Return the rates of --rates FILE. Raises ConfigurationError if they are of another dtype or head dim."""
    key, rates = read_table(Path(options.rates))
    value_dim = None if options.value_dim == options.dim else options.value_dim
    wanted = str(DTYPES[options.dtype]).removeprefix("torch."), options.dim, value_dim
    if (key.dtype, key.head_dim, key.value_dim) != wanted:
        of_values, more = ("", "") if value_dim is None else (f" ({value_dim} of values)", f" --value-dim {value_dim}")
        raise ConfigurationError(
            f"--rates {options.rates} is of {key}; the plan is for {options.dtype} and head dim {options.dim}"
            f"{of_values}: measure these with `tokenring rates --dtype {options.dtype} --dim {options.dim}{more}`"
        )
    return rates


def first_ranks(net: Interconnect, ranks: int | None) -> Interconnect:
    """Return the interconnect of the first so many ranks. Raises ConfigurationError if it has fewer."""
    if ranks is None or ranks == net.world_size:
        return net
    if not 1 <= ranks <= net.world_size:
        raise ConfigurationError(
            f"--ranks {ranks}: {net.name} has {net.world_size}; for more, name several hosts, as preset:NAME*4, or "
            f"ask for a multiple of what preset:NAME has"
        )
    places = net.places[:ranks]
    return Interconnect(f"{net.name}, {ranks} ranks", net.fabrics[: places[-1][0] + 1], places, net.notes)
