"""Plans within a memory limit over modes of a transport: which is taken, what is said, what is written down."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from nets import BOTH, setting, workload
from test_planner_hccl import A2, printed

from tokenring import ConfigurationError
from tokenring.cli.main import main
from tokenring.errors import MemoryLimitError
from tokenring.lowering.backend_names import BOUNDED, TRANSPORTS, bounded, transport_target
from tokenring.planner.choosing.auto import CallToPlan, plan_call
from tokenring.planner.choosing.candidates import Candidate
from tokenring.planner.choosing.memory_fallback import over, within_limit
from tokenring.planner.choosing.plan import Forecast, Plan
from tokenring.planner.interconnects.interconnect import full_mesh
from tokenring.planner.simulation.predict import Setting
from tokenring.sequence.layout import contiguous
from tokenring.sequence.mask import Full

SIZE = workload(8, (8, 8), 64)
SETTING = over(setting(full_mesh(8, 1.0), SIZE, BOTH), transport_target("hccl"))
MODES = bounded("hccl")
MB = 10**6


# ---------- the choice, by hand: (name, seconds, MB) over the transport and over its modes

Table = dict[str | None, list[tuple[str, float, int]]]


def chosen(table: Table, limit: int | None) -> tuple[Forecast, list[str | None]]:
    """From made-up figures; and over what was planned."""
    asked: list[str | None] = []
    names = {target: mode for mode, target in MODES.items()}

    def plan_over(some: Setting) -> Forecast:
        mode = names.get(some.target)
        asked.append(mode)
        fits = [each for each in table[mode] if limit is None or each[2] * MB <= limit]
        if not fits:
            raise MemoryLimitError(f"nothing over {mode}")
        best = min(fits, key=lambda each: each[1])
        rest = [each for each in table[mode] if each != best]
        found = [Candidate(n, s, s, 0.0, 0, mb * MB, None, "", mb // 40, mb * MB) for n, s, mb in (best, *rest)]
        return Forecast(best[0], SIZE, f"{best[0]} it is", tuple(found))

    return within_limit(plan_over, SETTING, limit, MODES), asked


TABLE: Table = {
    None: [("direct", 1.0, 800), ("ring", 3.0, 160)],
    "hccl/channel": [("direct", 1.4, 400), ("ring", 3.2, 160)],
    "hccl/pair": [("direct", 2.0, 200), ("ring", 3.5, 80)],
    "hccl/batch": [("direct", 2.5, 800), ("ring", 3.5, 800)],
}


@pytest.mark.parametrize(
    ("limit", "mode", "name", "says"),
    [
        (None, None, "direct", None),
        (900 * MB, None, "direct", None),
        (500 * MB, "hccl/channel", "direct", "without, ring is the best that fits, with 3 s, in 500 MB a rank"),
        (250 * MB, "hccl/pair", "direct", "for its 5 communicators (200 MB): without, ring is the best that fits"),
        (170 * MB, None, "ring", None),  # nothing is faster anywhere: as it is
        (100 * MB, "hccl/pair", "ring", "without, nothing fits in 100 MB a rank"),
    ],
)
def test_the_fastest_that_fits_over_any(limit: int | None, mode: str | None, name: str, says: str | None) -> None:
    found, _ = chosen(TABLE, limit)
    assert (found.transport, found.name) == (mode, name)
    assert found.reason == f"{name} it is" if says is None else f"over transport {mode!r}" in found.reason
    assert says is None or says in found.reason


def test_what_limits_nothing_is_planned_for_once() -> None:
    assert chosen(TABLE, None)[1] == [None]
    assert chosen(TABLE, 900 * MB)[1] == [None]
    assert chosen(TABLE, 500 * MB)[1] == [None, *MODES]


def test_nothing_fits_over_any() -> None:
    with pytest.raises(ConfigurationError, match=r"nothing over hccl/batch\. That is over 'hccl/batch'"):
        chosen(TABLE, 50 * MB)


@pytest.mark.parametrize("limit", [64, 900 * MB])
def test_what_else_is_wrong_is_said_at_once(limit: int) -> None:
    """A mistake in what is asked is no matter of memory: it is neither hidden by other modes nor explained by one."""
    asked: list[Setting] = []

    def plan_over(some: Setting) -> Forecast:
        asked.append(some)
        raise ConfigurationError("unknown schedule")

    with pytest.raises(ConfigurationError, match=r"^unknown schedule$"):
        within_limit(plan_over, SETTING, limit, MODES)
    assert asked == [SETTING]


def test_modes_have_fewer_and_fewer_connections() -> None:
    for name, modes in BOUNDED.items():
        target = [transport_target(each) for each in (name, *modes)]
        of_pairs = [each for each in target if not each.batching]
        counts = [each.channels * (1 if each.pair_serial else 2) for each in of_pairs]
        assert counts == sorted(set(counts), reverse=True) and set(modes) < set(TRANSPORTS)
    assert bounded("gloo") == {}


# ---------- for true


def call(limit: int | None, modes: bool = True) -> CallToPlan:
    layout = contiguous(8, SIZE.q_length)
    families = ("ring", "direct-kv")
    return CallToPlan(SETTING, layout, layout, Full(), families, limit, modes=MODES if modes else {})


def test_a_faster_schedule_that_is_excluded_comes_back() -> None:
    """A ring fits over hccl (4 communicators); direct, over one queue a pair (7)."""
    limit = 7 * 42 * MB + 20 * MB
    alone = plan_call(call(limit, modes=False))
    found = plan_call(call(limit))
    assert (alone.name.partition("/")[0], alone.transport) == ("ring", None)
    assert found.name.startswith("direct-kv") and found.transport == "hccl/pair"
    first = found.candidates[0]
    assert first.predicted_seconds is not None and alone.candidates[0].predicted_seconds is not None
    assert first.predicted_seconds < alone.candidates[0].predicted_seconds
    assert first.connections == 7 and (first.peak_bytes or 0) <= limit
    again = Plan.from_json(found.to_json())
    assert (again.transport, again.reason) == ("hccl/pair", found.reason)


def test_the_command_takes_a_mode_unless_one_was_named() -> None:
    limited = (*A2, "--memory-limit", "500M", "--schedules", "direct-q")
    text = printed(*limited)
    assert "over transport 'hccl/pair', for its 7 communicators (294 MB): without, nothing fits in 524 MB" in text
    assert json.loads(printed(*limited, "--json"))["transport"] == "hccl/pair"
    out, err = StringIO(), StringIO()
    assert main(["plan", *limited, "--transport", "hccl"], out, err) == 2
    assert json.loads(printed(*limited, "--transport", "hccl/pair", "--json"))["transport"] is None


def test_the_way_out_is_not_named_where_there_is_none() -> None:
    out, err = StringIO(), StringIO()
    assert main(["plan", *A2, "--memory-limit", "40M", "--schedules", "ring"], out, err) == 2
    assert "no schedule fits in 41.9 MB" in err.getvalue() and "over 'hccl/pair'" in err.getvalue()
    assert "a transport with fewer" not in err.getvalue()


def test_plans_without_a_transport_are_read() -> None:
    document = json.loads(printed(*A2, "--schedules", "ring", "--json"))
    del document["transport"]
    assert Plan.from_json(json.dumps(document)).transport is None
    with pytest.raises(ConfigurationError, match="the plan's transport is 3"):
        Plan.from_json(json.dumps({**document, "transport": 3}))


def test_over_is_the_same_setting_with_other_queues() -> None:
    pair = over(SETTING, MODES["hccl/pair"])
    assert pair.machine.messages.pair_serial and pair.machine.messages.channels == 1
    assert replace(pair, machine=SETTING.machine, target=SETTING.target) == SETTING
