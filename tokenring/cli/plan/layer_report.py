"""The plan of a transformer layer as text, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from tokenring.cli.plan.layer import AskedLayer, PlannedLayer, ranks_text
from tokenring.cli.plan.operators import UNFUSED, aligned
from tokenring.cli.spelling import heads_text
from tokenring.display.safe_text import plain
from tokenring.display.units import mb_text, time_text
from tokenring.planner.interconnects.rank_order import most_sharing
from tokenring.planner.layers.layer import ATTENTION, COLLECTIVES, DOWN, OUT, QKV, UP, LayerPlan, OperatorCost

FORMAT, VERSION = "tokenring-layer-plan", 1
HEAD = ("pass", "operator", "kind", "group", "schedule", "time", "compute", "exposed", "sent", "unfused")
LINEARS = (QKV, OUT, UP, DOWN)
TEXTS = 5  # columns of text


def ranks_of(asked: AskedLayer, kind: str) -> Sequence[int]:
    """Return the ranks of the group that an operator of this kind is simulated on."""
    return asked.cp_ranks if kind == ATTENTION else asked.tp_ranks


def group_text(asked: AskedLayer, kind: str) -> str:
    """Return the group of an operator as text: tp 0-7, or cp 0,8,16,24."""
    return f"{'cp' if kind == ATTENTION else 'tp'} {ranks_text(ranks_of(asked, kind))}"


def title(asked: AskedLayer) -> str:
    """Return what the plan is for: the model, the mesh and the topology."""
    mesh = f"tp {asked.tensor_parallel} × cp {asked.context_parallel}"
    return f"one layer of {plain(asked.model.name)}, {mesh}, on {asked.net.name}"


def about(asked: AskedLayer) -> list[str]:
    """Return the lines that say of what sizes the layer is, and by what rates it is computed."""
    call, linears, model = asked.attention.call, asked.linears, asked.model
    size = call.setting.workload
    mlp = f"{'gated ' if model.gated else ''}MLP of {model.mlp_features:,} features"
    heads = f"{model.heads}:{model.kv_heads} heads × {heads_text(size.head_dim, size.value_dim)}"
    dtype = str(size.dtype).removeprefix("torch.")
    width = f"{size.q_length:,} tokens of width {linears.width:,}"
    return [
        f"batch {size.batch}, {width}, {heads}, {mlp}, {dtype}, {call.mask}, layout {call.q_layout.name}, "
        f"{' + '.join(call.setting.passes)}",
        f"{asked.net.world_size} rank{_s(asked.net.world_size)}; {call.setting.machine.source}",
    ]


def result(planned: PlannedLayer) -> str:
    """Return the time of the layer in a line: how much of it is exposed, and what it is unfused."""
    plan = planned.plan
    text = f"{time_text(plan.seconds)}, of which {time_text(plan.exposed_seconds)} ({_share(plan)}) are exposed"
    if _is_shared(plan):
        by = _best_unfused(plan)
        text += f"; {plan.unfused_seconds(by) / plan.seconds:.2f} × as fast as with linear layers {UNFUSED[by]}"
    return text


def layer_report(planned: PlannedLayer) -> str:
    """Return the operators as a table, their sum, and why they are scheduled so."""
    plan, asked = planned.plan, planned.asked
    shared = _is_shared(plan)
    rows = [HEAD, *(_row(each, planned) for each in plan.costs), _sum(plan)]
    if not shared:
        rows = [row[:-1] for row in rows]
    notes = dict.fromkeys((*asked.notes, *asked.attention.call.setting.interconnect.notes))
    top = title(asked), *about(asked), result(planned)
    return "\n".join([*top, "", *aligned(rows, TEXTS), "", *_says(planned), *notes])


def layer_json(planned: PlannedLayer) -> str:
    """Return the plan as JSON: the operators in the order in which they run, and their sum."""
    plan, asked = planned.plan, planned.asked
    call, linears = asked.attention.call, asked.linears
    data = {
        "format": FORMAT, "version": VERSION, "model": asked.model.name, "interconnect": asked.net.name,
        "tp": asked.tensor_parallel, "cp": asked.context_parallel, "attention": call.setting.workload.to_dict(),
        "mask": str(call.mask), "layout": call.q_layout.name, "passes": list(call.setting.passes),
        "tokens_of_tp_group": linears.tokens, "width": linears.width, "features": dict(linears.features),
        "rates": call.setting.machine.source, "stays": dict(plan.stays),
        "pair_seconds": {pair: dict(of) for pair, of in plan.pair_seconds.items()},
        "groups_on_one_wire": {"tp": _sharing(asked, UP), "cp": _sharing(asked, ATTENTION)},
        "operators": [
            {
                "operator": each.operator, "pass": each.direction, "kind": each.kind,
                "ranks": list(ranks_of(asked, each.kind)), "schedule": each.schedule, "seconds": each.seconds,
                "compute_seconds": each.compute_seconds, "exposed_seconds": each.exposed_seconds,
                "sent_bytes": each.sent_bytes, "unfused_seconds": _named(each.unfused_seconds),
            }
            for each in plan.costs
        ],
        "seconds": plan.seconds, "compute_seconds": plan.compute_seconds, "exposed_seconds": plan.exposed_seconds,
        "sent_bytes": plan.sent_bytes,
        "unfused_seconds": _named({by: plan.unfused_seconds(by) for by in COLLECTIVES}) if _is_shared(plan) else {},
        "attention_bound_seconds": planned.attention_bound_seconds,
    }  # fmt: skip
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _row(each: OperatorCost, planned: PlannedLayer) -> tuple[str, ...]:
    unfused = "" if not each.unfused_seconds else time_text(each.unfused(_best_unfused(planned.plan)))
    return (
        each.direction, each.operator, each.kind, group_text(planned.asked, each.kind), each.schedule,
        *map(time_text, (each.seconds, each.compute_seconds, each.exposed_seconds)), mb_text(each.sent_bytes), unfused,
    )  # fmt: skip


def _sum(plan: LayerPlan) -> tuple[str, ...]:
    times = plan.seconds, plan.compute_seconds, plan.exposed_seconds
    unfused = time_text(plan.unfused_seconds(_best_unfused(plan)))
    return ("all", "", "", "", "", *map(time_text, times), mb_text(plan.sent_bytes), unfused)


def _says(planned: PlannedLayer) -> Iterator[str]:
    """Yield the lines below the table: which groups work at once, what stays where, what the times are."""
    plan, asked = planned.plan, planned.asked
    tp, cp = asked.tensor_parallel, asked.context_parallel
    yield f"tp: {cp} group{_s(cp)} of {tp} neighbour{_s(tp)}, {_hosts(asked, UP)}{_at_once(asked, UP, cp)}"
    every = f"{tp} apart, " if min(tp, cp) > 1 else ""
    yield f"cp: {tp} group{_s(tp)} of {cp}, {every}{_hosts(asked, ATTENTION)}{_at_once(asked, ATTENTION, tp)}"
    if tp > 1:
        yield from _stay(plan)
    of_attention = sum(each.seconds for each in plan.costs if each.operator == ATTENTION)
    ratio = of_attention / planned.attention_bound_seconds
    yield f"attention takes {ratio:.2f} × its lower bound" + ("; in unfused it is as planned" if tp > 1 else "")
    if _is_shared(plan):
        yield "; ".join(f"{text}: {time_text(plan.unfused_seconds(by))}" for by, text in UNFUSED.items())
    if lines := list(_program(planned)):
        yield from ("in a program:", *(f"  {line}" for line in lines))
    yield "beside compute and what is exposed, a rank copies, adds up parts and posts messages"
    yield "products are taken to run at the rate of attention's forward kernels"
    yield "all times are predicted, none is measured"
    yield "not counted: norms, rotary embedding, activation, residual sums, and data parallelism"


def _program(planned: PlannedLayer) -> Iterator[str]:
    """Yield the contexts that a program makes for such a layer."""
    plan, asked = planned.plan, planned.asked
    if asked.context_parallel > 1:
        shared = f", tensor_parallel={asked.tensor_parallel}" if asked.tensor_parallel > 1 else ""
        layout, name = asked.attention.call.q_layout.name, plan.schedule_of(ATTENTION)
        yield f'tr.ContextParallel(layout="{layout}", schedule="{name}"{shared})'
    if asked.tensor_parallel > 1:
        of: dict[str, list[str]] = {}
        for each in LINEARS:
            of.setdefault(plan.schedule_of(each), []).append(each)
        for name, layers in of.items():
            yield f'tr.TensorParallel(schedule="{name}") for {", ".join(layers)}'


def _stay(plan: LayerPlan) -> Iterator[str]:
    """Yield what stays where it is in each pair of linear layers."""
    yield "qkv and out: the weights stay, since attention takes a rank's own heads of all tokens of its tp group"
    others = {kind: seconds for kind, seconds in plan.pair_seconds[UP].items() if kind != plan.stays[UP]}
    yield f"{UP} and {DOWN}: {_staying(plan.stays[UP], plan.pair_seconds[UP][plan.stays[UP]])}" + "".join(
        f"; {_staying(kind, seconds)}" for kind, seconds in others.items()
    )


def _staying(kind: str, seconds: float) -> str:
    return f"{time_text(seconds)} where {kind} stay in both"


def _hosts(asked: AskedLayer, kind: str) -> str:
    count = len({asked.net.hosts[rank] for rank in ranks_of(asked, kind)})
    return "inside a host" if count == 1 else f"over {count} hosts"


def _at_once(asked: AskedLayer, kind: str, groups: int) -> str:
    if groups == 1 or len(ranks_of(asked, kind)) == 1:
        return ""
    count = _sharing(asked, kind)
    return ", all at once: " + ("no wire is shared" if count == 1 else f"up to {count} share a wire, evenly")


def _sharing(asked: AskedLayer, kind: str) -> int:
    group = asked.attention.call.setting.interconnect if kind == ATTENTION else asked.linears.net
    return most_sharing(group, asked.net, ranks_of(asked, kind))


def _is_shared(plan: LayerPlan) -> bool:
    """Return whether linear layers are shared by several ranks."""
    return any(each.unfused_seconds for each in plan.costs)


def _best_unfused(plan: LayerPlan) -> str:
    return min(COLLECTIVES, key=plan.unfused_seconds)


def _share(plan: LayerPlan) -> str:
    return f"{plan.exposed_seconds / plan.seconds:.1%}"


def _named(seconds: Mapping[str, float]) -> dict[str, float]:
    return {UNFUSED[by]: found for by, found in seconds.items()}


def _s(count: int) -> str:
    return "" if count == 1 else "s"
