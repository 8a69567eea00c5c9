"""Check what `tokenring advise` adds to the planner's prices: how engines merge, and how they gather across hosts."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tokenring.cli.advise.pricing import (
    BY_OPERATORS,
    BY_OPERATORS_GATHERED,
    BY_OPERATORS_WAITED,
    FUSED,
    GATHER,
    Merging,
    as_run,
    choice_seconds,
    with_heads,
)
from tokenring.errors import ConfigurationError
from tokenring.planner.choosing.auto import CallToPlan, make
from tokenring.planner.interconnects.wiring import interconnect_of
from tokenring.planner.machines.machine import machine_of_preset
from tokenring.planner.machines.presets import preset
from tokenring.planner.simulation.predict import Setting, predict
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Causal
from tokenring.sequence.workload import Workload
from tokenring.tables.shaped_rates import ShapedRates


@cache
def call(name: str = "dgx-a100", training: bool = False, kv_heads: int = 8) -> CallToPlan:
    net, machine = interconnect_of(preset(name)), machine_of_preset(name, torch.bfloat16)
    length = 1024 * net.world_size
    size = Workload(1, length, length, 16, kv_heads, 128, torch.bfloat16)
    layout = make_layout("zigzag", net.world_size, length)
    setting = Setting(size, net, machine, ("forward", "backward") if training else ("forward",))
    return CallToPlan(setting, layout, layout, Causal())


def test_ours_is_the_planners_price() -> None:
    found = choice_seconds(call(), "ring")
    assert found == pytest.approx(predict(make(call(), "ring"), call().setting).seconds)


def test_rings_merge_and_ulysses_does_not() -> None:
    ring, by_operators = choice_seconds(call(), "ring"), choice_seconds(call(), "ring", BY_OPERATORS)
    rates, size = call().setting.machine.rates, call().setting.workload
    elements = size.q_length / 8 * size.q_heads * size.value_dim
    a_merge = (38 - 12) * elements / (rates.copy_gbs * 1e9) + 8 * rates.op_seconds
    assert by_operators - ring == pytest.approx(7 * a_merge, rel=0.05)
    assert choice_seconds(call(), "ulysses", BY_OPERATORS) == choice_seconds(call(), "ulysses")
    fewer = choice_seconds(call(), "usp/4", BY_OPERATORS) - choice_seconds(call(), "usp/4")
    assert 0 < fewer < (by_operators - ring) / 3


def test_gathered_blocks_are_computed_one_by_one() -> None:
    at_once = choice_seconds(call(), GATHER, BY_OPERATORS)
    one_by_one = choice_seconds(call(), GATHER, BY_OPERATORS_GATHERED)
    assert at_once == choice_seconds(call(), GATHER)
    least = Merging(1, 1, gathered=True)
    assert one_by_one - at_once > choice_seconds(call(), GATHER, least) - at_once > 0
    training = call(training=True)
    more = choice_seconds(training, GATHER, BY_OPERATORS_WAITED) - choice_seconds(training, GATHER)
    kernels = [predict(make(training, name), training.setting).compute_seconds for name in ("ring", GATHER)]
    merged = choice_seconds(call(), GATHER, BY_OPERATORS_WAITED) - choice_seconds(call(), GATHER, least)
    assert more - (kernels[0] - kernels[1]) == pytest.approx(merged, rel=0.1)  # backward merges nothing


def test_the_own_block_is_computed_beside_a_gather() -> None:
    """Hide as much by torch and xDiT as one block of eight takes, or the gather, whichever is less."""
    waited, beside = (choice_seconds(call(), GATHER, each) for each in (BY_OPERATORS_WAITED, BY_OPERATORS_GATHERED))
    kernels = predict(make(call(), "ring"), call().setting).compute_seconds
    found = predict(make(call(), GATHER), call().setting)
    assert waited - beside == pytest.approx(min(kernels / 8, found.seconds - found.compute_seconds))


@pytest.mark.parametrize("inner", (2, 4))
def test_ulysses_beside_a_gathered_ring_waits(inner: int) -> None:
    """Overlap nothing of it but, by torch's ring, one block with the gather alone; merge as often as a ring."""
    name = f"usp/{inner}"
    ring, waited, beside = (
        choice_seconds(call(), name, each) for each in (BY_OPERATORS, BY_OPERATORS_WAITED, BY_OPERATORS_GATHERED)
    )
    kernels = predict(make(call(), name), call().setting).compute_seconds
    assert ring < waited and 0 < waited - beside <= 1.001 * kernels / (8 // inner)
    fewer = Merging(1, 1, gathered=True)
    assert choice_seconds(call(), name, fewer) < waited


def test_blocks_are_gathered_to_each_host_once() -> None:
    two = call("dgx-a100*2")
    direct = predict(make(two, GATHER), two.setting).seconds
    assert choice_seconds(two, GATHER) < direct
    one = call()
    assert choice_seconds(one, GATHER) == pytest.approx(predict(make(one, GATHER), one.setting).seconds)


def test_engines_and_ours_have_the_rates_of_the_call() -> None:
    found = as_run(call())
    assert isinstance(found.setting.machine.rates, ShapedRates)
    assert found.setting.interconnect is call().setting.interconnect
    assert choice_seconds(found, "ring", FUSED) > choice_seconds(call(), "ring", FUSED)  # along the edge


def test_padded_heads_are_computed_and_exchanged_at_once() -> None:
    assert with_heads(call(), None) is call()
    padded = with_heads(call(), (24, 24)).setting.workload
    assert (padded.q_heads, padded.kv_heads, padded.head_dim) == (24, 24, 128)
    plain = choice_seconds(call(kv_heads=16), "ulysses")
    assert plain < choice_seconds(with_heads(call(), (24, 24)), "ulysses") < 2 * plain


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        choice_seconds(call(kv_heads=1), "ulysses/3")
