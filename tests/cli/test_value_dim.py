"""--value-dim of the commands, and what tables and bounds say of values of another width than keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_heads import MODELS

from tokenring import Plan
from tokenring.backends import measuring
from tokenring.backends.kernels.reference import Reference
from tokenring.backends.measuring import measured_rates
from tokenring.backends.table_keys import key_of
from tokenring.cli.bench.candidates import NotRun, RaceSetting, flops
from tokenring.cli.bench.peers import _causal
from tokenring.cli.bench.race import make_inputs
from tokenring.cli.bench.reference import reference
from tokenring.cli.bench.results import RaceCase
from tokenring.cli.bench.sleeping import Sleeping
from tokenring.cli.bench.table import case_text
from tokenring.cli.main import main
from tokenring.cli.plan.command import options_parser
from tokenring.cli.plan.options import ask
from tokenring.lowering.footprint import FLOPS_PER_PAIR, flops_per_pair
from tokenring.planner.bounds.cut import row_bytes
from tokenring.planner.choosing.kept_plans import digest
from tokenring.sequence.mask import Causal
from tokenring.sequence.region import Patch
from tokenring.sequence.workload import Workload
from tokenring.tables.kernel_rates import KernelKey, keep, kept, to_json
from tokenring.tables.rates import constant

CPU = torch.device("cpu")
VALUES = ["--value-dim", "128"]
SIZES = ["--seq", "8k", "--heads", "16", "--dim", "192"]
PLAN = ["plan", "--topology", "preset:hgx-h100", "--ranks", "4", "--no-cache", *SIZES]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_a_plan_is_of_both_widths(capsys: pytest.CaptureFixture[str]) -> None:
    """Less to send and to compute; its JSON says the width only where it is another."""
    text = said(capsys, *PLAN, *VALUES)
    assert "16:16 heads × 192/128" in text
    plans = [json.loads(said(capsys, *PLAN, "--json", *more)) for more in (VALUES, [])]
    narrow, wide = (Plan.from_json(json.dumps(each)) for each in plans)
    assert narrow.workload == replace(wide.workload, value_dim=128)
    assert plans[0]["workload"]["value_dim"] == 128 and "value_dim" not in plans[1]["workload"]
    rings = [next(each for each in plan.candidates if each.name == "ring") for plan in (narrow, wide)]
    assert (rings[0].worst_link_bytes or 0) * 384 == (rings[1].worst_link_bytes or 0) * 320
    assert (narrow.candidates[0].predicted_seconds or 9) < (wide.candidates[0].predicted_seconds or 0)
    same = json.loads(said(capsys, *PLAN, "--json", "--value-dim", "192"))
    assert same == plans[1]


def test_kept_plans_are_of_both_widths() -> None:
    """The digest by which a plan is found: another for another width, the same whether an equal one is said or not."""
    calls = [ask(options_parser().parse_args([*PLAN[1:], *more])).call for more in ([], VALUES, ["--value-dim", "192"])]
    plain, narrow, said_so = map(digest, calls)
    assert plain == said_so != narrow


def test_a_sweep_and_a_schedule_say_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    drawn = tmp_path / "sweep.svg"
    said(capsys, *PLAN, *VALUES, "--sweep", "seq=8k..8k", "--svg", str(drawn), "--schedules", "ring")
    assert "192/128" in drawn.read_text()
    text = said(capsys, "schedule", "ring", "--ranks", "4", "--length", "64", "--dim", "192", *VALUES)
    assert "kv heads of 192/128" in text
    assert main(["schedule", "ring", "--ranks", "4", "--value-dim", "0"]) == 2
    assert "--value-dim 0: use 1 or more" in capsys.readouterr().err


def test_rates_are_of_both_widths(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    key, wide = (KernelKey("a device", "a kernel", "bfloat16", 192, "2.13", dim) for dim in (128, None))
    assert str(key) == "a kernel on a device, bfloat16, head dim 192 (128 of values), torch 2.13"
    assert KernelKey("a device", "a kernel", "bfloat16", 192, "2.13", 192) == wide and "of values" not in str(wide)
    # As before there was such a field: tables that are kept are found.
    assert repr(wide) == "KernelKey(device='a device', kernel='a kernel', dtype='bfloat16', head_dim=192, torch='2.13')"
    assert key.file_name != wide.file_name == "rates-501601325b27ec54.json"
    assert "value_dim" not in to_json(constant(100.0), wide)
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    path = keep(constant(100.0), key, environment)
    assert kept(key, environment) == constant(100.0) and kept(wide, environment) is None
    assert said(capsys, *PLAN, *VALUES, "--rates", str(path))
    assert main([*PLAN, "--rates", str(path)]) == 2
    assert "the plan is for bf16 and head dim 192: measure these with `tokenring rates" in capsys.readouterr().err
    assert main([*PLAN, "--value-dim", "64", "--rates", str(path)]) == 2
    assert "rates --dtype bf16 --dim 192 --value-dim 64`" in capsys.readouterr().err
    assert key_of(Reference(), CPU, torch.bfloat16, 192, 128).value_dim == 128


def test_the_command_measures_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "COPY_BYTES", 1 << 16)
    command = ["rates", "--device", "cpu", "--dtype", "fp32", "--dim", "24", "--seconds", "1e-6", "--json"]
    found = json.loads(said(capsys, *command, "--value-dim", "16"))
    assert (found["key"]["head_dim"], found["key"]["value_dim"]) == (24, 16)
    assert len(list(tmp_path.rglob("rates-*.json"))) == 1
    assert main([*command, "--value-dim", "0"]) == 2
    assert "--value-dim 0: give a number above 0, of 4096 at most" in capsys.readouterr().err


class Clock:
    """One second for every 10^9 flops."""

    type, asynchronous, name = "cpu", False, "a clock"
    now = 0.0

    def clock(self) -> float:
        self.now += 1e-9
        return self.now


class Ticking(Reference):
    """Moves the clock and computes nothing."""

    name = "ticking"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def forward(self, q: Any, k: Any, v: Any, *, patch: Patch, scale: float) -> Any:
        assert q.shape[-1] == k.shape[-1] == 24
        self._pass(2 * q.shape[-1] + 2 * v.shape[-1], q, patch)
        return v, q[..., 0]

    def backward(self, dout, q, k, v, lse, delta, *, out=None, patch, scale):  # type: ignore[no-untyped-def]
        assert dout.shape[-1] == v.shape[-1] == 16
        self._pass(6 * q.shape[-1] + 4 * v.shape[-1], q, patch)
        return q, k, v

    def _pass(self, flops: int, q: torch.Tensor, patch: Patch) -> None:
        self.clock.now += 1e-5 + flops * q.shape[1] * patch.rows * patch.cols / 1e9


def test_a_measured_rate_is_of_the_flops_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measuring, "device_of", lambda _: clock)
    found = measured_rates(Ticking(clock), CPU, torch.float32, 24, seconds=0.02, value_dim=16)
    for samples in (found.forward, found.backward):
        assert [rate for _, rate in samples] == pytest.approx([1e-3] * len(samples), rel=0.01)
    taken = found.kernel_seconds(Patch(0, 64, 0, 64), 8, 24, 1, "backward", 16)
    assert taken == pytest.approx(1e-5 + 8 * 64 * 64 * (6 * 24 + 4 * 16) / 1e9, rel=0.01)


def test_flops_and_bounds() -> None:
    assert FLOPS_PER_PAIR == {"forward": 4, "backward": 10}
    assert [flops_per_pair(each, 192, 128) for each in ("forward", "backward")] == [640, 1664]
    size = Workload(1, 64, 32, 8, 4, 192, torch.bfloat16, 128)
    assert row_bytes(size) == (64 * 320 * 2, 32 * 320 * 2)
    deepseek = MODELS["deepseek-v3"].workload(1024)
    assert (deepseek.head_dim, deepseek.value_dim) == (192, 128)


CASE = RaceCase(
    seq_len=64, heads=4, kv_heads=2, head_dim=24, dtype="float32", mask="causal", batch=1, backward=True,
    layout="zigzag", transport="auto", pieces=None, schedules=["ring"], peers=[], rounds=1, value_dim=16,
)  # fmt: skip


def test_the_bench_races_them() -> None:
    q, k, v, dout = make_inputs(CASE)
    assert [x.shape[-1] for x in (q, k, v, dout)] == [24, 24, 16, 16]
    found = reference([q, k, v, dout], Causal(), True, 0, 1, torch.float64)
    assert {name: x.shape[-1] for name, x in found.items()} == {"out": 16, "dq": 24, "dk": 24, "dv": 16}
    assert case_text(CASE).startswith("forward and backward, 64 tokens, 4 query heads on 2 kv heads of 24/16, float32")
    assert RaceCase.of(CASE.to_dict()) == CASE and "value_dim" not in replace(CASE, value_dim=None).to_dict()
    assert flops(CASE, False) == 64 * 64 * 4 * (2 * 24 + 2 * 16 + 6 * 24 + 4 * 16)
    with pytest.raises(NotRun, match="for values that are as wide as keys only"):
        _causal(RaceSetting(CASE, 0, 2))
    assert _causal(RaceSetting(replace(CASE, value_dim=24), 0, 2))


def test_kernels_that_sleep_return_their_shapes() -> None:
    q, k, v = torch.empty(1, 4, 8, 24), torch.empty(1, 2, 8, 24), torch.empty(1, 2, 8, 16)
    kernel, patch = Sleeping(1e3), Patch(0, 8, 0, 8)
    out, lse = kernel.forward(q, k, v, patch=patch, scale=1.0)
    made = kernel.backward(out, q, k, v, lse, None, out=out, patch=patch, scale=1.0)
    assert [x.shape[-1] for x in (out, *made)] == [16, 24, 24, 16]
    assert kernel.supports_widths(24, 16, torch.float32) is None
