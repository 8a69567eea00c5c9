"""The race: candidates are timed in turns, all ranks starting together, and the slowest rank counts."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tokenring.backends.devices import DeviceRuntime, device_of
from tokenring.cli.bench.candidates import NotInstalled, NotRun, RacedSchedule, RaceSetting, Runner
from tokenring.cli.bench.reference import RESULTS, errors, reference, reference_dtype
from tokenring.cli.bench.results import ERROR_LIMITS, FAILED, MEASURED, MISSING, PEER, SKIPPED, WRONG, Entry, RaceCase
from tokenring.gc_pause import no_collection
from tokenring.launch.command import Tell
from tokenring.launch.follow import short

WARM_UP_ROUNDS = 2  # the first also compares results
PEER_SECONDS = 120.0  # how long the ranks of a peer wait for each other, should one of them fail
SETTLE_SECONDS = 0.03  # from the last rank's arrival until all begin, on emulated links
SEED = 0


@dataclass
class _Lane:
    """One candidate in the race, as this rank sees it."""

    entry: Entry
    runner: Runner | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)  # q, k, v and dout in the candidate's form

    @property
    def running(self) -> bool:
        return self.runner is not None

    def stop(self, status: str, reason: str) -> None:
        """Take the candidate out of the race: what was measured so far does not count."""
        self.runner, self.inputs = None, []
        self.entry = replace(self.entry, status=status, reason=reason, forward_s=[], call_s=[])


def order(count: int, turn: int) -> list[int]:
    """Return the order in which candidates start in a round: over `count` rounds each follows each other equally often.

    That is a balanced Latin square (Williams 1949); an odd number of candidates needs the reversed one too.
    """
    weave = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    row = [(turn + step) % count for step in weave]
    return row[::-1] if count % 2 and (turn // count) % 2 else row


def race(
    setting: RaceSetting, candidates: list[RacedSchedule], tell: Tell
) -> tuple[list[Entry], str | None, list[str]]:
    """Return all entries, the dtype of the reference they were compared with (None: they were not), and notes.

    Every rank calls it, with the same candidates.
    """
    case = setting.case
    rounds = WARM_UP_ROUNDS + case.rounds
    steps = len(candidates) * (rounds + 1) + 1
    inputs_BSHD = make_inputs(case)
    lanes = []
    for index, candidate in enumerate(candidates):
        tell(index, steps, f"making {candidate.name} ready")
        lanes.append(_prepare(setting, candidate, inputs_BSHD))
    wanted, dtype = None, None
    if case.compute_tflops is None:
        tell(len(lanes), steps, "computing the reference")
        dtype = reference_dtype(case)
        wanted = reference(inputs_BSHD, setting.mask, case.backward, setting.rank, setting.ranks, dtype)
    del inputs_BSHD
    compared_with = None if dtype is None else str(dtype).removeprefix("torch.")
    with no_collection():
        for turn in range(rounds):
            running = [lane for lane in lanes if lane.running]
            for index in order(len(running), turn) if running else []:
                lane = running[index]
                done = len(lanes) * (turn + 1) + 1 + running.index(lane)
                tell(done, steps, f"round {turn + 1} of {rounds}: {lane.entry.name}")
                _take_turn(setting, lane, wanted, counts=turn >= WARM_UP_ROUNDS)
            wanted = None
            gc.collect()
    return [lane.entry for lane in lanes], compared_with, _notes(lanes)


def _notes(lanes: list[_Lane]) -> list[str]:
    """Return each note once, with all the modules that it is about."""
    where: dict[str, dict[str, None]] = {}
    for lane in lanes:
        for note in lane.runner.notes if lane.runner else ():
            where.setdefault(note.text, {})[note.where] = None
    return [f"{text} ({', '.join(modules)})" for text, modules in where.items()]


def make_inputs(case: RaceCase) -> list[torch.Tensor]:
    """Make q, k, v and dout over the whole sequence, [B, S, H, D or of values]; the same on every rank."""
    generator = torch.Generator().manual_seed(SEED)
    of_keys, of_values = case.head_dim, case.of_values
    sizes = (case.heads, of_keys), (case.kv_heads, of_keys), (case.kv_heads, of_values), (case.heads, of_values)
    return [
        torch.randn(case.batch, case.seq_len, *size, generator=generator).to(getattr(torch, case.dtype))
        for size in sizes
    ]


def _prepare(setting: RaceSetting, candidate: RacedSchedule, inputs_BSHD: list[torch.Tensor]) -> _Lane:
    lane = _Lane(Entry(candidate.name, candidate.kind, "", candidate.version, MEASURED))
    group = None
    if candidate.kind == PEER and setting.ranks > 1:  # one of its own: a peer that fails in the middle breaks it
        group = dist.new_group(timeout=timedelta(seconds=PEER_SECONDS))
    status, reason = MEASURED, ""
    try:
        with _own_warnings(candidate.kind):
            runner = candidate.prepare(setting, group or dist.group.WORLD)
        lane.inputs = [runner.form.into(x.index_select(1, runner.positions)) for x in inputs_BSHD]
        lane.runner = runner
        lane.entry = replace(lane.entry, what=runner.what, link_bytes=runner.link_bytes)
        if runner.load is not None:
            lane.entry = replace(lane.entry, wire=runner.load.wire, wire_s=runner.load.seconds)
        for x in lane.inputs[:3]:
            x.requires_grad_(setting.case.backward)
    except NotInstalled as missing:
        status, reason = MISSING, str(missing)
    except NotRun as refusal:
        status, reason = SKIPPED, str(refusal)
    except Exception as error:
        status, reason = FAILED, _told(error)
    _agree(setting, lane, status, reason)
    return lane


@contextmanager
def _own_warnings(kind: str) -> Iterator[None]:
    """Silence a peer's warnings, of torch's old names say: where warnings are errors, they would end the candidate."""
    with warnings.catch_warnings():
        if kind == PEER:
            warnings.simplefilter("ignore")
        yield


def _agree(setting: RaceSetting, lane: _Lane, status: str, reason: str) -> None:
    """Stop a candidate on all ranks if it stopped on one; the lowest rank's reason counts."""
    found: list[Any] = [None] * setting.ranks
    if setting.ranks > 1:
        dist.all_gather_object(found, (status, reason))
    else:
        found = [(status, reason)]
    stopped = next((each for each in found if each[0] != MEASURED), None)
    if stopped is not None:
        lane.stop(*stopped)


def _take_turn(setting: RaceSetting, lane: _Lane, wanted: dict[str, torch.Tensor] | None, counts: bool) -> None:
    """Make one call on all ranks; with `wanted` its results are compared, and with `counts` its times kept."""
    assert lane.runner is not None
    found: list[torch.Tensor] = []
    times, problem = (0.0, 0.0), ""
    with _own_warnings(lane.entry.kind):
        began = begin_together(setting)
        try:
            if lane.runner.takes_part:
                *times, found = timed_call(  # type: ignore[assignment]
                    lane.runner, lane.inputs, setting.case.backward, began, device_of(lane.inputs[0])
                )
        except Exception as error:
            problem = _told(error)
    slowest = torch.tensor([*times, float(bool(problem))], dtype=torch.float64)
    if setting.ranks > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if slowest[2]:
        _agree(setting, lane, FAILED if problem else MEASURED, problem)
        return
    if wanted is not None:
        _compare(setting, lane, found, wanted)
    if counts:
        lane.entry.forward_s.append(round(slowest[0].item(), 7))
        lane.entry.call_s.append(round(slowest[1].item(), 7))


def begin_together(setting: RaceSetting) -> float | None:
    """Wait until all ranks may begin; return the moment, if they have agreed on one.

    Over emulated links a barrier's last messages are late, and who gets them late would have less to wait for. But
    all ranks there share a clock, and begin at one moment, when no message is on its way any more.
    """
    if setting.case.emulate is None:
        if setting.ranks > 1:
            dist.barrier()
        return None
    moment = torch.tensor(time.perf_counter(), dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    began = moment.item() + SETTLE_SECONDS
    time.sleep(max(0.0, began - time.perf_counter()))
    return began


def timed_call(
    runner: Runner, inputs: list[torch.Tensor], backward: bool, began: float | None, device: DeviceRuntime
) -> tuple[float, float, list[torch.Tensor]]:
    """Return the seconds to the end of forward, those to the end, and the results. The device's clock waits for it."""
    *leaves, dout = inputs
    gradients: tuple[torch.Tensor, ...] = ()
    with torch.set_grad_enabled(backward), _threads(runner.threads):
        began = device.clock() if began is None else began
        out = runner.attend(*leaves)
        middle = device.clock()
        if backward:
            gradients = torch.autograd.grad(out, leaves, dout)
        ended = device.clock()
    return middle - began, ended - began, [out.detach(), *gradients]


def _compare(setting: RaceSetting, lane: _Lane, found: list[torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert lane.runner is not None
    whole = {name: lane.runner.form.back(x) for name, x in zip(RESULTS, found, strict=False)}
    off = errors(whole, wanted, lane.runner.positions, setting.ranks)
    lane.entry = replace(lane.entry, errors=off)
    limit = ERROR_LIMITS[setting.case.dtype]
    if not lane.entry.worst_error <= limit:  # so that NaN is refused
        name = next(name for name, error in off.items() if not error <= limit)
        reason = f"the relative error of {name} is {off[name]:.1e}; the limit is {limit:.0e}"
        lane.entry = replace(lane.entry, status=WRONG, reason=reason)


def _told(error: Exception) -> str:
    """Return an error's text; errors that are not tokenring's begin with their kind."""
    return f"{type(error).__name__}: {short(error)}"


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)
