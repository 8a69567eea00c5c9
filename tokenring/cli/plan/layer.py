"""`tokenring plan --layer MODEL`: the options as a transformer layer to plan for, and its plan."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tokenring.cli.models import FULL_LAYER, ModelFacts, read_model
from tokenring.cli.plan.layouts import planned_in_layouts
from tokenring.cli.plan.operators import MOST_RANKS, at_rates_of_products, refuse_given
from tokenring.cli.plan.options import DTYPES, Asked, ask, first_ranks, several_hosts, where
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.planner.choosing.auto import call_bound
from tokenring.planner.choosing.kept_plans import plan_or_forecast_kept
from tokenring.planner.choosing.plan import Forecast
from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.interconnects.rank_order import narrowest_group
from tokenring.planner.layers.layer import DOWN, OUT, QKV, UP, LayerCall, LayerPlan, LinearLayers, plan_layer
from tokenring.sequence.layout import AUTO
from tokenring.tables.rates import Machine

OF_OTHERS = (  # options that say nothing of a layer, by their names in the parser
    "operator", "features", "width", "wire", "bytes", "cached", "decode", "tokens", "latents", "model", "heads",
    "kv_heads", "dim", "value_dim", "ranks", "schedules", "memory_limit", "max_error", "transport", "all", "save",
    "explain", "timeline", "mask_svg", "sweep",
)  # fmt: skip
SHOWN = 4  # ranks of a group that are no neighbours


@dataclass(frozen=True)
class AskedLayer:
    """A layer to plan for. net: of all its ranks. attention: what is asked of one context-parallel group.

    tp_ranks, cp_ranks: of the groups that stand for all others of their kind.
    """

    model: ModelFacts
    net: Interconnect
    tensor_parallel: int
    context_parallel: int
    attention: Asked
    linears: LinearLayers
    tp_ranks: Sequence[int]
    cp_ranks: Sequence[int]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PlannedLayer:
    """A layer and its plan. attention_bound_seconds: the lower bound of attention, both passes where both are asked."""

    asked: AskedLayer
    plan: LayerPlan
    attention_bound_seconds: float


def planned_layer(
    options: argparse.Namespace, given: argparse.Namespace, environment: Mapping[str, str]
) -> PlannedLayer:
    """Return the layer that options ask for, planned. Raises ConfigurationError for what cannot be planned."""
    asked = _asked(options, given)
    if options.layout == AUTO:
        attention, found, line = planned_in_layouts(asked.attention, environment)
        asked = replace(asked, attention=attention, notes=(*asked.notes, line))
    else:
        found = plan_or_forecast_kept(asked.attention.call, environment)
    assert not isinstance(found, Forecast)  # of at most MOST_RANKS ranks
    call = asked.attention.call.in_mode(found.transport)
    plan = plan_layer(LayerCall(call.setting, found.schedule, asked.linears))
    return PlannedLayer(asked, plan, call_bound(call).seconds)


def _asked(options: argparse.Namespace, given: argparse.Namespace) -> AskedLayer:
    refuse_given(given, OF_OTHERS, "--layer, whose sizes are the model's and whose ranks are --tp × --cp")
    if options.dtype == "fp16":
        raise UnsupportedError("--dtype fp16: the linear layers of --layer take fp32 and bf16")
    model, tp, cp = read_model(options.layer, "--layer"), options.tp, 1 if options.cp is None else options.cp
    for name, count in (("tp", tp), ("cp", cp)):
        if not 1 <= count <= MOST_RANKS:
            raise ConfigurationError(f"--{name} {count}: use 1 to {MOST_RANKS}, which are simulated")
    features, width = _features(model, tp)
    kind = FULL_LAYER if FULL_LAYER in model.layers else next(iter(model.layers))
    sizes = {
        "heads": model.heads, "kv_heads": model.kv_heads, "dim": model.head_dim, "value_dim": model.value_dim,
        "mask": model.mask_of(kind) if given.mask is None else options.mask, "ranks": tp * cp,
    }  # fmt: skip
    sized = argparse.Namespace(**{**vars(options), **sizes})
    net, machine, notes = _of_ranks(sized, tp, cp)
    attention = ask(sized)
    size = attention.call.setting.workload
    if size.q_length % (tp * cp):
        raise ConfigurationError(
            f"--seq {size.q_length}: --tp {tp} × --cp {cp} ranks do not divide it; in linear layers all have as many "
            f"tokens of each sample"
        )
    others = [each for each in model.layers if each != kind and given.mask is None]
    notes += tuple(f'this is a layer of type {kind}; for {each} say --mask "{model.mask_of(each)}"' for each in others)
    of_tp, tp_ranks = narrowest_group(net, [range(first, first + tp) for first in range(0, tp * cp, tp)])
    of_cp, cp_ranks = narrowest_group(net, [range(first, tp * cp, tp) for first in range(tp)])
    if cp_ranks[0]:  # else it is the first group, as asked
        setting = replace(attention.call.setting, interconnect=of_cp)
        attention = replace(attention, call=replace(attention.call, setting=setting))
    notes += tuple(
        f"the ways of {kind} group {ranks_text(ranks)} are the narrowest: it stands for all"
        for kind, ranks in (("tp", tp_ranks), ("cp", cp_ranks)) if ranks[0]
    )  # fmt: skip
    linears = LinearLayers(of_tp, machine, size.batch * size.q_length // cp, width, features, size.dtype)
    return AskedLayer(model, net, tp, cp, attention, linears, tp_ranks, cp_ranks, notes)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the ranks of a group as text: 0-7, or 0,8,16,24, shortened where there are many."""
    if len(ranks) > 2 and ranks[1] == ranks[0] + 1:
        return f"{ranks[0]}-{ranks[-1]}"
    some = [str(rank) for rank in ranks] if len(ranks) <= SHOWN else [*map(str, ranks[:2]), "...", str(ranks[-1])]
    return ",".join(some)


def _of_ranks(options: argparse.Namespace, tp: int, cp: int) -> tuple[Interconnect, Machine, tuple[str, ...]]:
    """Return the interconnect of tp × cp ranks, a machine at its rates of products, and notes."""
    ranks = tp * cp
    topology, notes = several_hosts(options.topology, ranks)
    whole, machine = where(topology, DTYPES[options.dtype], options)
    if ranks > whole.world_size:
        raise ConfigurationError(
            f"--tp {tp} × --cp {cp} are {ranks} ranks: {whole.name} has {whole.world_size}; take fewer, or name "
            f"several hosts, as preset:NAME*4"
        )
    if ranks < whole.world_size:
        notes += (f"the other {whole.world_size - ranks} ranks of {whole.name} are taken to be idle",)
    return first_ranks(whole, ranks), at_rates_of_products(machine), notes


def _features(model: ModelFacts, tp: int) -> tuple[dict[str, int], int]:
    """Return the features of each linear layer, on all ranks that share it, and the width of a token."""
    if model.width is None or model.mlp_features is None:
        raise ConfigurationError(
            f"--layer {model.name}: its layers are not attention between two linear layers and a dense MLP, or its "
            f"sizes are not known; plan its parts with --model and --operator"
        )
    kv_heads = max(model.kv_heads, tp)  # repeated where there are fewer than ranks
    for what, count in (("query heads", model.heads), ("kv heads", kv_heads), ("MLP features", model.mlp_features)):
        if count % tp:
            raise ConfigurationError(f"--tp {tp}: {count} {what} of {model.name} do not divide by it")
    qkv = model.heads * model.head_dim + kv_heads * (model.head_dim + model.value_dim)
    up = model.mlp_features * (2 if model.gated else 1)
    return {QKV: qkv, OUT: model.heads * model.value_dim, UP: up, DOWN: model.mlp_features}, model.width
