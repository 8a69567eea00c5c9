"""A schedule with part of the local tile last, out of the one without: what it is when it is made by its name."""

import pytest

from tokenring.schedule.families import variants
from tokenring.schedule.names import CUT_BY_DEFAULT, make_schedule
from tokenring.schedule.scheme import WHOLE_UNITS, late_of
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Mask

NAMES = [name for name in variants(8, None, 4) if name not in CUT_BY_DEFAULT]


@pytest.mark.parametrize("mask", WHOLE_UNITS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("order", [None, (0, 2, 4, 6, 1, 3, 5, 7)], ids=["as numbered", "arranged"])
def test_late_of_a_schedule_is_the_late_schedule(mask: Mask, layout: str, order: tuple[int, ...] | None) -> None:
    whole = make_layout(layout, 8, 16 * 7 * 8 * 3)
    for name in NAMES:
        base = make_schedule(name, whole, whole, mask, order=order)
        late = f"{name}/late"
        assert late_of(base, late) == make_schedule(late, whole, whole, mask, order=order), name
