"""Rates that are measured: what a table holds, where it is kept, who takes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tokenring.backends import measuring as measured
from tokenring.backends.kernels.reference import Reference
from tokenring.backends.measuring import measured_rates
from tokenring.backends.registry import make_kernel
from tokenring.backends.table_keys import key_of
from tokenring.cli.main import main
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.planner.choosing.planner import Planner
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Mask
from tokenring.sequence.region import Patch
from tokenring.sequence.workload import Request, Workload
from tokenring.tables.kernel_rates import KernelKey, keep, kept, read_table
from tokenring.tables.rates import Rates

CPU = torch.device("cpu")
KEY = KernelKey("a device", "a kernel", "float32", 64, "2.13")
TABLE = Rates("measured: by hand", ((16, 0.5), (64, 1.0)), ((16, 0.25), (64, 0.5)), 1e-5, 9.0, 1e-6)


class Clock:
    """A device whose kernels take 10 µs and one second for every 10^9 flops forward, half as many backward."""

    type, asynchronous, name, flops_per_second, call_seconds = "cpu", False, "a clock", 1e9, 10e-6

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        self.now += 1e-9  # reading it takes time, too
        return self.now


class Ticking(Reference):
    """A kernel that moves the clock and computes nothing."""

    name = "ticking"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._pass(4, q, patch)
        return q, q[..., 0]

    def backward(self, dout, q, k, v, lse, delta, *, out=None, patch, scale):  # type: ignore[no-untyped-def]
        self._pass(20, q, patch)  # 10 flops a pair at half the rate
        return q, k, v

    def _pass(self, flops: int, q: torch.Tensor, patch: Patch) -> None:
        work = flops * q.shape[1] * q.shape[-1] * patch.rows * patch.cols
        self.clock.now += self.clock.call_seconds + work / self.clock.flops_per_second


def on_clock(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Time by this clock: contents may be any, and the size of copies, hundreds by a clock that stands still."""
    monkeypatch.setattr(measured, "device_of", lambda _: clock)
    monkeypatch.setattr(measured, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(torch, "randn", lambda *sizes, generator: torch.empty(*sizes))


def test_a_table_is_what_a_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constant rate and the cost of a call come out again."""
    clock = Clock()
    on_clock(monkeypatch, clock)
    found = measured_rates(Ticking(clock), CPU, torch.float32, 64, seconds=2.0)
    assert found.call_seconds == pytest.approx(clock.call_seconds, rel=0.01)
    for samples, tflops in ((found.forward, 1e-3), (found.backward, 0.5e-3)):
        assert [rate for _, rate in samples] == pytest.approx([tflops] * len(samples), rel=0.01)
    taken = found.kernel_seconds(Patch(0, 128, 0, 128), 8, 64, 1, "forward")
    assert taken == pytest.approx(clock.call_seconds + 4 * 8 * 64 * 128 * 128 / 1e9, rel=0.01)
    assert max(side for side, _ in found.forward) == 512, "the next would take more than 2 s"


class Behind(Clock):
    """A device behind the host's back: a call takes the host 50 µs to launch, and the device works meanwhile."""

    flops_per_second, call_seconds, launched = 3e14, 50e-6, 0.0

    def work(self, seconds: float) -> None:
        self.now += self.call_seconds
        self.launched = max(self.launched, self.now) + seconds

    def clock(self) -> float:
        self.now = max(self.now, self.launched)
        return super().clock()


def test_what_launches_hide_is_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a call takes hardly longer than its launch, no more is claimed than longer calls show."""
    clock = Behind()
    on_clock(monkeypatch, clock)
    monkeypatch.setattr(Ticking, "_pass", lambda self, flops, q, patch: clock.work(_flops(flops, q, patch) / 3e14))
    for sides in ((64, 512, 1024, 2048), measured.SIDES):  # none, and some of which take long enough
        monkeypatch.setattr(measured, "SIDES", sides)
        found = measured_rates(Ticking(clock), CPU, torch.float32, 64, seconds=2.0)
        assert max(rate for _, rate in found.forward) < 1.35 * 300


def _flops(flops: int, q: torch.Tensor, patch: Patch) -> float:
    return flops * q.shape[1] * q.shape[-1] * patch.rows * patch.cols


def test_what_does_not_fit_ends_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(Ticking):
        def _pass(self, flops: int, q: torch.Tensor, patch: Patch) -> None:
            if patch.rows > 64:
                raise torch.OutOfMemoryError("no more memory")
            super()._pass(flops, q, patch)

    clock = Clock()
    on_clock(monkeypatch, clock)
    found = measured_rates(Small(clock), CPU, torch.float32, 64, seconds=2.0)
    assert [side for side, _ in found.forward] == [16, 32, 64]


def test_what_a_kernel_cannot_do_is_not_measured() -> None:
    class Narrow(Reference):
        def supports(self, head_dim: int, dtype: torch.dtype) -> str | None:
            return f"head dim {head_dim} is too large" if head_dim > 128 else None

    with pytest.raises(UnsupportedError, match="'reference' cannot be measured: head dim 256 is too large"):
        measured_rates(Narrow(), CPU, torch.float32, 256)


def test_a_table_is_kept(tmp_path: Path) -> None:
    place = {"XDG_CACHE_HOME": str(tmp_path)}
    path = keep(TABLE, KEY, place)
    assert path is not None and kept(KEY, place) == TABLE and read_table(path) == (KEY, TABLE)
    for other in (replace(KEY, head_dim=128), replace(KEY, torch="2.14"), replace(KEY, kernel="another")):
        assert kept(other, place) is None
    assert keep(TABLE, KEY, {}) is None and kept(KEY, {}) is None, "there is no home"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-20],
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace("0.25", "-1"),
        lambda text: text.replace('"call_seconds"', '"calls"'),
        lambda text: text.replace('"copy_gbs": 9.0', '"copy_gbs": 0'),
        lambda text: "[]",
    ],
)
def test_a_broken_table_is_none(tmp_path: Path, spoil) -> None:  # type: ignore[no-untyped-def]
    place = {"XDG_CACHE_HOME": str(tmp_path)}
    path = keep(TABLE, KEY, place)
    assert path is not None
    path.write_text(spoil(path.read_text()))
    assert kept(KEY, place) is None
    with pytest.raises(ConfigurationError, match=r"not a table of rates .*: make one with `tokenring rates`"):
        read_table(path)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "tokenring"


def test_the_command_measures_once_and_auto_takes_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rates", "--device", "cpu", "--dtype", "fp32", "--dim", "64", "--seconds", "0.01"]) == 0
    said = capsys.readouterr().out
    assert "TFLOP/s" in said and str(home) in said
    assert torch.get_num_threads() == 1, "as it was"
    key = key_of(make_kernel("auto", CPU), CPU, torch.float32, 64)
    table = kept(key)
    assert table is not None and table.source == f"measured: {key}" and len(list(home.iterdir())) == 1
    rates, reason = auto(64)
    assert rates == table and "`tokenring rates` measured here" in reason
    rates, reason = auto(128)
    assert "measured" not in rates.source + reason, "no table for these: figures of a CPU"


def auto(head_dim: int) -> tuple[Rates, str]:
    """What auto reckons with among two ranks of this machine, and what it says."""
    planner = Planner(None, 2, None, (), None)
    size = Workload(1, 64, 64, 8, 8, head_dim, torch.float32)
    request, layout = Request(size, Mask(), 1.0, False, CPU), make_layout("contiguous", 2, 64)
    kernel = make_kernel("auto", CPU)
    call = planner._call(request, (layout, layout), kernel, None)
    return call.setting.machine.rates, planner.plan(request, (layout, layout), kernel, None).reason


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--dim", "0"], "give a number above 0"), (["--threads", "-1"], "give a number above 0"),
        (["--seconds", "nan"], "give a number above 0"), (["--device", "random"], "choose one of cpu, cuda, npu"),
    ],
)  # fmt: skip
def test_wrong_options(wrong: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rates", "--device", "cpu", "--seconds", "0.01", *wrong]) == 2
    assert says in capsys.readouterr().err


def test_plan_reckons_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the rate, half the kernels' time; a table of other calls is refused."""
    plan = ["plan", "--topology", "preset:hgx-h100", "--seq", "8k", "--dim", "64", "--dtype", "fp32", "--json"]
    compute = []
    for factor in (1, 2):
        rates = Rates("by hand", ((128, 10.0 * factor),), ((128, 5.0 * factor),))
        path = keep(rates, KEY, {"XDG_CACHE_HOME": str(tmp_path)})
        assert main([*plan, "--rates", str(path)]) == 0
        compute.append(json.loads(capsys.readouterr().out)["candidates"][0]["compute_seconds"])
    assert compute[0] == pytest.approx(2 * compute[1])
    for also in (["--tflops", "100"], ["--device", "h100-sxm"]):
        assert main([*plan, "--rates", str(path), *also]) == 2
        assert "both say how fast kernels are: leave one out" in capsys.readouterr().err
    other = [*plan[:-5], "--dim", "128", "--dtype", "fp32", "--rates", str(path)]
    assert main(other) == 2
    assert "the plan is for fp32 and head dim 128: measure these with" in capsys.readouterr().err
    assert main([*plan, "--rates", str(tmp_path / "none")]) == 2
    assert "cannot read rates from" in capsys.readouterr().err
