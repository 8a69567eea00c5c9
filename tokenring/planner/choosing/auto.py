"""Planning a call: which schedules to try on this interconnect, in two rounds, and what is said of the best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from tokenring.display.units import mb_text
from tokenring.errors import ConfigurationError, MemoryLimitError
from tokenring.gc_pause import no_collection
from tokenring.ir.passes import for_call
from tokenring.lowering.storage import storage_of
from tokenring.lowering.target import Target
from tokenring.planner.bounds.bound import Bound, lower_bound
from tokenring.planner.bounds.mask_density import (
    UNEVEN,
    is_even,
    most_of_own_rows,
    own_pairs,
    visible_pairs,
    visible_share,
)
from tokenring.planner.choosing.candidates import MISFIT
from tokenring.planner.choosing.checks import check_in_job, check_parts
from tokenring.planner.choosing.few_connections import with_few_connections
from tokenring.planner.choosing.judged import NOTHING_YET, Judged, Judgement, Progress, Selection
from tokenring.planner.choosing.memory_fallback import over, within_limit
from tokenring.planner.choosing.memory_limits import needs
from tokenring.planner.choosing.plan import Forecast, Plan
from tokenring.planner.choosing.scale_out import LEAST_HOSTS, Task, forecast, has_equal_hosts, is_large, promising
from tokenring.planner.choosing.select import SAME, TOO_MUCH, TOO_SLOW, decide, judge
from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.interconnects.rank_order import good_order, node_sizes
from tokenring.planner.simulation.predict import Setting, Worked
from tokenring.schedule.families.registry import FAMILIES, expand, parse
from tokenring.schedule.names import CUT_BY_DEFAULT, direction_of, named_schedule, schedule_in_parts
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import WHOLE_UNITS, late_of
from tokenring.schedule.size_limits import MADE_RANKS
from tokenring.sequence.layout import Layout
from tokenring.sequence.mask import Mask

EXACT_RANKS = 32  # above, one host stands for all, where there are many
SOME_HOSTS = 4  # or so many, where one shows all
REFINED = 4  # schedules of the first round to try in pieces: the fastest, and as many that need least if all hid
MANY_RANKS, MANY_REFINED = 16, 2  # above so many ranks the fastest alone, and fewer: each takes seconds
PIECES = (2, 4)
MANY_MEMBERS = 8  # of a family, of which most lose by the kernels of one rank
LATE = "/late"
NOTHING_MADE: Mapping[str, Schedule] = MappingProxyType({})


@dataclass(frozen=True)
class CallToPlan:
    """The attention call that is planned for, and where it runs.

    modes: of the transport, those with fewer connections that may be taken to keep to the limit, or to advice.
    """

    setting: Setting
    q_layout: Layout
    kv_layout: Layout
    mask: Mask
    families: tuple[str, ...] = ()  # restrict the choice to these; names of members, too
    memory_limit_bytes: int | None = None
    everything: bool = False  # simulate also what cannot win
    modes: Mapping[str, Target] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress, compare=False, repr=False)
    wants_lse: bool = True  # somebody at home

    def in_mode(self, name: str | None) -> CallToPlan:
        """Return the call over one of the modes; None: as it is."""
        return self if name is None else replace(self, setting=over(self.setting, self.modes[name]), modes={})


def plan_call(call: CallToPlan) -> Plan:
    """Return the plan with the fastest schedule for a call. Raises ConfigurationError where nothing fits.

    First every member of every family in whole blocks, then the best of them in pieces and with part of the local
    tile kept for last. The same input gives the same plan, everywhere.
    """
    if call.setting.interconnect.world_size > MADE_RANKS:
        call = replace(call, modes={name: mode for name, mode in call.modes.items() if not mode.needs_all})
    with no_collection():  # a quarter of the time; what is made lives to the end
        found = within_limit(lambda setting: _plan(replace(call, setting=setting)), *_limited(call))
        found = with_few_connections(found, *_limited(call), lambda mode, name: _plan_named(call.in_mode(mode), name))
        storage_of.cache_clear()  # of dozens of schedules, of which one is wanted
        return found


def with_simulated(call: CallToPlan, plan: Plan, count: int) -> Plan:
    """Return the plan with so many of its candidates simulated to the end, for a table; of many ranks, as it is.

    Where one host stands for all, with all that are nearly as fast.
    """
    net = call.setting.interconnect
    if is_folded(call):
        with no_collection():
            nearly = _forecast(call)
        if plan.transport is None:
            return replace(plan, reason=nearly.reason, candidates=nearly.candidates)
        own_first = sorted(nearly.candidates, key=lambda each: each.name != plan.name)  # as its reason says
        return replace(plan, candidates=tuple(own_first))
    known = [each.name for each in plan.candidates if each.predicted_seconds is not None]
    more = [each.name for each in plan.candidates if each.name not in known and not each.reason.startswith(MISFIT)]
    names = [*known, *more][: max(count, len(known))]
    if not 1 < net.world_size <= MANY_RANKS or call.everything or names == known:
        return plan
    with no_collection():
        found = judge(_choices(call, names), call.setting, call.memory_limit_bytes, True)
        again = decide(found, call.setting, call_bound(call), call.memory_limit_bytes)
    rest = tuple(each for each in plan.candidates if each.name not in names)
    reason = again.reason if plan.transport is None else plan.reason  # which says what the mode is for
    return replace(plan, reason=reason, candidates=again.candidates + rest)


def _limited(call: CallToPlan) -> tuple[Setting, int | None, Mapping[str, Target]]:
    return call.setting, call.memory_limit_bytes, call.modes


def _plan(call: CallToPlan) -> Plan:
    """Return the plan for a call over one transport."""
    setting, limit = call.setting, call.memory_limit_bytes
    if is_folded(call):
        check_in_job(setting, call.mask)
        found = _forecast(call, fastest_alone=True)
        made, direction = make_in_parts(call, found.name, order_of(setting.interconnect))
        return Plan(made, found.workload, found.reason, found.candidates, direction=direction)
    _check_simulated(setting.interconnect)
    _check_one_row(call)
    first = _first_round(call)
    return decide(_refined(call, first), setting, call_bound(call), limit)


def _plan_named(call: CallToPlan, name: str) -> Plan:
    """Return the plan for a call with the schedule of this name, as it is."""
    if is_folded(call):
        return _plan(replace(call, families=(name,)))
    found = judge(_choices(call, [name]), call.setting, call.memory_limit_bytes, call.everything)
    return decide(found, call.setting, call_bound(call), call.memory_limit_bytes)


def _refined(call: CallToPlan, first: Judgement) -> Judgement:
    """Judge finer forms of the best of the first round, each in more pieces only where fewer did not rule it out."""
    found, some = first, _worth_refining(call, first)
    whole = {each.name: each for each in first.judged}
    for option in (LATE, *(f"/pieces{pieces}" for pieces in PIECES)):
        finer = {f"{name}{option}": name for name in some}
        choices = _choices(call, finer, {name: whole[name].schedule for name in some})
        choices = [replace(each, worked=_worked_whole(whole[finer[each.name]])) for each in choices]
        found = judge(choices, call.setting, call.memory_limit_bytes, call.everything, found)
        if option != LATE and call.memory_limit_bytes is None and not call.everything:
            some = [name for each, name in finer.items() if _may_be_finer(each, found)]
    return found


def _worked_whole(each: Judged) -> tuple[Worked, ...]:
    """Return what a rank does of a schedule whose blocks are whole chunks: in pieces it is no less beside kernels.

    Of a schedule in pieces finer ones may see nothing, and stay where they are.
    """
    return each.least.worked if each.schedule.q_pieces == each.schedule.kv_pieces == 1 else ()


def _may_be_finer(name: str, found: Judgement) -> bool:
    """Return whether more pieces may still win: work and bytes of these do not rule them out, and more have no less."""
    this = next((each for each in found.judged if each.name == name), None)
    if this is None:  # it is like another, does not fit, or its kernels take too long
        return not any(each.name == name and each.reason in (TOO_SLOW, TOO_MUCH) for each in found.misfits)
    return this.least.seconds <= found.judged[0].weighed_seconds * SAME  # more kernels make its risk smaller


def _check_simulated(net: Interconnect) -> None:
    """Raise ConfigurationError where neither one host stands for all nor all can be simulated rank by rank."""
    if net.world_size > MADE_RANKS:
        raise ConfigurationError(
            f"{net.world_size:,} ranks of {net.name!r} cannot be planned for: above {MADE_RANKS} that takes at least "
            f"{LEAST_HOSTS} equal hosts, numbered host by host; plan for such a part of them, as with --ranks, or name "
            f"a schedule"
        )


def _check_one_row(call: CallToPlan) -> None:
    """Raise MemoryLimitError for a limit so small that no schedule needs to be made to tell: many take a minute."""
    limit, setting = call.memory_limit_bytes, call.setting
    size, ranks = setting.workload, setting.interconnect.world_size
    row = min(size.head_dim, size.value_dim) * size.dtype.itemsize
    if limit is None or limit >= row or ranks <= MANY_RANKS:
        return
    if own_pairs(call.mask, call.q_layout, call.kv_layout, [[rank] for rank in range(ranks)]) >= visible_pairs(
        call.mask, size.q_length, size.kv_length
    ):
        return  # it may be that nothing has to move
    text = f"no schedule fits in {limit} bytes a rank: of what arrives from others one row of one head takes {row}"
    names = first_names(call)
    if ranks <= EXACT_RANKS:
        name = "ring" if "ring" in names else names[0]
        text += f", and {name}, to name one, needs {mb_text(needs(make(call, name), setting).peak_bytes)}"
    raise MemoryLimitError(f"{text}: raise the limit")


def _first_round(call: CallToPlan) -> Judgement:
    """Judge schedules in whole blocks.

    Of many ranks in equal hosts those that look best on one host, and those that cannot be seen so.
    """
    setting, names = call.setting, first_names(call)
    if call.everything or call.memory_limit_bytes is not None:
        return judge(_choices(call, names), setting, call.memory_limit_bytes, call.everything)
    if not _shows_on_one_host(call):
        found = NOTHING_YET
        for some in _few_and_many(names):
            found = judge(_choices(call, some), setting, None, False, found, names)
        return found
    best, unknown = promising(names, _task(call), MANY_REFINED)
    found = judge(_choices(call, best), setting, call.memory_limit_bytes, False)
    return judge(_choices(call, unknown), setting, call.memory_limit_bytes, False, found)


def _few_and_many(names: Sequence[str]) -> list[list[str]]:
    """Return the names of all families but those with many members, and then these: most of them are never made."""
    members = Counter(name.partition("/")[0] for name in names)
    few = [name for name in names if members[name.partition("/")[0]] < MANY_MEMBERS]
    return [few, [name for name in names if name not in few]] if few else [list(names)]


def _shows_on_one_host(call: CallToPlan) -> bool:
    """Return whether one host shows which schedules are best: not how a mask prunes them, nor whether they fit."""
    limited = call.memory_limit_bytes is not None  # what looks best may not fit
    return _is_many(call) and not limited and is_even(call.mask, call.q_layout, call.kv_layout)


def is_folded(call: CallToPlan) -> bool:
    """Return whether one host stands for all: one of few only where it shows all, and nothing is asked of the rest."""
    net = call.setting.interconnect
    few = net.world_size > EXACT_RANKS and len(net.fabrics) >= SOME_HOSTS and not call.everything
    return is_large(net, EXACT_RANKS) or (few and _shows_on_one_host(call))


def _is_many(call: CallToPlan) -> bool:
    net = call.setting.interconnect
    return net.world_size > MANY_RANKS and has_equal_hosts(net)


def _worth_refining(call: CallToPlan, found: Judgement) -> list[str]:
    """Return schedules of the first round to try in finer pieces: pieces hide, so that what hid little may overtake."""
    if found.judged and all(each.prediction is None for each in found.judged):  # by memory, which pieces may save
        least = sorted(found.judged, key=lambda each: each.needs_bytes or 0)
        return [each.name for each in least if not _says_how(each.name)][:REFINED]
    whole = _whole(found)
    limited = call.memory_limit_bytes is not None
    if _is_many(call) and not limited and not call.everything:
        return [each.name for each in whole[:MANY_REFINED]]
    rest = sorted(whole[REFINED:], key=lambda each: each.least.seconds)
    return [each.name for each in (*whole[:REFINED], *rest[:REFINED])]


def plan_or_forecast(call: CallToPlan) -> Plan | Forecast:
    """Return a plan, or a forecast where there are too many ranks for a schedule to be made."""
    net = call.setting.interconnect
    return forecast_call(call) if is_large(net, MADE_RANKS) else plan_call(call)


def forecast_call(call: CallToPlan) -> Forecast:
    """Return the forecast for a world of many equal hosts, without making a schedule. Raises ConfigurationError."""
    with no_collection():
        found = within_limit(lambda setting: _forecast(replace(call, setting=setting)), *_limited(call))
        return with_few_connections(
            found, *_limited(call), lambda mode, name: _forecast(replace(call.in_mode(mode), families=(name,)))
        )


def _forecast(call: CallToPlan, fastest_alone: bool = False) -> Forecast:
    return forecast(first_names(call), _task(call), call_bound(call), call.memory_limit_bytes, fastest_alone)


def _task(call: CallToPlan) -> Task:
    """Return what one host shows of the call, and notes on what it does not show."""
    size = call.setting.workload
    share = visible_share(call.mask, size.q_length, size.kv_length)
    notes = () if is_even(call.mask, call.q_layout, call.kv_layout) else (_uneven_note(call),)
    return Task(call.setting, share, (call.q_layout, call.kv_layout), notes, progress=call.progress)


def _uneven_note(call: CallToPlan) -> str:
    """Return the note on a mask whose shape counts, where one host cannot show it."""
    text = "the model sees only the share of all pairs that the mask leaves, though"
    most = most_of_own_rows(call.mask, call.q_layout, call.kv_layout.length)
    if most >= 1 + UNEVEN:
        text += f" one rank's queries see {most:.2g} × the average and"
    return f"{text} some blocks (layout {call.q_layout.name}) see nothing of others and need not move"


def call_bound(call: CallToPlan) -> Bound:
    """Return the lower bound on the time of a call, which no schedule can beat."""
    setting = call.setting
    pairs = visible_pairs(call.mask, setting.workload.q_length, setting.workload.kv_length)
    net, machine = setting.interconnect, setting.machine
    own = partial(own_pairs, call.mask, call.q_layout, call.kv_layout)
    found = lower_bound(setting.workload, pairs, net, machine.rates, setting.passes, own)
    return replace(found, compute_seconds=machine.kernel_seconds([found.compute_seconds] * net.world_size))


def first_names(call: CallToPlan) -> list[str]:
    """Return every member worth trying, of the allowed families. Raises ConfigurationError if there is none."""
    net, workload = call.setting.interconnect, call.setting.workload
    families = call.families or tuple(FAMILIES)
    names: dict[str, None] = {}
    nothing: ConfigurationError | None = None
    for local in node_sizes(net):
        try:
            names.update(dict.fromkeys(expand(families, net.world_size, workload, local)))
        except ConfigurationError as error:  # of nodes of this size; there may be others
            nothing = error
    if not names and nothing is not None:
        raise nothing
    # By their names alone these move in pieces where that usually pays: in one piece, too.
    return [each for name in names for each in ([name, f"{name}/pieces1"] if name in CUT_BY_DEFAULT else [name])]


def _choices(
    call: CallToPlan, names: Iterable[str], whole: Mapping[str, Schedule] = NOTHING_MADE
) -> list[Selection]:
    """Return what may be chosen; whole: schedules that were made, out of which some others can be."""
    order = order_of(call.setting.interconnect)

    def looked_at() -> None:
        call.progress.looked_at += 1

    def made(name: str, wanted: Callable[[Schedule], bool] | None = None) -> Schedule:
        base = whole.get(name.removesuffix(LATE))  # not of those in whose names no pieces means some
        if name.endswith(LATE) and base is not None and base.name not in CUT_BY_DEFAULT and call.mask in WHOLE_UNITS:
            return late_of(base, name)
        return make_in_order(call, name, order, wanted)

    choices = [Selection(name, partial(made, name), looked_at, partial(made, name)) for name in names]
    call.progress.known += len(choices)
    return choices


def _whole(found: Judgement) -> list[Judged]:
    """Return what may win in finer pieces, best first: not what says itself how it is cut, nor what needs too long.

    Pieces hide what is waited for. They take no less work, and no fewer bytes.
    """
    best = found.judged[0].weighed_seconds if found.judged else 0.0
    return [each for each in found.judged if _may_gain(each, best) and not _says_how(each.name)]


def _may_gain(each: Judged, best_seconds: float) -> bool:
    if each.exceeds_seconds is None:
        return each.prediction is not None
    return each.least.seconds + each.risk_seconds <= best_seconds


def _says_how(name: str) -> bool:
    named = parse(name)
    return named.pieces is not None or "late" in named.options


def make(call: CallToPlan, name: str) -> Schedule:
    """Make a schedule by its name, with the ranks in a good order for this interconnect."""
    return make_in_order(call, name, order_of(call.setting.interconnect))


def make_in_parts(call: CallToPlan, name: str, order: Sequence[int] | None) -> tuple[Schedule, int | None]:
    """Return the schedule of `make_in_order`, of which every rank can make its own part first, and its direction.

    Raises ConfigurationError where it has to be made whole, of too many ranks for that.
    """
    asked = name, call.setting.workload, call.q_layout, call.kv_layout, call.mask
    check_parts(*asked)
    direction = direction_of(*asked, order)
    return schedule_in_parts(*asked, order=order, direction=direction), direction


def make_in_order(
    call: CallToPlan, name: str, order: Sequence[int] | None, wanted: Callable[[Schedule], bool] | None = None
) -> Schedule:
    """Make a schedule with the ranks in a given order. Raises ConfigurationError for what does not fit the call.

    wanted: as of `make_schedule`, with NotWanted.
    """
    layouts = call.q_layout, call.kv_layout
    made = named_schedule(name, call.setting.workload, *layouts, call.mask, order=order, wanted=wanted)
    return for_call(made, call.wants_lse)


def order_of(net: Interconnect) -> tuple[int, ...] | None:
    """Return a good order of the ranks, None where they are in a good order as they are."""
    order = good_order(net)
    return None if list(order) == sorted(order) else order
