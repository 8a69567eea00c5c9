"""Tasks `column` and `row` of ci/npu-smoke on emulated NPUs: as they are, and with something wrong in them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend import fused_linears
from ascend.ranks import NpuPools
from ascend.refusals import refuse
from smoke_on_npus import run

from tokenring.runtime import products

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hardware" / "npu"))

from npu_smoke.linears import MC2, SCHEDULES, UNFUSED
from npu_smoke.unknowns import AS_ASSUMED, MEASURED, OPEN, OTHERWISE, UNKNOWNS, verdict

pytestmark = pytest.mark.timeout(600)  # ranks of their own, on a machine that is busy
LAYERS = ("column", "row")


def of(layer: str, mc2: str, ours: str) -> dict[str, str]:
    """The verdicts of a layer, in the order of the table."""
    return {f"{layer}-mc2": mc2, f"{layer}-exact": ours, f"{layer}-forward": MEASURED, f"{layer}-backward": MEASURED}


@pytest.mark.parametrize("layer", LAYERS)
def test_all_ways_are_exact_and_timed(npus: NpuPools, layer: str) -> None:
    found, words = run(npus, 2, layer)
    assert words == of(layer, AS_ASSUMED, AS_ASSUMED)
    ways = {*SCHEDULES, MC2, UNFUSED}
    assert found["errors"].keys() == found["seconds"].keys() == ways and not found["left"] and not found["failed"]
    assert all(each.keys() == {"forward", "backward"} for each in found["seconds"].values())


def forgets_a_part(patched: pytest.MonkeyPatch) -> None:
    others = fused_linears._others
    patched.setattr(fused_linears, "_others", lambda gloo, mine: [*others(gloo, mine)[:-1], torch.zeros_like(mine)])


def raises(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(fused_linears, "_check", lambda given: refuse(True, "EZ9999: Inner Error!"))


def is_absent(patched: pytest.MonkeyPatch) -> None:
    fused_linears.install("nothing")


SPOILT: dict[str, tuple[Any, str, str]] = {
    "wrong": (forgets_a_part, OTHERWISE, "errors of MC2 against float64"),
    "raises": (raises, OTHERWISE, "MC2 fails: rank 0 (this one) failed"),
    "absent": (is_absent, OPEN, "MC2 was refused: kernel 'mc2' cannot take this"),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("how", SPOILT)
def test_what_is_wrong_with_mc2_leaves_the_others(npus: NpuPools, layer: str, how: str) -> None:
    spoil, word, says = SPOILT[how]
    found, words = run(npus, 2, layer, spoil)
    assert words == of(layer, word, AS_ASSUMED)
    assert found["seconds"].keys() >= {*SCHEDULES, UNFUSED}
    (unknown,) = [each for each in UNKNOWNS if each.key == f"{layer}-mc2"]
    assert says in verdict(unknown, {layer: {"status": "done", "result": found}}).text


def half_of_each_product(patched: pytest.MonkeyPatch) -> None:
    multiplying = products.multiplying

    def halved(*given: Any) -> Any:
        step = multiplying(*given)
        return lambda call: [step(call), *(x.mul_(0.5) for x in call.own.values() if x.dim() == 2)]

    patched.setattr(products, "multiplying", halved)


def test_a_schedule_that_is_wrong(npus: NpuPools) -> None:
    _, words = run(npus, 2, "column", half_of_each_product)
    assert words == of("column", AS_ASSUMED, OTHERWISE)
