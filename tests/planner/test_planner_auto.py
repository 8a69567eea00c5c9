"""What is chosen where it is known what must win; limits, restrictions and ties; plans as JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from nets import BOTH, call, named, setting, two_node, workload
from patience import patient

import tokenring as tr
from tokenring.display.units import mb_text, time_text
from tokenring.errors import ConfigurationError, TokenRingError
from tokenring.ir.schedule_data import Pass
from tokenring.planner.choosing import auto
from tokenring.planner.choosing.auto import CallToPlan, first_names, make, plan_call
from tokenring.planner.choosing.checks import restricted
from tokenring.planner.choosing.judged import Judged, Judgement, Selection
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.choosing.select import decide, select, wires_need
from tokenring.planner.interconnects.interconnect import (
    Interconnect,
    LinkFabric,
    full_mesh,
    of_one_host,
    ring,
    switch,
)
from tokenring.planner.interconnects.wiring import interconnect_of
from tokenring.planner.machines.presets import preset
from tokenring.planner.simulation.predict import Busiest, OfPass, least_seconds, predict
from tokenring.tables.rates import Messages

Heads = tuple[int, int]


def asked(net: Interconnect, heads: Heads, tokens: int = 64, **changes: object) -> CallToPlan:
    return call(setting(net, workload(net.world_size, heads, tokens)), tr.Full(), "contiguous", **changes)


def winner(net: Interconnect, heads: Heads, tokens: int = 64) -> str:
    return plan_call(asked(net, heads, tokens)).name


class TestChoice:
    """Where transfers alone cost."""

    def test_heads_that_divide_on_a_mesh(self) -> None:
        assert winner(full_mesh(8, 1.0), (8, 8)).startswith("ulysses")

    def test_heads_that_divide_behind_a_switch(self) -> None:
        assert winner(switch(8, 1.0), (8, 8)).startswith("ulysses")

    def test_six_heads_on_a_mesh_of_eight(self) -> None:
        """Kernels are free: two thirds of X a link, a 21st of a KV ring."""
        assert winner(full_mesh(8, 1.0), (6, 6)).startswith("uneven/6")

    def test_one_kv_head_on_a_mesh(self) -> None:
        plan = plan_call(asked(full_mesh(8, 1.0), (32, 1)))
        assert plan.name.split("/")[0] in ("direct-kv", "all-gather-kv")
        assert plan.candidates[0].predicted_seconds == pytest.approx(plan.candidates[0].bound_seconds, rel=1e-3)

    def test_links_of_a_ring(self) -> None:
        """Both ways round at once."""
        assert winner(ring(8, 1.0), (32, 1)).split("/")[0] in ("bidirectional", "all-gather-kv", "direct-kv")
        times = {
            each.name: each.predicted_seconds
            for each in plan_call(asked(ring(8, 1.0), (8, 1), everything=True)).candidates
        }
        assert (times["bidirectional"] or 0) < 0.6 * (times["ring"] or 0)

    def test_two_nodes_with_few_kv_heads(self) -> None:
        """KV crosses once, by each rank's own NIC, and is passed on inside."""
        assert winner(two_node(8, 1.0, 0.1, nic_per_rank=True), (32, 1)).startswith("relay/4")

    def test_what_costs_messages_loses_where_these_are_dear(self) -> None:
        """Few tokens, a message costs 1 ms: all at once rather than a ring, however little it moves."""
        size = setting(full_mesh(4, 1.0), workload(4, (6, 6), 16), messages=Messages(latency_seconds=1e-3))
        plan = plan_call(call(size, tr.Full(), "contiguous", everything=True))
        times = {each.name: each.predicted_seconds or 0 for each in plan.candidates}
        assert times["direct-kv"] < times["ring"]
        assert plan.name not in ("ring", "tokenring", "bidirectional")

    def test_a_ring_goes_round_a_cube(self) -> None:
        """Ranks are arranged along NVLinks: no hop of the ring goes through the hosts."""
        net = interconnect_of(preset("dgx-1-v100"))
        schedule = make(asked(net, (8, 8)), "ring")
        assert all(len(net.way(move.src, move.dst)) == 1 for move in schedule.moves)


class TestBound:
    @pytest.mark.parametrize("heads", [(8, 8), (6, 6), (8, 2)])
    def test_every_candidate_stands_beside_it(self, heads: Heads) -> None:
        plan = plan_call(asked(full_mesh(4, 1.0), heads, everything=True))
        assert len({each.bound_seconds for each in plan.candidates if each.predicted_seconds is not None}) == 1
        for each in plan.candidates:
            assert (each.predicted_seconds or 1) >= (each.bound_seconds or 0)


class TestLists:
    def test_best_first_with_reasons(self) -> None:
        plan = plan_call(asked(full_mesh(4, 1.0), (4, 4), everything=True))
        times = [each.predicted_seconds for each in plan.candidates if each.predicted_seconds is not None]
        assert sorted(times)[0] >= 0.95 * times[0]
        assert plan.candidates[0].name == plan.name
        assert all(each.reason for each in plan.candidates)
        assert plan.reason.startswith(f"{plan.name}: {time_text(times[0])} predicted for forward on full mesh, ")
        assert f"next {plan.candidates[1].name} with " in plan.reason

    def test_twins_are_left_out(self) -> None:
        """Keeping part of the local tile for last changes nothing where no partial comes after it."""
        plan = plan_call(asked(full_mesh(4, 1.0), (4, 4), everything=True))
        names = [each.name for each in plan.candidates]
        assert len(names) == len(set(names))
        made = [make(asked(full_mesh(4, 1.0), (4, 4)), name).replace(name="") for name in names if "multi" not in name]
        assert len(set(made)) == len(made)
        assert "ring/late" not in names

    def test_as_many_are_refined_as_there_are_places(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Names that say how already, such as direct-kv/pieces1, take none from those that do not."""
        refined: list[str] = []

        def noted(call: CallToPlan, first: Judgement) -> Judgement:
            refined.extend(auto._worth_refining(call, first))
            return first

        monkeypatch.setattr(auto, "_refined", noted)
        some = ("direct-kv", "direct-q", "ring", "tokenring", "bidirectional")
        plan = plan_call(asked(full_mesh(4, 1.0), (8, 8), 8192, families=some, everything=True))
        best = [each.name for each in plan.candidates]
        assert len(best) == len(some) + 2 and "direct-kv/pieces1" in best[: auto.REFINED]
        assert refined[: auto.REFINED] == [name for name in best if "/pieces" not in name][: auto.REFINED]
        assert len(refined) == len(set(refined)) <= 2 * auto.REFINED

    def test_pieces_let_what_hid_little_overtake(self) -> None:
        """Two nodes and six heads: tiles cross with fewest bytes, but whole ones are only the eighth fastest."""
        asked = call(setting(two_node(4, 1.0, 0.25), workload(4, (6, 6), 128), tflops=2.0), tr.Causal())
        plan = plan_call(replace(asked, everything=True))
        whole = [each.name for each in plan.candidates if "/pieces" not in each.name and "/late" not in each.name]
        assert "tiles/2x2" in whole[auto.REFINED :]
        assert plan.name == plan_call(asked).name == "tiles/2x2/pieces4"

    def test_everything_simulates_everything(self) -> None:
        few, every = (plan_call(asked(full_mesh(4, 1.0), (4, 4), everything=flag)) for flag in (False, True))
        assert any(each.predicted_seconds is None for each in few.candidates)
        assert all(
            each.predicted_seconds is not None or each.reason.startswith("does not fit") for each in every.candidates
        )
        assert (few.name, few.candidates[0]) == (every.name, every.candidates[0])
        assert {each.name for each in few.candidates} <= {each.name for each in every.candidates}

    def test_what_was_not_simulated_could_not_win(self) -> None:
        every = plan_call(asked(full_mesh(4, 1.0), (4, 4), everything=True))
        times = {each.name: each.predicted_seconds or 0 for each in every.candidates}
        for each in plan_call(asked(full_mesh(4, 1.0), (4, 4))).candidates:
            if each.predicted_seconds is None:
                assert times[each.name] > times[every.name]
                assert "alone" in each.reason

    def test_ties_go_to_what_was_given_first(self) -> None:
        size = workload(4, (4, 4))
        one, other = named("ring", 4, size.q_length), named("direct-kv", 4, size.q_length)
        free = setting(full_mesh(4, 1e9), size, tflops=1e-3)  # kernels alone cost: all the same
        for first, second in ((one, other), (other, one)):
            choices = [Selection(each.name, lambda each=each: each) for each in (first, second)]  # type: ignore[misc]
            assert select(choices, free).name == first.name

    @pytest.mark.parametrize(("tflops", "wanted"), [(1e9, "tiles/2x4"), (1e-4, "ring")])
    def test_of_nearly_equal_ones_the_one_that_depends_less_on_a_wire(self, tflops: float, wanted: str) -> None:
        """Where wires decide; not where kernels hide them."""
        size = workload(8, (6, 6), 256)
        asked_for = setting(switch(8, 1.0), size, tflops=tflops)
        judged = []
        a_while = least_seconds(named("ring", 8, size.q_length), asked_for).wire_seconds
        for name, times in (("ring", 0.99), ("tiles/2x4", 1.0)):
            schedule = named(name, 8, size.q_length)
            prediction = replace(predict(schedule, asked_for), seconds=times * a_while)
            judged.append(Judged(name, schedule, least_seconds(schedule, asked_for), prediction))
        judged.sort(key=lambda each: each.weighed_seconds)
        plan = decide(Judgement(tuple(judged)), asked_for, None, None)
        assert plan.name == wanted
        if wanted == "ring":
            assert plan.candidates[0].reason.startswith("the fastest, bound by ")
        else:
            assert plan.candidates[0].reason == "nearly the fastest, and less depends on its busiest wire"
            assert plan.candidates[1].reason.startswith("-1%, at more risk: its busiest wire needs ")

    @pytest.mark.parametrize(
        ("tflops", "gbs", "latency", "says"),
        [
            (1e-4, 1.0, 0.0, "bound by kernels (100% of the time)"),
            (1e9, 1.0, 0.0, "bound by wire 0:"),
            (1e9, 1e3, 1e-3, "bound by messages and waits (kernels 0%, wire 0:"),
        ],
    )
    def test_says_what_binds_it(self, tflops: float, gbs: float, latency: float, says: str) -> None:
        """The winner, in the table and in the one line, with the name of the wire."""
        messages = Messages(latency_seconds=latency)
        size = setting(full_mesh(4, gbs), workload(4, (4, 4)), tflops=tflops, messages=messages)
        plan = plan_call(call(size, tr.Full(), "contiguous", families=("ring", "direct-kv")))
        reason = plan.candidates[0].reason
        assert reason.startswith(f"the fastest, {says}") and "wire none" not in reason
        what = re.escape(reason.removeprefix('the fastest, '))
        assert re.search(f", {what}; (next|all others take more than) ", plan.reason) and "\n" not in plan.reason

    @pytest.mark.parametrize(
        ("passes", "back_gbs", "says"),
        [
            (("forward",), 0.75, "bound by wire 0:0>1 ("),
            (("backward",), 0.75, "bound by wire 0:1>0 ("),
            (BOTH, 0.75, "bound by wires 0:0>1 in forward and 0:1>0 in backward ("),
            (BOTH, 1.5, "bound by wire 0:0>1 ("),
            (BOTH, 1.0, "bound by wire 0:0>1 ("),  # in backward both need as long
            (BOTH, 0.25, "bound by wires 0:0>1 in forward and 0:1>0 in backward ("),
        ],
    )
    def test_says_which_pass_a_wire_binds(self, passes: Sequence[Pass], back_gbs: float, says: str) -> None:
        """KV goes up in both passes, its gradient comes down in backward: no wire is the busiest of both."""
        size = workload(2, (4, 4))
        kv_bytes = 2 * size.kv_length // 2 * 4 * 64 * 2
        fabric = LinkFabric(2, {(0, 1): ("0>1",), (1, 0): ("1>0",)}, {"0>1": 1.0, "1>0": back_gbs})
        asked_for = setting(of_one_host("slower back", fabric), size, passes)
        schedule = named("direct-kv/pieces1", 2, size.q_length, tr.Causal())
        found = select([Selection("direct-kv", lambda: schedule)], asked_for)
        assert found.candidates[0].reason.startswith(f"the fastest, {says}")
        up, back = ("forward" in passes) + 1.0, 1 / back_gbs
        wires = predict(schedule, asked_for).wires
        if len(passes) == 2:
            assert (wires.worst, wires.worst_bytes) == (("0:0>1", 2 * kv_bytes) if up > back else ("0:1>0", kv_bytes))
        slowest = [1.0 if direction == "forward" else max(1.0, back) for direction in passes]
        assert wires.seconds == pytest.approx(sum(slowest) * kv_bytes / 1e9)

    def test_says_of_what_loses_by_wires_which_these_are(self) -> None:
        """One wire, or one of each pass."""
        one = Busiest("a", 3, (OfPass("forward", "a", 1e-3), OfPass("backward", "a", 2e-3)))
        two = one._replace(of_passes=(OfPass("forward", "b", 1e-3), one.of_passes[1]))
        assert wires_need(one) == "its busiest wire needs 3 ms"
        assert wires_need(two, " alone") == "the busiest wires of its passes alone need 3 ms"

    def test_nothing_to_choose_from(self) -> None:
        with pytest.raises(ConfigurationError, match="no schedule to choose from"):
            select([], setting(full_mesh(2, 1.0), workload(2)))


class TestMemory:
    def test_excludes_what_does_not_fit(self) -> None:
        free = plan_call(asked(full_mesh(4, 1.0), (4, 4), everything=True))
        sizes = {each.name: each.peak_bytes for each in free.candidates if each.peak_bytes is not None}
        limit = sizes[free.name] - 1
        plan = plan_call(asked(full_mesh(4, 1.0), (4, 4), everything=True, memory_limit_bytes=limit))
        assert plan.name != free.name
        assert sizes[plan.name] <= limit
        lost = next(each for each in plan.candidates if each.name == free.name)
        assert lost.reason == f"needs {mb_text(limit + 1)} a rank, more than the limit of {mb_text(limit)}"

    def test_what_fits_exactly_is_taken(self) -> None:
        free = plan_call(asked(full_mesh(4, 1.0), (4, 4)))
        limit = free.candidates[0].peak_bytes
        assert plan_call(asked(full_mesh(4, 1.0), (4, 4), memory_limit_bytes=limit)).name == free.name

    def test_nothing_fits(self) -> None:
        with pytest.raises(ConfigurationError, match=r"no schedule fits in .* a rank; the smallest needs .*: raise"):
            plan_call(asked(full_mesh(4, 1.0), (4, 4), memory_limit_bytes=64))


class TestRestriction:
    def test_families_and_members(self) -> None:
        plan = plan_call(asked(full_mesh(4, 1.0), (4, 4), families=("ring", "usp/2"), everything=True))
        assert {each.name.split("/")[0] for each in plan.candidates} == {"ring", "usp"}

    def test_members_that_heads_do_not_fit_are_left(self) -> None:
        """3 heads do not split in two; the ring is still there."""
        plan = plan_call(asked(full_mesh(4, 1.0), (3, 3), families=("usp/2", "ring")))
        assert plan.name.startswith("ring")
        (lost,) = (each for each in plan.candidates if each.name == "usp/2")
        assert lost.reason.startswith("does not fit: schedule 'usp/2': 3 query heads")

    def test_nothing_of_it_fits(self) -> None:
        with pytest.raises(ConfigurationError, match="no schedule fits: usp/2: does not fit"):
            plan_call(asked(full_mesh(4, 1.0), (3, 3), families=("usp/2",)))
        with pytest.raises(ConfigurationError, match="auto was restricted to relay"):
            plan_call(asked(full_mesh(4, 1.0), (4, 4), families=("relay",)))

    def test_names_with_options_are_taken_as_they_are(self) -> None:
        plan = plan_call(asked(full_mesh(4, 1.0), (4, 4), families=("ring/pieces2",), everything=True))
        assert [each.name for each in plan.candidates] == ["ring/pieces2"]

    def test_meshes_on_a_host_of_pairs(self) -> None:
        """Pairs of dies are no mesh of two dimensions; the whole host is."""
        net = interconnect_of(preset("atlas-a3"))
        assert "mesh-kv/4x4" in first_names(asked(net, (16, 16), families=("mesh-kv",)))

    @pytest.mark.parametrize(
        ("text", "wanted"), [("auto", ()), ("auto:ring", ("ring",)), ("auto:ring,usp/2", ("ring", "usp/2"))]
    )
    def test_reads(self, text: str, wanted: tuple[str, ...]) -> None:
        assert restricted(text) == wanted

    @pytest.mark.parametrize("text", ["ring", "auto:", "auto:spiral", "automatic"])
    def test_refuses(self, text: str) -> None:
        with pytest.raises(ConfigurationError):
            restricted(text)


DETERMINISTIC = """
from test_planner_auto import asked
from tokenring.planner.choosing.auto import plan_call
from tokenring.planner.interconnects.interconnect import full_mesh
print(hash("full_mesh"))
print(plan_call(asked(full_mesh(4, 1.0), (6, 3), everything=True)).to_json())
"""


def test_the_same_plan_in_every_process(warm: str) -> None:
    """Also where sets of names iterate in another order."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [warm, "-c", DETERMINISTIC]
    other = subprocess.run(command, env=environment, capture_output=True, check=True, text=True, timeout=patient(60))
    hashed, found = other.stdout.split("\n", 1)
    assert int(hashed) != hash("full_mesh") or "PYTHONHASHSEED" in os.environ
    mine = plan_call(asked(full_mesh(4, 1.0), (6, 3), everything=True)).to_json()
    assert found == f"{mine}\n" and '"candidates"' in mine


# ---------- a plan as JSON


@pytest.fixture(scope="module")
def plan() -> Plan:
    both = setting(full_mesh(4, 1.0), workload(4, (4, 2), 16), BOTH)
    return plan_call(call(both, tr.Causal()))


class TestJson:
    def test_round_trip(self, plan: Plan, tmp_path: Path) -> None:
        unknown = replace(plan, candidates=(replace(plan.candidates[0], predicted_seconds=None),))
        assert Plan.from_json(plan.to_json()) == plan and Plan.from_json(unknown.to_json()) == unknown
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
        assert Plan.load(str(tmp_path / "plan.json")).schedule.verify()

    def test_its_candidates_are_those_of_the_issue(self, plan: Plan) -> None:
        first = json.loads(plan.to_json())["candidates"][0]
        assert list(first) == [
            "name", "predicted_seconds", "compute_seconds", "exposed_seconds", "worst_link_bytes", "peak_bytes",
            "bound_seconds", "reason", "connections", "connection_bytes",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (lambda found: found | {"format": "a song"}, "this is not a plan"),
            (lambda found: found | {"version": 2}, "the plan has version 2, this reads version 1"),
            (lambda found: found | {"version": None}, "version None"),
            (lambda found: found | {"schedule": None}, "has no schedule"),
            (lambda found: found | {"schedule": {}}, "document"),
            (lambda found: found | {"schedule": 7}, "document"),
            (lambda found: found | {"workload": 7}, "not whole"),
            (lambda found: found | {"workload": found["workload"] | {"dtype": "load"}}, "dtype 'load'"),
            (lambda found: found | {"workload": found["workload"] | {"q_heads": "4"}}, "must be a positive integer"),
            (lambda found: found | {"workload": found["workload"] | {"extra": 1}}, "not whole"),
            (lambda found: found | {"candidates": 7}, "not whole"),
            (lambda found: found | {"candidates": [7]}, "not whole"),
            (lambda found: found | {"candidates": ["x"]}, "not whole .*a candidate is 'x'"),
            (lambda found: found | {"candidates": [["x"]]}, "not whole"),
            (lambda found: found | {"candidates": [{}]}, "not whole"),
            (lambda found: {key: value for key, value in found.items() if key != "reason"}, "not whole"),
            (lambda found: [found], "this is not a plan"),
            (lambda found: None, "this is not a plan"),
        ],
    )
    def test_refuses(self, plan: Plan, change: Callable[[dict[str, object]], object], why: str) -> None:
        with pytest.raises(TokenRingError, match=why):
            Plan.from_json(json.dumps(change(json.loads(plan.to_json()))))

    def test_refuses_broken_text(self, plan: Plan) -> None:
        text = plan.to_json()
        for broken in ("", text[: len(text) // 2], text + "}", "[" * 100_000, '{"format": ' + "1" * 5000 + "}", "\0"):
            with pytest.raises(TokenRingError, match="this is not a plan"):
                Plan.from_json(broken)

    def test_refuses_files(self, plan: Plan, tmp_path: Path) -> None:
        (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
        for name in ("missing", "bytes", "."):
            with pytest.raises(ConfigurationError, match="cannot read the plan"):
                Plan.load(tmp_path / name)
        with pytest.raises(ConfigurationError, match="cannot write"):
            plan.save(tmp_path / "missing" / "plan.json")

    def test_a_schedule_alone_is_no_plan(self, plan: Plan) -> None:
        with pytest.raises(ConfigurationError, match="this is not a plan"):
            Plan.from_json(plan.schedule.to_json())
