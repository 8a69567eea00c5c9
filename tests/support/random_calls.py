"""Random calls on four ranks, each checked against float64; and what the ranks hold as time goes on.

All ranks draw the same from one seed: contexts that are made, used for some calls and closed or
dropped, over all ranks or some of them; and calls in these contexts. It goes in rounds, of which each
leaves nothing behind, so that what a rank holds after a round can be compared with what it held before.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from cases import LIMITS, NAMES, Case
from draws import BY_NAME, Context, Draw, Drawn
from held import Held, held
from oracle import Attention, allowed, relative_error
from patience import patient
from ranks import PEER_SECONDS, Here, RankPools

from tokenring import ContextParallel, attention, shard

OPEN = 5  # contexts at a time
CALLS = 40  # of a round
WARM_UP, LEAST_ROUNDS = 2, 5  # after the warm-up one, and two to see that what grew stays
ROUND_SECONDS = 300.0  # more than any round takes
SPARE_MB, SPARE_MAPS = 15.0, 40  # what masks see of chunks is kept: some 10 MB, full after four minutes
BF16_RATIO = 1.15


@dataclass
class Report:
    """What one rank did in a round."""

    calls: Counter[str] = field(default_factory=Counter)
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    halves: list[tuple[Drawn, dict[str, float]]] = field(default_factory=list)  # bf16 errors, for the driver to judge
    held: Held | None = None
    seconds: float = 0.0

    def note(self, name: str, value: float, drawn: Drawn) -> None:
        if not value <= self.worst.get(name, (0.0, ""))[0]:
            self.worst[name] = value, str(drawn)


# ---------- on a rank


class Round:
    """One round: its groups, the transports that it keeps, and the contexts that are open."""

    def __init__(self, here: Here, seed: str) -> None:
        self.here, self.draw, self.report = here, Draw(seed, here.world_size), Report()
        self.groups = {members: dist.new_group(list(members)) for members in dict.fromkeys(self.draw.members)}
        self.shared: dict[tuple[tuple[int, ...], str], ContextParallel] = {}
        self.open: dict[Context, ContextParallel | None] = {}
        self.past: dict[Context, list[Drawn]] = {}
        self.later: list[Callable[[], None]] = []

    def run(self, calls: int) -> Report:
        began = time.monotonic()
        for _ in range(calls):
            self.step()
        self.flush()
        self.close()
        dist.barrier()
        self.report.seconds = time.monotonic() - began
        return self.report

    def step(self) -> None:
        some = self.draw.random
        if not self.open or some.random() < 0.25:
            context = self.draw.context()
            if context not in self.open and len(self.open) == OPEN:
                self.give_up(some.choice(list(self.open)), some.random() < 0.6)
            self.open.setdefault(context, None)
        context = some.choice(list(self.open))
        before = self.past.setdefault(context, [])
        drawn = some.choice(before) if before and some.random() < 0.3 else self.draw.call(context)
        before.append(drawn)
        earlier, self.later = self.later, []
        if self.here.rank in context.members:
            self.compute(drawn)
        for finish in earlier:  # at every rank after the same call, its own or not
            finish()

    def compute(self, drawn: Drawn) -> None:
        """The call, or its first half: then the second comes after the next call."""
        cp = self.open[drawn.context] = self.open[drawn.context] or self.make(drawn.context)
        finish = begin(drawn, cp, self.groups[drawn.context.members], self.report)
        if drawn.passes == "later":
            self.later.append(finish)
        else:
            finish()

    def make(self, context: Context) -> ContextParallel:
        group, key = self.groups[context.members], (context.members, context.transport)
        options: dict[str, Any] = {"kernel": context.kernel, "timeout_seconds": PEER_SECONDS}
        transport: Any = context.transport
        if context.shared:
            if key not in self.shared:
                self.shared[key] = ContextParallel(group, transport=transport, timeout_seconds=patient(PEER_SECONDS))
            transport = self.shared[key].transport
        if context.schedule in BY_NAME:
            options["pieces"] = context.pieces
        return ContextParallel(group, context.layout, context.make_schedule(), transport, **options)

    def give_up(self, context: Context, close: bool) -> None:
        """Close a context, or just drop it."""
        self.flush()
        cp = self.open.pop(context)
        self.past.pop(context, None)
        if close and cp is not None:
            cp.close()

    def flush(self) -> None:
        for each in self.later:
            each()
        self.later.clear()

    def close(self) -> None:
        for context in list(self.open):
            self.give_up(context, True)
        for cp in self.shared.values():
            cp.close()
        self.shared.clear()
        for members, group in self.groups.items():
            if self.here.rank in members:
                dist.destroy_process_group(group)
        self.groups.clear()


def begin(drawn: Drawn, cp: ContextParallel, group: Any, report: Report) -> Callable[[], None]:
    """Forward; gives what does the rest and checks it all."""
    case = drawn.case
    q, k, v, dout = (strided(shard(x, cp), drawn.strides) for x in case.inputs())
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    forward_only = drawn.passes in ("forward", *modes)
    with modes.get(drawn.passes, torch.enable_grad)():
        q, k, v = (x.requires_grad_(drawn.passes not in modes) for x in (q, k, v))
        out, lse = attention(q, k, v, cp, case.mask, drawn.scale, return_lse=True)
    names = NAMES[:2] if forward_only else NAMES

    def finish() -> None:
        made = [out.detach(), lse.detach()]
        for turn in range(0 if forward_only else 1 + (drawn.passes == "twice")):
            retain = drawn.passes == "twice" and turn == 0
            gradients = torch.autograd.grad(out, (q, k, v), dout, retain_graph=retain)
            if turn:
                assert all(map(torch.equal, made[2:], gradients)), f"backward differs the second time: {drawn}"
            made[2:] = gradients
        check(drawn, dict(zip(names, made, strict=True)), cp, group, report)

    return finish


def strided(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values, lying in memory as users' tensors may."""
    if how == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "part of more":
        more = torch.full((x.shape[0], x.shape[1] + 3, x.shape[2] + 1, 2 * x.shape[3]), 7.0, dtype=x.dtype)
        return more[:, 2:-1, 1:, : x.shape[3]].copy_(x)
    if how == "transposed":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if how == "expanded" and x.shape[0] == 1:
        return x[0].expand(1, *x.shape[1:])
    return x


def check(drawn: Drawn, made: dict[str, torch.Tensor], cp: ContextParallel, group: Any, report: Report) -> None:
    """Against float64, which one rank works out; every rank compares its part, and all add up what is wrong."""
    case = drawn.case
    wanted: list[Any] = [case.reference(drawn.scale) if cp.rank == 0 else None]
    dist.broadcast_object_list(wanted, group=group, group_src=0)
    errors = relative_errors(case, wanted[0], made, cp, group)
    half = case.dtype == torch.bfloat16
    for name, error in errors.items():
        if name == "lse" or not half:
            report.note(f"error of {name}", error, drawn)
            assert error <= LIMITS[name], f"{name}: error {error:.3g} > {LIMITS[name]:.3g}: {drawn}"
    if cp.rank == 0:
        report.halves += [(drawn, errors)] if half else []
        report.calls.update(kinds(drawn))


def kinds(drawn: Drawn) -> list[str]:
    """What to count a call as."""
    context, dtype = drawn.context, str(drawn.case.dtype).removeprefix("torch.")
    schedule = context.schedule + ("" if context.pieces is None else " in pieces")
    found = {"": "calls", "ranks": len(context.members), "transport": context.transport, "schedule": schedule}
    found |= {"dtype": dtype, "passes": drawn.passes, "inputs": drawn.strides}
    return [f"{what} {value}".strip() for what, value in found.items()]


def relative_errors(
    case: Case, wanted: Attention, made: dict[str, torch.Tensor], cp: ContextParallel, group: Any
) -> dict[str, float]:
    """Of the whole results; infinite if any rank's part has the wrong shape or dtype, or -inf in wrong places."""
    sums = torch.zeros(len(made), 2, dtype=torch.float64)
    for row, (name, got) in enumerate(made.items()):
        dim = 2 if name == "lse" else 1
        want = shard(getattr(wanted, name), cp, dim=dim)
        right = got.shape == want.shape and got.dtype == (torch.float32 if name == "lse" else case.dtype)
        empty = want == -torch.inf
        if not right or not torch.equal(got == -torch.inf, empty):
            sums[row, 0] = torch.inf
            continue
        got, want = got.double().masked_fill(empty, 0.0), want.masked_fill(empty, 0.0)
        sums[row, 0], sums[row, 1] = ((got - want) ** 2).sum(), (want**2).sum()
    dist.all_reduce(sums, group=group)
    return {name: _ratio(*map(float, pair)) for name, pair in zip(made, sums, strict=True)}


def _ratio(wrong: float, all_: float) -> float:
    return (wrong / all_) ** 0.5 if all_ else 0.0 if wrong == 0 else float("inf")


def one_round(here: Here, seed: str, calls: int) -> Report:
    """Its report, with what is held when the round is over."""
    report = Round(here, seed).run(calls)
    allowed.cache_clear()
    report.held = held()
    return report


# ---------- the driver


@dataclass
class Soaked:
    """All rounds. `held` by round and rank."""

    calls: Counter[str] = field(default_factory=Counter)
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    held: list[list[Held]] = field(default_factory=list)

    def add(self, reports: list[Report]) -> None:
        for report in reports:
            for key, count in report.calls.items():
                self.calls[key] += count
            for name, found in report.worst.items():
                self.worst[name] = max(found, self.worst.get(name, (0.0, "")))
        self.held.append([report.held for report in reports if report.held is not None])

    def judge(self, drawn: Drawn, ours: dict[str, float], theirs: dict[str, float]) -> None:
        for name in ours.keys() - {"lse"}:
            ratio = ours[name] / theirs[name] if ours[name] else 0.0
            self.worst[f"bf16 ratio of {name}"] = max(
                (ratio, str(drawn)), self.worst.get(f"bf16 ratio of {name}", (0.0, ""))
            )
            assert ratio <= BF16_RATIO, f"{name}: bf16 ratio {ratio:.3g}, error {ours[name]:.3g}: {drawn}"

    def ends(self, rank: int) -> tuple[Held, Held]:
        """What a rank held after the warm-up, and at the end: of some rounds the middle one by memory."""
        rounds = [each[rank] for each in self.held[WARM_UP:]]
        some = max(1, len(rounds) // 4)
        first, last = (sorted(part, key=lambda each: each.rss_mb) for part in (rounds[:some], rounds[-some:]))
        return first[len(first) // 2], last[len(last) // 2]

    def growth(self) -> list[str]:
        found = []
        for rank in range(len(self.held[0])):
            before, after = self.ends(rank)
            found += [f"rank {rank}: {each}" for each in after.growth(before, SPARE_MB, SPARE_MAPS)]
        return found


def half_errors(drawn: Drawn) -> dict[str, float]:
    """Of torch's bf16 kernel in one process. In none of the ranks: it keeps code for every shape that it has met."""
    theirs, wanted = drawn.case.one_process(drawn.scale), drawn.case.reference(drawn.scale)
    return {name: relative_error(getattr(theirs, name), getattr(wanted, name)) for name in NAMES if name != "lse"}


def soak(
    pools: RankPools,
    seconds: float,
    seed: int = 0,
    world_size: int = 4,
    calls: int = CALLS,
    show: Callable[[str], None] = lambda text: None,
) -> Soaked:
    """Rounds of so many calls for about so long. Raises AssertionError at the first wrong result."""
    made, until = Soaked(), time.monotonic() + seconds
    judges = mp.get_context("forkserver").Pool(2, torch.set_num_threads, (1,), maxtasksperchild=100)
    with pools.expendable(world_size) as some, judges:
        while time.monotonic() < until or len(made.held) < LEAST_ROUNDS:
            number = len(made.held)
            reports = some.within(ROUND_SECONDS, one_round, f"{seed} {number}", calls)
            made.add(reports)
            halves = [each for report in reports for each in report.halves]
            theirs = judges.map(half_errors, [drawn for drawn, _ in halves], 1)
            for (drawn, ours), their in zip(halves, theirs, strict=True):
                made.judge(drawn, ours, their)
            show(f"round {number}: {reports[0].seconds:.1f} s; rank 0 holds {reports[0].held}")
    return made
