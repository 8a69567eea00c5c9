"""What cannot win is not simulated, or not to its end: limits are exact, and the choice is that of a full search."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import BOTH, call, named, setting, two_node, workload
from test_planner_simulate import drawn

import tokenring as tr
from tokenring.ir.schedule_data import Pass
from tokenring.lowering.storage import storage_of
from tokenring.planner.choosing.auto import make, make_in_order, plan_call, with_simulated
from tokenring.planner.choosing.candidates import MISFIT
from tokenring.planner.choosing.select import TOO_MUCH, TOO_SLOW
from tokenring.planner.interconnects.interconnect import Interconnect, full_mesh, ring, switch
from tokenring.planner.simulation.operations import Costs
from tokenring.planner.simulation.predict import (
    Setting,
    kernels_of_rank,
    least_seconds,
    predict,
    predict_within,
    work_of,
)
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import NotWanted
from tokenring.tables.rates import Machine, Messages, Rates

SIDES = ((64, 0.0098), (2048, 0.01))  # kernels lose little by pieces
COPIES = Machine(Rates("t", SIDES, SIDES, copy_gbs=1.0), Messages())
COPIES_TAKE_LONG = Setting(workload(8, (8, 8), 512), full_mesh(8, 20.0), COPIES, BOTH)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**9), st.floats(0.2, 0.999))
def test_a_limit_is_met_or_the_simulation_given_up(seed: int, share: float) -> None:
    """Just above what it takes, the prediction is the same; below, there is none."""
    schedule, asked = drawn(seed)
    found, least = predict(schedule, asked), least_seconds(schedule, asked).of_passes
    assert predict_within(schedule, asked, found.seconds * (1 + 1e-9), least) == found
    if found.seconds > 0:
        assert predict_within(schedule, asked, found.seconds * share, least) is None


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**9))
def test_the_work_of_one_rank_bounds_each_pass(seed: int) -> None:
    """It is the time for which that rank is busy in the simulation, of every rank."""
    schedule, asked = drawn(seed)
    outcomes = predict(schedule, asked, record=True).outcomes
    for rank in range(schedule.world_size):
        for direction, outcome in zip(asked.passes, outcomes, strict=True):
            work = work_of(schedule, asked, rank, direction)
            assert work.alone_seconds <= outcome.busy_seconds[rank] * (1 + 1e-9)
            assert work.alone_seconds <= outcome.seconds * (1 + 1e-9)
            costs = Costs(schedule, asked.workload, direction, asked.machine.rates)
            kernels = kernels_of_rank(storage_of(schedule), rank, asked.supports, costs)
            assert kernels + work.beside_seconds <= outcome.busy_seconds[rank] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("net", "heads", "tokens", "tflops", "passes"),
    [
        (full_mesh(4, 1.0), (8, 2), 1024, 1e-2, BOTH),
        (ring(4, 1.0), (4, 4), 256, 1e-1, BOTH),
        (switch(6, 1.0), (6, 3), 128, 1.0, BOTH[:1]),
        (two_node(4, 1.0, 0.25), (6, 6), 128, 2.0, BOTH[:1]),
        (two_node(4, 1.0, 0.1, nic_per_rank=True), (8, 1), 512, 1e-1, BOTH[1:]),
    ],
    ids=["mesh", "ring", "switch", "two nodes", "two nodes with NICs"],
)
def test_the_choice_is_that_of_a_full_search(
    net: Interconnect, heads: tuple[int, int], tokens: int, tflops: float, passes: tuple[Pass, ...]
) -> None:
    size = workload(net.world_size, heads, tokens)
    asked = call(setting(net, size, passes, tflops=tflops), tr.Causal())
    few, every = plan_call(asked), plan_call(replace(asked, everything=True))
    assert few.candidates[0].predicted_seconds is not None and every.candidates[0].predicted_seconds is not None
    assert few.candidates[0].predicted_seconds <= 1.001 * every.candidates[0].predicted_seconds
    times = {each.name: each.predicted_seconds for each in every.candidates}
    given_up = [each for each in few.candidates if each.predicted_seconds is None and times.get(each.name) is not None]
    assert given_up, "all of it was simulated"
    for each in given_up:
        assert (times[each.name] or 0.0) >= few.candidates[0].predicted_seconds * (1 - 1e-9), each


def test_a_table_is_filled_up() -> None:
    """As many rows as are wanted, of the same plan; what does not fit is none of them."""
    size = workload(4, (4, 4), 256)
    asked = call(setting(full_mesh(4, 1.0), size, tflops=1e-2), tr.Causal())
    plan = plan_call(asked)
    wanted = 4 + sum(each.predicted_seconds is not None for each in plan.candidates)
    shown = with_simulated(asked, plan, wanted)
    rows = [each for each in shown.candidates if each.predicted_seconds is not None]
    assert len(rows) == wanted
    assert (shown.name, shown.candidates[0].predicted_seconds) == (plan.name, plan.candidates[0].predicted_seconds)
    assert {each.name for each in shown.candidates} == {each.name for each in plan.candidates}
    assert not any(each.reason.startswith(MISFIT) for each in rows)
    assert f"; next {rows[1].name} with " in shown.reason


def test_the_hash_of_a_schedule_is_worked_out_in_each_process() -> None:
    """Hashes of texts differ between processes, so none is pickled; equal schedules have equal hashes."""
    made = named("ring", 4, 64)
    before = hash(made)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made.replace(name=made.name)):
        assert "_hash" not in vars(other)
        assert (other, hash(other)) == (made, before)
    assert hash(made.replace(name="other")) != before


def test_what_loses_by_its_kernels_gets_no_moves() -> None:
    """Once something is fastest, tiles alone are made of what takes longer in the kernels of one rank; only of that."""
    size = workload(8, (8, 8), 512)
    asked = call(setting(full_mesh(8, 1.0), size, tflops=1e-3), tr.Causal())
    found = plan_call(asked)
    lost = [each.name for each in found.candidates if each.reason == TOO_SLOW]
    assert lost
    moves: list[int] = []

    def refuses(tiles: Schedule) -> bool:
        moves.append(len(tiles.moves))
        return False

    for name in lost:
        made = make(asked, name)
        assert least_seconds(made, asked.setting).kernel_seconds > (found.candidates[0].predicted_seconds or 0.0)
        with pytest.raises(NotWanted):
            make_in_order(asked, name, None, refuses)
        assert make_in_order(asked, name, None, lambda tiles: True) == made
    assert moves == [0] * len(lost)


@pytest.mark.parametrize("name", ["ring", "usp/4", "ulysses", "packed/4", "mesh-kv/2x4", "relay/4"])
@pytest.mark.parametrize("pieces", [2, 4])
def test_more_pieces_take_no_less_beside_kernels(name: str, pieces: int) -> None:
    """So what a rank does of whole chunks rules finer forms out, by their kernels alone."""
    asked = call(COPIES_TAKE_LONG, tr.Causal())
    whole, finer = make(asked, name), make(asked, f"{name}/pieces{pieces}")
    for rank, direction in product(range(0, 8, 3), BOTH):
        less, more = (work_of(each, asked.setting, rank, direction).beside_seconds for each in (whole, finer))
        assert 0 < less <= more * (1 + 1e-9)


def test_what_loses_with_copies_as_in_whole_chunks_is_not_made_in_pieces() -> None:
    """Tiles in pieces are refused by their kernels and what a rank did beside those of whole chunks; never the best."""
    asked = call(COPIES_TAKE_LONG, tr.Causal())
    found = plan_call(asked)
    refused = [each.name for each in found.candidates if each.reason == TOO_MUCH]
    assert refused
    best = found.candidates[0].predicted_seconds or 0.0
    for name in refused:
        made = make(asked, name)
        assert least_seconds(made, asked.setting).kernel_seconds <= best
        assert predict(made, asked.setting).seconds > best
