"""Training with what ranks exchange in MXFP8, a few steps of it; benchmarks/wire_training.py makes two hundred."""

from __future__ import annotations

import pytest
from ranks import Here, RankPools
from wire_training import Size, Trained, trained

SIZE = Size(tokens=64, batch=2, steps=16, held_out=1, rate=5e-3)


def ends(here: Here, split: str, name: str) -> Trained:
    assert here.base.transport is not None
    return trained(split, name, SIZE, here.base.transport)


@pytest.mark.parametrize(("split", "fewer"), [("tensor", 1.93), ("context", 1.3)])
def test_losses_are_those_of_bf16(ranks: RankPools, split: str, fewer: float) -> None:
    """Within half a percent, though not the same numbers; of attention k and v are encoded, their gradients are not."""
    plain, wired = (ranks(2)(ends, split, name) for name in ("bf16", "mxfp8"))
    for before, after in zip(plain, wired, strict=True):
        assert (after.losses, after.held_out) == (wired[0].losses, wired[0].held_out)
        assert before.losses[-1] < before.losses[0] - 1
        assert after.end == pytest.approx(before.end, rel=0.005) and after.losses != before.losses
        assert after.held_out == pytest.approx(before.held_out, rel=0.005)
        assert before.sent_bytes >= fewer * after.sent_bytes > 0
