"""What is asked of a schedule is checked before it is worked out: in our own words, not in Python's."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tokenring.errors import ConfigurationError
from tokenring.schedule.by_name import schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.mask import Causal
from tokenring.sequence.workload import Workload

MADE = schedule("tokenring", ranks=4, mask=Causal(), length=64)
SIZE = Workload(1, 64, 64, 2, 1, 8)
ASKED = ("link_bytes", "peak_bytes", "flops")


def ask(what: str, *given: Any) -> object:
    return getattr(MADE, what)(*given)


def refused(says: str) -> Any:
    return pytest.raises(ConfigurationError, match=f"^{re.escape(says)}")


@pytest.mark.parametrize("what", ASKED)
class TestWhatIsMeasured:
    def test_what_fits(self, what: str) -> None:
        for direction in ("forward", "backward"):
            assert ask(what, SIZE, direction)

    @pytest.mark.parametrize("given", [3, None, "64", Workload])
    def test_no_workload(self, what: str, given: object) -> None:
        with refused(f"workload is of type {type(given).__name__}; give a Workload(batch, q_length, "):
            ask(what, given)

    @pytest.mark.parametrize("direction", ["sideways", 3, None, ["forward"]])
    def test_no_pass(self, what: str, direction: object) -> None:
        with refused(f"there is no pass {direction!r}; use forward or backward"):
            ask(what, SIZE, direction)

    def test_another_length(self, what: str) -> None:
        with refused("the schedule is for 64 q and 64 kv positions, the workload has 32 and 64: "):
            ask(what, Workload(1, 32, 64, 2, 1, 8))


class TestProgram:
    @pytest.mark.parametrize("rank", [-1, 4, None, "0", 1.0, True])
    def test_no_rank(self, rank: object) -> None:
        with refused(f"there is no rank {rank!r}; the schedule has ranks 0 to 3"):
            ask("program", SIZE, rank)

    def test_no_workload_and_no_pass(self) -> None:
        with refused("workload is of type int; give a Workload("):
            ask("program", 3, 0)
        with refused("there is no pass 'both'; use forward or backward"):
            ask("program", SIZE, 0, "both")


@pytest.mark.parametrize("given", [3, None, b"{}", ["{}"]])
def test_what_is_no_text(given: Any) -> None:
    for reader in ("parse", "from_json"):
        with refused(f"Schedule.{reader} reads a str, not one of type {type(given).__name__}"):
            getattr(Schedule, reader)(given)


def test_replacing_what_there_is_not() -> None:
    with refused("a schedule has no 'pruned' to replace"):
        MADE.replace(pruned=False)
    assert MADE.replace(slack=None).slack is None
