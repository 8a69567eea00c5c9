"""`tokenring plan --layer`: the operators of one transformer layer, each on its group's part of the wires."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tokenring.cli.main import main
from tokenring.cli.models import ALSO, KNOWN
from tokenring.cli.plan.command import given_options, options_parser
from tokenring.cli.plan.layer import AskedLayer, PlannedLayer, planned_layer
from tokenring.cli.plan.layer_picture import PARTS, layer_svg, parts_of
from tokenring.display.svg import _width
from tokenring.planner.choosing.linear import CANDIDATES, ranked
from tokenring.planner.interconnects.interconnect import Interconnect, LinkFabric, of_one_host
from tokenring.planner.interconnects.rank_order import narrowest_group
from tokenring.planner.layers.layer import ATTENTION, DOWN, OUT, QKV, UP, LayerCall, plan_layer
from tokenring.planner.simulation.operations import Await, Costs, Operation, SimulatedPost
from tokenring.planner.simulation.predict import Setting, lowered, predict
from tokenring.planner.simulation.simulate import simulate
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule

FORWARD = [QKV, ATTENTION, OUT, UP, DOWN]
TREE = ("--topology", "preset:l40s-pcie-8", "--tp", "4", "--cp", "2", "--seq", "16k")
SMALL = ("--topology", "preset:a10-pix-4", "--tp", "4", "--pass", "forward")
LLAMA = ("--layer", "llama3-8b")
DOCS = Path(__file__).resolve().parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def run(*words: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    return main(["plan", *words], out, err, StringIO()), out.getvalue(), err.getvalue()


@cache
def found(*words: str) -> Any:
    code, out, err = run(*words, "--json")
    assert code == 0, err
    return json.loads(out)


@cache
def planned(*words: str) -> PlannedLayer:
    parser = options_parser()
    return planned_layer(parser.parse_args(words), given_options(parser, words), {})


def of(data: Any, operator: str, key: str) -> list[Any]:
    return [each[key] for each in data["operators"] if each["operator"] == operator]


class TestTable:
    def test_one_row_for_each_pass_of_each_operator(self) -> None:
        data = found(*LLAMA, *TREE)
        rows = [(each["pass"], each["operator"]) for each in data["operators"]]
        assert rows == [("forward", each) for each in FORWARD] + [("backward", each) for each in reversed(FORWARD)]
        assert [each["kind"] for each in data["operators"][:5]] == ["column", "attention", "row", "column", "row"]
        for each in data["operators"]:
            assert each["ranks"] == ([0, 4] if each["operator"] == ATTENTION else [0, 1, 2, 3])

    def test_the_sum_is_that_of_the_rows(self) -> None:
        data = found(*LLAMA, *TREE)
        for key in ("seconds", "compute_seconds", "exposed_seconds", "sent_bytes"):
            assert data[key] == pytest.approx(sum(each[key] for each in data["operators"]), rel=1e-12) and data[key] > 0
        for way, seconds in data["unfused_seconds"].items():
            each_way = (each["unfused_seconds"].get(way, each["seconds"]) for each in data["operators"])
            assert seconds == pytest.approx(sum(each_way), rel=1e-12)
        assert all((each["unfused_seconds"] == {}) == (each["operator"] == ATTENTION) for each in data["operators"])

    def test_sizes_follow_from_the_model(self) -> None:
        data = found(*LLAMA, *TREE)
        assert data["features"] == {QKV: (32 + 2 * 8) * 128, OUT: 32 * 128, UP: 2 * 14336, DOWN: 14336}
        assert (data["width"], data["tokens_of_tp_group"]) == (4096, 8192)
        of_a_rank = data["attention"]
        assert (of_a_rank["q_heads"], of_a_rank["kv_heads"], of_a_rank["q_length"]) == (8, 2, 16384)

    def test_linear_layers_cost_what_they_do_alone(self) -> None:
        """As --operator prices them: of a column layer x and dx move, of a row layer y and dy."""
        alone = ("--topology", "preset:a10-pix-4", "--seq", "4k")
        data = found(*LLAMA, *alone, "--tp", "4")
        for operator, kind in ((QKV, "column"), (OUT, "row")):
            sizes = ("--features", str(data["features"][operator]), "--width", "4096")
            weights = ("--schedules", ",".join(CANDIDATES["weights"]))
            best = found("--operator", kind, *alone, *sizes, *weights)
            assert set(of(data, operator, "schedule")) == {best["schedules"][0]["name"]}
            assert sum(of(data, operator, "seconds")) == pytest.approx(best["schedules"][0]["seconds"])
            for way, seconds in best["unfused_seconds"].items():
                assert sum(each[way] for each in of(data, operator, "unfused_seconds")) == pytest.approx(seconds)
            sent = of(data, operator, "sent_bytes")
            shard = 4096 * 4096 * 2 // 4
            assert sorted(sent) == [3 * shard, (2 if kind == "column" else 1) * 3 * shard]

    def test_attention_costs_what_it_does_alone(self) -> None:
        data = found(*LLAMA, *TREE)
        best = found("--model", "llama3-8b", *TREE[:4], "--seq", "16k")["candidates"][0]
        assert set(of(data, ATTENTION, "schedule")) == {best["name"]}
        assert sum(of(data, ATTENTION, "seconds")) == pytest.approx(best["predicted_seconds"])
        assert data["attention_bound_seconds"] == pytest.approx(best["bound_seconds"])

    def test_the_text_says_the_same(self) -> None:
        data, (code, text, _) = found(*LLAMA, *TREE), run(*LLAMA, *TREE)
        attention = of(data, ATTENTION, "schedule")[0]
        assert code == 0 and text.startswith("one layer of llama-3.1-8b, tp 4 × cp 2, on l40s-pcie-8\n")
        rows = [line.split() for line in text.splitlines() if line.startswith(("forward", "backward"))]
        assert [row[:2] for row in rows] == [[each["pass"], each["operator"]] for each in data["operators"]]
        assert [row[5] for row in rows] == [each["schedule"] for each in data["operators"]]
        for said in (
            "tp: 2 groups of 4 neighbours, inside a host, all at once: no wire is shared",
            "cp: 4 groups of 2, 4 apart, inside a host, all at once: up to 4 share a wire, evenly",
            f'tr.ContextParallel(layout="zigzag", schedule="{attention}", tensor_parallel=4)\n',
            f"× as fast as with linear layers {min(data['unfused_seconds'], key=data['unfused_seconds'].__getitem__)}",
        ):
            assert said in text

    def test_the_page_shows_what_is_printed(self) -> None:
        page = (DOCS / "layer.md").read_text(encoding="utf-8")
        _, _, shown = page.partition(f"$ tokenring plan {' '.join((*LLAMA, *TREE))}\n")
        assert shown.partition("```")[0] == run(*LLAMA, *TREE)[1]

    @pytest.mark.parametrize(("tp", "cp"), [("1", "4"), ("4", "1")])
    def test_one_of_the_two_alone(self, tp: str, cp: str) -> None:
        words = (*LLAMA, "--topology", "preset:a10-pix-4", "--tp", tp, "--cp", cp, "--pass", "forward", "--seq", "8k")
        data, text = found(*words), run(*words)[1]
        sent = {each["operator"]: each["sent_bytes"] for each in data["operators"]}
        assert (sent[ATTENTION] == 0, sent[QKV] == 0) == (cp == "1", tp == "1")
        assert bool(data["unfused_seconds"]) == ("unfused" in text) == (tp == "4")
        assert ("the weights stay" in text, "where weights stay" in text) == (tp == "4", tp == "4")
        assert ("tr.TensorParallel(" in text, "tr.ContextParallel(" in text) == (tp == "4", cp == "4")

    def test_samples_are_rows_of_linear_layers(self) -> None:
        one, two = (found(*LLAMA, *SMALL, "--seq", seq, "--batch", batch) for seq, batch in (("8k", "1"), ("4k", "2")))
        assert of(one, UP, "seconds") == of(two, UP, "seconds")
        assert sum(of(two, ATTENTION, "seconds")) < 0.7 * sum(of(one, ATTENTION, "seconds"))

    def test_a_config_of_its_own(self, tmp_path: Path) -> None:
        config = {
            "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "num_hidden_layers": 2,
            "head_dim": 32, "intermediate_size": 1024, "hidden_act": "gelu",
        }  # fmt: skip
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        data = found("--layer", str(path), *SMALL, "--seq", "1k", "--mask", "window(127,0)")
        assert data["features"] == {QKV: (8 + 2 * 4) * 32, OUT: 256, UP: 1024, DOWN: 1024}  # kv heads are repeated
        assert (data["mask"], data["width"]) == ("window(127,0)", 512)

    def test_layers_of_another_kind_are_named(self) -> None:
        words = ("--layer", "gemma-2-9b", *SMALL, "--seq", "2k")
        assert 'for sliding_attention say --mask "window(4095,0)"' in run(*words)[1]
        assert "sliding" not in run(*words, "--mask", "window(4095,0)")[1]


class TestCouplings:
    """Forward of a 8B's MLP on four A10: what stays is chosen for the pair."""

    @pytest.mark.parametrize(("seq", "stays", "against"), [("12k", "weights", DOWN), ("16k", "tokens", UP)])
    def test_both_layers_leave_the_same_in_place(self, seq: str, stays: str, against: str) -> None:
        asked = planned(*LLAMA, *SMALL, "--seq", seq).asked
        data = found(*LLAMA, *SMALL, "--seq", seq)
        assert data["stays"] == {QKV: "weights", UP: stays}
        for operator in (UP, DOWN):
            assert set(of(data, operator, "schedule")) <= set(CANDIDATES[stays])
        both = sum(of(data, UP, "seconds")) + sum(of(data, DOWN, "seconds"))
        assert data["pair_seconds"][UP][stays] == pytest.approx(both)
        assert data["pair_seconds"][UP][stays] == min(data["pair_seconds"][UP].values())
        kind = "row" if against == DOWN else "column"
        alone = ranked(kind, asked.linears.setting(against, ("forward",)), sum(CANDIDATES.values(), ()))
        assert alone[0].name not in CANDIDATES[stays], "alone it would leave the other in place"

    def test_weights_stay_around_attention(self) -> None:
        """Also where moving them is faster, as here for each of the two: heads are of ranks."""
        words = (*LLAMA, *SMALL, "--seq", "64k")
        linears = planned(*words).asked.linears
        for operator, kind in ((QKV, "column"), (OUT, "row")):
            best = ranked(kind, linears.setting(operator, ("forward",)), sum(CANDIDATES.values(), ()))[0]
            assert best.name in CANDIDATES["tokens"]
            assert set(of(found(*words), operator, "schedule")) <= set(CANDIDATES["weights"])


def groups_of(asked: AskedLayer, kind: str) -> list[range]:
    tp, world = asked.tensor_parallel, asked.net.world_size
    if kind == "cp":
        return [range(at, world, tp) for at in range(tp)]
    return [range(at, at + tp) for at in range(0, world, tp)]


def all_at_once(schedule: Schedule, setting: Setting, asked: AskedLayer, groups: Sequence[Sequence[int]]) -> float:
    """Seconds of one pass where every group runs the schedule, simulated together on the wires of all."""
    (direction,) = setting.passes
    costs = Costs(schedule, setting.workload, direction, setting.machine.rates)
    own = [costs.operations(each) for each in lowered(schedule, setting, direction)]
    programs: list[list[Operation]] = [[] for _ in range(asked.net.world_size)]
    for at, ranks in enumerate(groups):
        for rank, operations in zip(ranks, own, strict=True):
            for each in operations:
                if isinstance(each, SimulatedPost):
                    each = each._replace(peer=ranks[each.peer], message=each.message * len(groups) + at)
                elif isinstance(each, Await):
                    each = each._replace(message=each.message * len(groups) + at)
                programs[rank].append(each)
    machine = setting.machine
    return simulate(
        asked.net, programs, machine.messages, cores=machine.shared_cores, kernels_share=machine.kernels_share,
        start_seconds=machine.start_seconds,
    ).seconds  # fmt: skip


class TestSharedWires:
    def test_groups_slow_each_other(self) -> None:
        """Four cp groups share the uplinks of a PCIe tree: one alone would take less, and so the layer."""
        plan = planned(*LLAMA, *TREE)
        call, ranks = plan.asked.attention.call, (0, 4)
        assert found(*LLAMA, *TREE)["groups_on_one_wire"] == {"tp": 1, "cp": 4}
        whole = plan.asked.net
        alone = Interconnect("alone", whole.fabrics, tuple(whole.places[rank] for rank in ranks))
        schedule = make_schedule(plan.plan.schedule_of(ATTENTION), call.q_layout, call.kv_layout, call.mask)
        lone = plan_layer(LayerCall(replace(call.setting, interconnect=alone), schedule, plan.asked.linears))
        seconds = [sum(each.seconds for each in of.costs if each.operator == ATTENTION) for of in (lone, plan.plan)]
        assert seconds[0] < 0.9 * seconds[1]
        assert plan.plan.seconds - lone.seconds == pytest.approx(seconds[1] - seconds[0])

    @pytest.mark.parametrize(
        "words",
        [
            pytest.param(TREE, id="a PCIe tree"),
            pytest.param(("--topology", "preset:a10-pix-4*2", "--tp", "2", "--cp", "4", "--seq", "8k"), id="NICs"),
            pytest.param(
                ("--topology", "preset:dgx-1-v100", "--tp", "4", "--cp", "2", "--seq", "8k", "--dtype", "fp32"),
                id="links of several widths",
            ),
        ],
    )  # fmt: skip
    def test_prices_are_those_of_all_groups_simulated_together(self, words: tuple[str, ...]) -> None:
        """A group's part of each wire gives the time at which the last of all groups is done."""
        asked = planned(*LLAMA, *words).asked
        call = asked.attention.call
        for name in ("ring", "ulysses"):
            schedule = make_schedule(name, call.q_layout, call.kv_layout, call.mask)
            setting = replace(call.setting, passes=("forward",))
            together = all_at_once(schedule, setting, asked, groups_of(asked, "cp"))
            assert predict(schedule, setting).seconds == pytest.approx(together, rel=1e-9)
        for kind, operator in (("column", UP), ("row", DOWN)):
            setting = asked.linears.setting(operator, ("forward",))
            for each in ranked(kind, setting, ("direct-q", "tokenring")):
                together = all_at_once(each.schedule, setting, asked, groups_of(asked, "tp"))
                assert each.prediction.seconds == pytest.approx(together, rel=1e-9)

    def test_the_narrowest_group_stands_for_all(self) -> None:
        words = ("--topology", "preset:dgx-1-v100", "--tp", "4", "--cp", "2", "--seq", "8k", "--dtype", "fp32")
        data, text = found(*LLAMA, *words), run(*LLAMA, *words)[1]
        assert of(data, ATTENTION, "ranks")[0] == [2, 6]
        assert "the ways of cp group 2,6 are the narrowest: it stands for all" in text
        net = planned(*LLAMA, *words).asked.net
        widths = {ranks: net.pair_gbs(*ranks) for ranks in ((0, 4), (1, 5), (2, 6), (3, 7))}
        assert min(widths, key=widths.__getitem__) == (2, 6)

    def test_of_equal_ways_those_that_share_a_wire_are_narrower(self) -> None:
        """Three ranks with links of their own, and three behind a port each, as wide as a link."""
        groups = (range(3), range(3, 6))
        own, behind = ([(a, b) for a in ranks for b in ranks if a != b] for ranks in groups)
        ways = {(a, b): (f"{a}>{b}",) for a, b in own} | {(a, b): (f"{a}>port", f"port>{b}") for a, b in behind}
        gbs = {wire: 25.0 for way in ways.values() for wire in way}
        net = of_one_host("by hand", LinkFabric(6, ways, gbs))
        assert narrowest_group(net, groups)[1] == groups[1]


OF_OTHERS = (
    ("--operator", "row"), ("--model", "llama3-8b"), ("--heads", "8"), ("--features", "8k"), ("--width", "8k"),
    ("--ranks", "4"), ("--wire", "mxfp8"), ("--cached", "4k"), ("--schedules", "ring"), ("--sweep", "seq=8k..16k"),
    ("--timeline", "x.svg"), ("--transport", "nccl"), ("--memory-limit", "8G"), ("--save", "x.json"),
)  # fmt: skip
REFUSED: dict[tuple[str, ...], str] = {
    ("--layer", "llama4", *SMALL): "--layer llama4: there is no such file, and the models known by name are llama-3.1",
    ("--layer", "deepseek-v3", *SMALL): "--layer deepseek-v3: its layers are not attention between two linear layers",
    (*LLAMA, "--topology", "preset:a10-pix-4", "--tp", "3"): "--tp 3: 32 query heads of llama-3.1-8b do not divide by",
    (*LLAMA, "--topology", "preset:hgx-h100", "--tp", "4", "--cp", "3"):
        "--tp 4 × --cp 3 are 12 ranks: hgx-h100 has 8; take fewer, or name several hosts, as preset:NAME*4",
    (*LLAMA, "--topology", "preset:a10-pix-4", "--tp", "8"): "tensor parallelism of 8 does not fit hosts of 4 ranks",
    (*LLAMA, "--topology", "preset:a10-pix-4", "--tp", "0"): "--tp 0: use 1 to 64, which are simulated",
    (*LLAMA, "--topology", "preset:a10-pix-4", "--cp", "0"): "--cp 0: use 1 to 64, which are simulated",
    (*LLAMA, "--topology", "preset:a10-pix-4", "--cp", "128"): "--cp 128: use 1 to 64, which are simulated",
    (*LLAMA, *SMALL, "--seq", "1001"): "--seq 1001: --tp 4 × --cp 1 ranks do not divide it",
    (*LLAMA, *SMALL, "--batch", "2", "--seq", "1002"): "--seq 1002: --tp 4 × --cp 1 ranks do not divide it",
    (*LLAMA, *SMALL, "--dtype", "fp16"): "--dtype fp16: the linear layers of --layer take fp32 and bf16",
    (*LLAMA, *SMALL, "--layout", "spiral"): "unknown layout 'spiral'; choose one of",
    ("--cp", "2", "--topology", "preset:a10-pix-4"): "--cp goes with --layer; of attention alone say --ranks",
    **{(*LLAMA, *SMALL, *given): f"{given[0]} does not go with --layer, whose sizes are" for given in OF_OTHERS},
}  # fmt: skip


def test_help_lists_the_names_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # else names are broken at their hyphens
    shown = " ".join(run("--help")[1].split())
    assert all(f"{name}," in shown or f"{name}." in shown for name in (*KNOWN, *ALSO))


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_refused(words: tuple[str, ...]) -> None:
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"tokenring: {REFUSED[words]}")


class TestPicture:
    def test_bars_are_the_rows(self) -> None:
        plan = planned(*LLAMA, *TREE).plan
        root = ElementTree.fromstring(layer_svg(planned(*LLAMA, *TREE)))
        boxes = [each for each in root.iter(f"{SVG}rect") if each.attrib["class"] in PARTS]
        bars = boxes[: -len(PARTS)]  # the last are the legend's
        scale = (620 - 2 * 24) / plan.seconds
        wanted = [(part, seconds) for each in plan.costs for part, seconds in parts_of(each).items() if seconds > 0]
        assert [each.attrib["class"] for each in bars] == [part for part, _ in wanted]
        for bar, (_, seconds) in zip(bars, wanted, strict=True):
            assert float(bar.attrib["width"]) == pytest.approx(max(0.8, seconds * scale), abs=0.06)
        assert float(bars[-1].attrib["x"]) + float(bars[-1].attrib["width"]) == pytest.approx(620 - 24, abs=1)
        text = [each.text or "" for each in root.iter(f"{SVG}text")]
        for each in plan.costs:
            assert sum(line.startswith(f"{each.operator}: {each.schedule}, ") for line in text) == 2

    @pytest.mark.parametrize("words", [TREE, (*SMALL, "--seq", "8k")], ids=["tp and cp", "tp"])
    def test_no_text_leaves_it_or_meets_another(self, words: tuple[str, ...]) -> None:
        """As wide as the widest font makes them."""
        root = ElementTree.fromstring(layer_svg(planned(*LLAMA, *words)))
        ends: dict[str, list[tuple[float, float]]] = {}
        for each in root.iter(f"{SVG}text"):
            size, x = float(each.attrib["font-size"]), float(each.attrib["x"])
            wide = _width(each.text or "", size, "font-weight" in each.attrib)
            left = x - wide * {"end": 1.0, "middle": 0.5}.get(each.attrib.get("text-anchor", ""), 0.0)
            ends.setdefault(each.attrib["y"], []).append((left, left + wide))
        for line in ends.values():
            line.sort()
            assert line[0][0] >= 0 and line[-1][1] <= 620
            assert all(one[1] <= other[0] for one, other in pairwise(line))

    def test_parts_are_the_whole(self) -> None:
        for each in planned(*LLAMA, *TREE).plan.costs:
            assert sum(parts_of(each).values()) == pytest.approx(each.seconds)
            assert parts_of(each)["exposed"] == each.exposed_seconds

    def test_in_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "layer.svg"
        assert run(*LLAMA, *TREE, "--svg", str(path))[0] == 0
        assert path.read_text(encoding="utf-8") == layer_svg(planned(*LLAMA, *TREE))
        assert (DOCS / "pictures/layer.svg").read_text(encoding="utf-8") == path.read_text(encoding="utf-8")
        assert "end the name in .svg" in run(*LLAMA, *TREE, "--svg", str(tmp_path / "layer.png"))[2]
