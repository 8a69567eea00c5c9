"""Merging partial results: every merger is exact over any split, whatever rows have seen nothing; and merges that
are not. Mergers on NPUs are in test_ascend_merge."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from merging import CASES, check, check_softmax, suite
from patience import patient

from tokenring.backends.merging import choice
from tokenring.backends.merging.choice import LIMIT, choose_merger, merger_for, trial
from tokenring.backends.merging.torch_merger import TorchMerger, accepting, merge_

TESTS = Path(__file__).resolve().parents[2]
TRITONS_HOME = ("linux", "x86_64")  # as pyproject.toml says of it
CPU = torch.device("cpu")
Rule = Callable[..., None]  # as merge_


# ---------- one suite for all


@pytest.mark.parametrize("name", suite())
def test_torch(name: str) -> None:
    suite()[name](TorchMerger())


Found = dict[str, dict[str, Any]]  # by merger: what is wrong with each check, and under "" its exit code


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The kernel and its mutants, in a process whose Triton interprets."""
    if find_spec("triton") is None:
        if (sys.platform, platform.machine()) == TRITONS_HOME:
            pytest.fail("no triton, which .[dev] brings here: `make setup`, or put a folder that has it on PYTHONPATH")
        pytest.skip("triton is made for Linux on x86_64")
    folder, jobs = tmp_path_factory.mktemp("mutants"), [(choice.MERGERS["triton"], list[str]())]
    for number, (old, new, case) in enumerate(KERNEL_MUTANTS.values()):
        text = (TESTS.parent / "backends" / "merging" / "triton.py").read_text(encoding="utf-8")
        assert text.count(old) == 1
        (folder / f"spoilt_{number}.py").write_text(text.replace(old, new), encoding="utf-8")
        jobs.append((f"spoilt_{number}:make", [case]))
    paths = os.pathsep.join([str(folder), str(TESTS.parent), *(path for path in sys.path if path)])
    # One thread each: they fork.
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "merging"], input=json.dumps(jobs),
        cwd=TESTS, env=os.environ | settings, capture_output=True, text=True, timeout=patient(110),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: Found = {}
    for line in done.stdout.splitlines():
        merger, check, wrong = json.loads(line)
        found.setdefault(merger, {})[check] = wrong
    return found


@pytest.mark.parametrize("name", suite())
def test_triton(interpreted: Found, name: str) -> None:
    assert interpreted[choice.MERGERS["triton"]][name] is None


KERNEL_MUTANTS = {
    "-inf minus -inf": ("shift = tl.where(seen, largest, 0.0)", "shift = largest", "plain"),
    "weights that do not add up": ("* (new_weight / total)[:, None]", "* new_weight[:, None]", "2 parts of a softmax"),
    "heads one after another": ("h * out_h)[:, None]", "h * D)[:, None]", "heads first"),
    "columns beyond the last": (" & (d < D)[None, :]", "", "heads of 80"),
    "rows beyond the last": ("there = index < count", "there = index >= 0", "records"),
    "the larger lse for both": ("shift + tl.log(total)", "shift", "plain"),
    "NaN as rows that see nothing": ("largest != float", "largest > float", "NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNEL_MUTANTS)
def test_mutants_of_the_kernel_fail(interpreted: Found, name: str) -> None:
    found, (_, _, case) = interpreted[f"spoilt_{list(KERNEL_MUTANTS).index(name)}:make"], KERNEL_MUTANTS[name]
    assert found[""] < 0 or found[case] is not None  # what writes where it must not may end the process


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", suite())
def test_triton_on_a_gpu(name: str) -> None:
    pytest.importorskip("triton")
    suite("cuda")[name](choice._load("triton"))


# ---------- mutants: merges that are none


class Mutant(TorchMerger):
    """Merges by another rule."""

    rule: Rule

    def __init__(self, rule: Rule) -> None:
        object.__setattr__(self, "rule", rule)

    def merge_(self, *given: Any) -> None:
        self.rule(*given)

    def merged(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.merge_(*given)
        return given[0], given[1]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def by_sigmoid(out: Any, lse: Any, new_out: Any, new_lse: Any, scratch: Any) -> None:
    """ring-flash-attention's form: NaN where the accumulated lse is -inf."""
    out -= torch.sigmoid(new_lse - lse)[..., None] * (out - new_out)
    lse -= torch.nn.functional.logsigmoid(lse - new_lse)


def by_exponentials(out: Any, lse: Any, new_out: Any, new_lse: Any, scratch: Any) -> None:
    """log(1 + exp(x)), which overflows."""
    total = lse + torch.log1p(torch.exp(new_lse - lse))
    out.mul_(torch.exp(lse - total)[..., None]).add_(torch.exp(new_lse - total)[..., None] * new_out)
    lse.copy_(total)


def without_clamp(out: Any, lse: Any, new_out: Any, new_lse: Any, scratch: Any) -> None:
    """-inf minus -inf where a row has seen nothing and nothing comes."""
    total = torch.logaddexp(lse, new_lse)
    out.mul_(torch.exp(lse - total)[..., None]).add_(torch.exp(new_lse - total)[..., None] * new_out)
    lse.copy_(total)


def lse_in_bf16(out: Any, lse: Any, new_out: Any, new_lse: Any, scratch: Any) -> None:
    """Statistics in the dtype of the inputs."""
    merge_(out, lse, new_out, new_lse.bfloat16().float(), scratch)


def out_in_bf16(out: Any, lse: Any, new_out: Any, new_lse: Any, scratch: Any) -> None:
    """A running output in the dtype of the inputs (trap 7 of Ascend ports)."""
    merge_(out, lse, new_out, new_lse, scratch)
    out.copy_(out.bfloat16())


def average(out: Any, lse: Any, new_out: Any, new_lse: Any, scratch: Any) -> None:
    """Weighs both alike."""
    out.add_(new_out).div_(2)
    lse.copy_(torch.logaddexp(lse, new_lse))


def all_memory(out: Any, lse: Any, new_out: Any, new_lse: Any, scratch: Any) -> None:
    """Right, and writes beside the accumulators."""
    merge_(out, lse, new_out, new_lse, scratch)
    if lse._base is not None and lse._base.numel() > lse.numel():
        lse._base.view(-1)[0] += 1.0


MUTANTS: dict[Rule, str] = {
    by_sigmoid: "plain", by_exponentials: "plain", without_clamp: "plain", lse_in_bf16: "plain",
    out_in_bf16: "records, bf16", average: "plain", all_memory: "records",
}  # fmt: skip


@pytest.mark.parametrize("rule", MUTANTS, ids=lambda rule: str(rule.__name__))
def test_mutants_fail(rule: Rule) -> None:
    case = next(each for each in CASES if each.name == MUTANTS[rule])
    check(TorchMerger(), case)
    with pytest.raises(AssertionError):
        check(Mutant(rule), case)


@pytest.mark.parametrize("rule", [by_sigmoid, average, lse_in_bf16])
def test_mutants_fail_over_a_softmax(rule: Rule) -> None:
    with pytest.raises(AssertionError):
        check_softmax(Mutant(rule), 3)


# ---------- who is taken


@pytest.mark.parametrize("rule", [by_sigmoid, without_clamp, lse_in_bf16, out_in_bf16, average])
def test_the_trial_refuses(rule: Rule) -> None:
    assert trial(TorchMerger(), CPU, 16) is None
    reason = trial(Mutant(rule), CPU, 16)
    assert reason is not None and "it does not merge in fp32" in reason


def test_the_trial_tells_precisions_apart() -> None:
    """By an order of magnitude on either side."""
    given = choice._rows(64, torch.float32)
    right = choice._merged64(*given)
    TorchMerger().merge_(*given, scratch=torch.empty(2, *given[1].shape))
    exact = choice._error(given[0].double(), right[0])
    half = choice._error(given[0].half().double(), right[0])
    assert 10 * exact < LIMIT < half / 10


@pytest.mark.parametrize("kind", ["cpu", "xpu", "meta"])
def test_devices_without_one_of_their_own_get_torch(kind: str) -> None:
    made = choose_merger(torch.device(kind), 64)
    assert isinstance(made.merger, TorchMerger) and made.others == ()


class Fake(TorchMerger):
    """Another merger that is right."""

    name = "fake"


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (Fake, None),
        (lambda: Mutant(out_in_bf16), "does not merge in fp32"),
        (lambda: SimpleNamespace(supports=lambda head_dim: f"not {head_dim}"), "not 64"),
        (lambda: 1 // 0, "by zero"),
    ],
)
def test_what_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, made: Callable[[], Any], says: str | None
) -> None:
    """Absent, broken, unfit or wrong: torch merges, and the log says why; once."""
    monkeypatch.setattr(choice, "OF_DEVICE", {"cpu": ("fake",)})
    monkeypatch.setattr(choice, "WHY", {**choice.WHY, "fake": "it is there"})
    monkeypatch.setattr(choice, "_load", lambda name: made())
    choice._log.cache_clear()
    with caplog.at_level("INFO", "tokenring"):
        for _ in range(2):
            merger = merger_for(CPU, 64)
    assert merger.name == ("fake" if says is None else "torch")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (says is not None)
    assert says is None or ("merging on cpu: not by fake: " in told[0] and says in told[0])


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """No triton: said, and torch's operators do it."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, choice.MERGERS["triton"].partition(":")[0], raising=False)
    monkeypatch.setattr(choice, "OF_DEVICE", {"cpu": ("triton",)})
    made = choose_merger(CPU, 64)
    assert made.merger.name == "torch"
    assert "triton" in made.others[0][1]


def test_what_is_replaced_is_the_whole_of_an_output() -> None:
    """Only there new tensors may take the accumulators' place."""

    class New(TorchMerger):
        def merged(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = given[0].clone(), given[1].clone()
            merge_(out, lse, *given[2:])
            return out, lse

    def call() -> SimpleNamespace:
        return SimpleNamespace(outputs={3: {"out": torch.zeros(2, 1, 1, 4), "lse": torch.zeros(2, 1, 1)}})

    fetch = [lambda call, name=name: call.outputs[3][name] for name in ("out", "lse")]
    scratch, news = torch.empty(2, 2, 1, 1), (torch.ones(2, 1, 1, 4), torch.zeros(2, 1, 1))
    for output in (3, None):
        made = call()
        held = made.outputs[3]["out"]
        accepting(New(), fetch[0], fetch[1], scratch, output)(made, *news)
        assert bool((made.outputs[3]["out"] == 0.5).all())
        assert (made.outputs[3]["out"] is held) == (output is None)


# ---------- the script for GPUs


def test_the_script_runs_dry() -> None:
    """On a CPU it measures torch's merge, and judges nothing by its speed."""
    script = TESTS.parent / "hardware" / "gpu" / "gpu_merge.py"
    command = [sys.executable, str(script), "--device", "cpu", "--rows", "32", "--heads", "2", "--head-dim", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(100))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("merge by torch: outputs: ") and "; records: " in done.stdout
