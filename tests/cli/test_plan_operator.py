"""`tokenring plan --operator`: layers and collectives, ranked as their simulated programs are."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tokenring.cli.plan.command import main
from tokenring.errors import ConfigurationError, TokenRingError
from tokenring.ir.operators import OPERATORS
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.planner.choosing import linear
from tokenring.planner.interconnects.interconnect import full_mesh
from tokenring.planner.simulation.predict import Setting, predict
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Full
from tokenring.sequence.workload import Workload
from tokenring.tables.launching import Launching
from tokenring.tables.rates import Machine, Messages, constant

SIZES = ["--seq", "2k", "--features", "1k", "--width", "512"]
REFUSED = {
    ("--operator", "colum"): "--operator colum: choose one of column, row, all-reduce, reduce-scatter, all-gather; did",
    ("--operator", "row", "--heads", "3"): "--heads does not go with --operator row, whose sizes are --seq, --features",
    ("--operator", "row", "--pass", "forward", "--bytes", "4"): "--bytes does not go with --operator row, whose sizes",
    ("--operator", "all-reduce", "--forward-only"): "--pass does not go with --operator all-reduce, whose sizes are",
    ("--operator", "row", "--seq", "1001"): "--seq 1001: 4 ranks do not divide it",
    ("--operator", "row", "--features", "6"): "--features 6: 4 ranks do not divide it",
    ("--operator", "row", "--dtype", "fp16"): "--dtype fp16: --operator row takes fp32 and bf16",
    ("--operator", "all_gather", "--schedules", "ring"): "--schedules ring: rows of a collective move, and those of",
    ("--operator", "row", "--schedules", "x"): "--schedules x: 'x' is not the name of a schedule (docs/layer.md)",
    ("--operator", "row", "--schedules", "usp/2"): "no schedule fits operator 'row' with these sizes: usp/2: ",
    ("--operator", "row", "--svg", "x.svg"): "--svg does not go with --operator row, whose sizes are",
    ("--operator", "row", "--wire", "mxfp"): "wire='mxfp': use one of bf16, fp16, mxint8, mxfp8",
    ("--operator", "row", "--width", "100", "--wire", "mxfp4"): "mxfp4 on the wire has blocks of 32 elements, which do",
    ("--operator", "row", "--wire", "fp16"): "fp16 on the wire has 16 bits an element, and saves nothing over torch.b",
    ("--operator", "all-reduce", "--wire", "bf16"): "bf16 on the wire has 16 bits an element, and saves nothing over",
    ("--wire", "mxfp8"): "--wire goes with --operator NAME",
    ("--width", "4"): "--width is a size of --operator NAME, and attention has none",
}


def plan(*more: str) -> int:
    return main(["--topology", "preset:hgx-h100", "--ranks", "4", *more])


def as_json(capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    assert plan(*more, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("operator", ["column", "row"])
def test_layers_are_ranked(operator: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--operator", operator, *SIZES)
    seconds = [each["seconds"] for each in found["schedules"]]
    assert seconds == sorted(seconds)
    assert (found["operator"], found["tokens"], found["features"], found["width"]) == (operator, 2048, 1024, 512)
    stays = {each["name"]: each["stays"] for each in found["schedules"]}
    assert stays.items() >= {"direct-q": "weights", "ring": "tokens", "tiles/2x2": "neither"}.items()
    assert list(found["unfused_seconds"]) == ["unfused, over a ring", "unfused, direct"]
    plan("--operator", operator, *SIZES)
    text = capsys.readouterr().out
    assert text.startswith(f"{operator}: 2,048 tokens × 1,024 features of width 512, bfloat16, forward + backward\n")
    assert f'tr.TensorParallel(schedule="{found["schedules"][0]["name"]}"); all times are predicted' in text


@pytest.mark.parametrize(
    ("operator", "errors"),
    [
        ("column", {"c": 0.0266, "dx": 0.0266, "dw": 0.0266}),
        ("row", {"y": 0.0266, "dc": 0.0266, "dw": 0.0266}),
    ],
)
def test_a_wire_format_has_fewer_bytes_and_an_error(
    operator: str, errors: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--operator", operator, *SIZES, "--schedules", "direct-q,direct-kv,tiles/2x2")
    plain, wired = (as_json(capsys, *given, *more) for more in ((), ("--wire", "mxfp8")))
    of = {each["name"]: each for each in wired["schedules"]}
    assert of["direct-q"]["added_error"] == pytest.approx(errors)
    assert of["direct-kv"]["added_error"] == pytest.approx(errors | {"dw": 0.0})
    twice = {each: error if each == "dw" else error * 2**0.5 for each, error in errors.items()}
    assert of["tiles/2x2"]["added_error"] == pytest.approx(twice)
    before = {each["name"]: each for each in plain["schedules"]}["direct-q"]
    assert before["busiest_wire_bytes"] >= 1.93 * of["direct-q"]["busiest_wire_bytes"]
    assert wired["wire"] == "mxfp8" and "wire" not in plain and "added_error" not in before
    plan(*given, "--schedules", "direct-q", "--wire", "mxfp8")
    text = capsys.readouterr().out
    assert "on the wire: kv, q, q_partial in mxfp8, 1.031 bytes an element; each is encoded once, with a" in text
    first = next(iter(errors))
    assert f"relative error that this adds, forward, for normally distributed data: about {first} 0.027" in text
    assert "predicted as one pass over memory each, which is the least they take" in text
    assert 'tr.TensorParallel(schedule="direct-q", wire="mxfp8"); all times are predicted' in text


@pytest.mark.parametrize("written", ["all-reduce", "all_reduce", "reduce-scatter", "all-gather"])
def test_collectives_are_ranked(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--operator", written, "--bytes", "64k", "--schedules", "direct-q,tokenring")
    assert (found["operator"], found["bytes"]) == (written.replace("_", "-"), 65536)
    busiest = {each["name"]: each["busiest_wire_bytes"] for each in found["schedules"]}
    assert set(busiest.values()) == {65536 * 3 // 4 * len(found["passes"])}  # a port carries all but a rank's own


@pytest.mark.parametrize(("written", "times"), [("all-reduce", 2), ("reduce-scatter", 1), ("all-gather", 1)])
def test_collectives_in_a_wire_format(written: str, times: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows are padded to whole blocks; two steps encode twice."""
    given = ("--operator", written, "--bytes", "64k", "--schedules", "direct-q")
    plain, wired = (as_json(capsys, *given, *more)["schedules"][0] for more in ((), ("--wire", "mxfp8")))
    assert plain["busiest_wire_bytes"] >= 1.93 * wired["busiest_wire_bytes"]
    assert wired["added_error"] == pytest.approx({"out": 0.0266 * times**0.5})
    plan(*given, "--wire", "mxfp8")
    said = f"in all, for normally distributed data: about out {0.0266 * times**0.5:.2g}"
    assert said in capsys.readouterr().out


def test_unfused_is_the_collectives_and_the_products() -> None:
    """Column gathers x in each pass and reduces dx; row reduces y and gathers dy."""
    size, net = Workload(1, 512, 256, 1, 1, 64, torch.float32), full_mesh(4, 1.0)
    machine = Machine(constant(0.1), Messages(20e-6, 10e-6))
    rows, columns = make_layout("contiguous", 4, 512), make_layout("contiguous", 4, 4)
    made = make_schedule("tokenring", rows, columns, Full()).replace(operator=OPERATORS["reduce"])
    of = Workload(1, 512, 4, 1, 1, 64, torch.float32)

    def seconds(one: Pass) -> float:
        return predict(made, Setting(of, net, machine, (one,))).seconds

    reduce, gather = seconds("forward"), seconds("backward")
    wanted: dict[tuple[str, tuple[Pass, ...]], float] = {
        ("column", ("forward",)): gather, ("column", ("forward", "backward")): 2 * gather + reduce,
        ("row", ("forward",)): reduce, ("row", ("forward", "backward")): reduce + gather,
    }  # fmt: skip
    for (operator, passes), moving in wanted.items():
        setting = Setting(size, net, machine, passes)
        assert linear.unfused_seconds(operator, setting, "tokenring", 0.5) == pytest.approx(moving + 0.5, rel=1e-12)


def test_unfused_counts_launches_of_products_that_nothing_hides() -> None:
    """Count it where a pass begins with one: dx of column, y of row. Others are launched while a collective moves."""
    size, rates = Workload(1, 512, 256, 1, 1, 64, torch.bfloat16), constant(0.1)
    launched = replace(rates, launching=Launching(1e-3, "npu-fusion"))
    wanted: dict[tuple[str, tuple[Pass, ...]], int] = {
        ("column", ("forward",)): 0, ("column", ("forward", "backward")): 1,
        ("row", ("forward",)): 1, ("row", ("backward",)): 0,
    }  # fmt: skip
    for (operator, passes), count in wanted.items():
        setting = Setting(size, full_mesh(4, 1.0), Machine(launched, Messages(20e-6, 10e-6)), passes)
        moving = sum(_moved(operator, each, setting) for each in passes)
        found = linear.unfused_seconds(operator, setting, "direct-q", 0.5)
        assert found == pytest.approx(moving + 0.5 + count * 1e-3, rel=1e-12)


def _moved(operator: str, direction: Pass, setting: Setting) -> float:
    """Return what the collectives of a pass take: column's backward has two."""
    rows, columns = make_layout("contiguous", 4, 512), make_layout("contiguous", 4, 4)
    made = make_schedule("direct-q", rows, columns, Full()).replace(operator=OPERATORS["reduce"])
    of = replace(setting, workload=Workload(1, 512, 4, 1, 1, 64, torch.bfloat16))
    by = {each: predict(made, replace(of, passes=(each,))).seconds for each in PASSES}
    gathers = operator == "column" or direction == "backward"
    reduces = (operator, direction) in (("column", "backward"), ("row", "forward"))
    return gathers * by["backward"] + reduces * by["forward"]


@pytest.mark.parametrize("options", REFUSED, ids=" ".join)
def test_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(TokenRingError) as caught:
        plan(*options)
    assert str(caught.value).startswith(REFUSED[options])


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="over 128 ranks: 64 at most are simulated"):
        main(["--topology", "preset:hgx-h100", "--ranks", "128", "--operator", "row"])
