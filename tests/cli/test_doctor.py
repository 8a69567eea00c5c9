"""`tokenring doctor` on machines whose torch_npu is broken in every way that was seen, or can be thought of."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import vendor
from patience import patient
from vendor import ABORT, ALIASES, CLASH, EMULATED, EXIT, HANG, NO_CANN, STUB_TORCH, UNLIKE, WORKS, tokenring, torch_npu

from tokenring.cli import main as cli
from tokenring.cli.doctor import ask, examine
from tokenring.cli.doctor.examine import SECONDS
from tokenring.cli.doctor.findings import Findings
from tokenring.cli.doctor.probes import OPERATORS
from tokenring.cli.doctor.report import report


def doctor(folder: Path, *options: str, python: str | None = None, **environment: str) -> dict[str, Any]:
    """Its JSON; it never fails, and says nothing beside it. test_ascend_aliases has it ask real Pythons as well."""
    limit = () if "--seconds" in options else ("--seconds", f"{patient(SECONDS):g}")
    ran = tokenring(folder, "doctor", "--json", *options, *limit, python=python, **environment)
    assert (ran.code, ran.err) == (0, "")
    found: dict[str, Any] = json.loads(ran.out)
    return found


def problems(found: dict[str, Any]) -> dict[str, str]:
    """By what each is about: what it is and what to do."""
    return {each["about"]: f"{each['what']} | {each['advice']}" for each in found["problems"]}


def with_stub(folder: Path, version: str = "2.13.0") -> Path:
    """With a torch of that version that imports at once: for what no real one is needed."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(STUB_TORCH.replace("2.13.0", version))
    return folder


# ---------- torch_npu, broken


BROKEN = {
    "no CANN": (
        NO_CANN,
        "torch_npu cannot be imported: libhccl.so, a library of CANN, is not found | install CANN and the operators",
    ),
    "another accelerator": (CLASH, "torch_npu cannot be imported: this torch is built for another accelerator"),
    "aborts": (
        ABORT,
        "torch_npu cannot be imported: it ends the process by signal 6 (SIGABRT), after saying: terminate called",
    ),
    "exits": (EXIT, "torch_npu cannot be imported: SystemExit: 7"),
    "another release": (UNLIKE, "torch_npu cannot be imported: torch_npu and this torch, or this CANN, are not of one"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_torch_npu(name: str, tmp_path: Path, warm_torch: str) -> None:
    """It says why, and what to do; torch itself and the CPU are as they were."""
    body, says = BROKEN[name]
    found = doctor(torch_npu(tmp_path / "site", body), python=warm_torch)
    assert problems(found)["torch_npu"].startswith(says)
    assert "`import torch` alone fails" in problems(found)["autoload"]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in problems(found)["autoload"]
    assert found["torch_npu"] == {
        "installed": "2.13.0", "imports": False, "autoload": "broken", "wants_torch": "==2.13.0.*", "transfer": False,
    }  # fmt: skip
    assert found["torch"] == torch.__version__
    assert [each["device"] for each in found["choices"]] == ["cpu"]
    assert found["choices"][0]["kernel"]["name"] == "cpu-flash"


def test_torch_npu_that_hangs(tmp_path: Path) -> None:
    """The time limit ends it, and nothing of it is left."""
    folder = with_stub(torch_npu(tmp_path / "site", HANG))
    limit = f"{patient(4.0):g}"  # other questions are to be answered within it
    found = doctor(folder, "--seconds", limit)
    assert f"it has not come back after {limit} s" in problems(found)["torch_npu"]
    assert found["torch"] == "2.13.0"


def test_autoload_that_is_off(tmp_path: Path, warm_torch: str) -> None:
    found = doctor(torch_npu(tmp_path / "site", NO_CANN), python=warm_torch, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found["torch_npu"]["autoload"] == "off"
    assert "autoload" not in problems(found) and "libhccl.so" in problems(found)["torch_npu"]


def test_cann_that_is_installed_and_not_sourced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    cann = home / "Ascend" / "cann"
    (cann / "aarch64-linux").mkdir(parents=True)
    (cann / "aarch64-linux" / "ascend_toolkit_install.info").write_text("package_name=x\nversion=9.1.0\n")
    (cann / "set_env.sh").touch()
    folder = with_stub(torch_npu(tmp_path / "site", NO_CANN))
    found = doctor(folder, HOME=str(home))
    assert found["cann"] == {"version": "9.1.0", "folder": str(cann)}
    assert f"not found in this shell | run: source {cann}/set_env.sh" in problems(found)["torch_npu"]
    assert "install CANN" in problems(doctor(folder, ASCEND_HOME_PATH=str(cann)))["torch_npu"]  # sourced: incomplete


def test_versions_that_do_not_go_together(tmp_path: Path) -> None:
    folder = torch_npu(tmp_path / "site", NO_CANN, "2.7.1.post11", "==2.7.1+cpu")
    found = doctor(with_stub(folder, torch.__version__))
    assert problems(found)["versions"].startswith(
        f"torch_npu 2.7.1.post11 goes with torch 2.7, and this is torch {torch.__version__}"
    )


# ---------- torch_npu, working or absent


def test_no_torch_npu(tmp_path: Path, warm_torch: str) -> None:
    found = doctor(tmp_path, python=warm_torch)
    assert found["torch_npu"]["installed"] is None
    assert found["problems"] == []
    assert (found["operators"], found["accelerators"]) == ([], [])


def test_operators_come_from_schemas(tmp_path: Path, warm_torch: str) -> None:
    """Names and arguments as this torch_npu has them, whatever its version."""
    found = doctor(torch_npu(tmp_path / "site", WORKS), python=warm_torch)
    operators = {each["name"]: each["arguments"] for each in found["operators"]}
    assert list(operators) == list(OPERATORS)
    assert operators.pop("npu_fusion_attention") == ["query", "head_num", "scale", "pre_tockens"]
    assert operators.pop("npu_attention_update") == ["lse", "local_out", "update_type"]
    assert set(operators.values()) == {None}
    assert (found["torch_npu"]["imports"], found["torch_npu"]["autoload"]) == (True, "works")
    assert "torch_npu imports, and sees no NPU" in problems(found)["npu"]


def test_npus(tmp_path: Path, warm_torch: str) -> None:
    """All is there, and Megatron too: what would be used for tensors on them, and which variables are missing."""
    (tmp_path / "site" / "megatron").mkdir(parents=True)
    found = doctor(torch_npu(tmp_path / "site", EMULATED), python=warm_torch)
    assert [(each["type"], each["names"]) for each in found["accelerators"]] == [("npu", ["Ascend910B3"] * 8)]
    choices = {each["device"]: each for each in found["choices"]}
    assert (choices["npu"]["transport"]["name"], choices["npu"]["kernel"]["name"]) == ("hccl", "npu-fusion")
    assert (choices["cpu"]["transport"]["name"], choices["cpu"]["kernel"]["name"]) == ("shm", "cpu-flash")
    assert [choices[kind]["merge"]["name"] for kind in ("cpu", "npu")] == ["torch", "npu-update"]
    operators = {each["name"]: each["arguments"] for each in found["operators"]}
    assert "softmax_layout" in operators["npu_fusion_attention"] and operators["npu_ring_attention_update"]
    assert [each for each in found["problems"] if each["hurts"]] == []
    advice = [each["advice"] for each in found["problems"] if each["about"] == "environment"]
    queues = "export CUDA_DEVICE_MAX_CONNECTIONS=1, with --use-torch-fsdp2 2"
    assert advice == ["export HCCL_CONNECT_TIMEOUT=600 or more", queues]


def test_what_is_left_of_a_device_without_operators(tmp_path: Path, warm_torch: str) -> None:
    """A mutant of the machine above: the report says that nothing computes there, and why."""
    spoilt = EMULATED.replace('operators.register("2.13.0")', "")
    found = doctor(torch_npu(tmp_path / "site", spoilt), python=warm_torch)
    assert {each["arguments"] for each in found["operators"]} == {None}
    choice = next(each for each in found["choices"] if each["device"] == "npu")
    assert choice["kernel"] is None or choice["kernel"]["name"] != "npu-fusion"
    assert found["problems"] or any("npu_fusion_attention" in each["why"] for each in choice["others"])
    assert choice["merge"]["name"] == "torch" and "has no npu_attention_update" in choice["merge"]["why"]


def test_nothing_of_torch_is_imported_by_the_command_itself(tmp_path: Path) -> None:
    code = "import sys, tokenring.cli.main, tokenring.cli.doctor.command; print('torch' in sys.modules)"
    assert vendor.run(tmp_path, "-c", code).out == "False\n"


def test_variables_are_checked_without_torch(tmp_path: Path, warm_torch: str) -> None:
    """TOKENRING_SCHEDULE is checked by what other parts share: none of that may need torch."""
    folder = torch_npu(tmp_path / "site", NO_CANN)
    found = doctor(folder, python=warm_torch, TOKENRING_SCHEDULE="spiral", P2P_HCCL_BUFFSIZE="0")
    assert [each["name"] for each in found["environment"]] == ["P2P_HCCL_BUFFSIZE", "TOKENRING_SCHEDULE"]
    assert all(each["warning"] for each in found["environment"])
    assert "examination failed" not in str(found["problems"])


def test_aliases_are_no_devices(tmp_path: Path, warm_torch: str) -> None:
    """transfer_to_npu makes torch.cuda answer for NPUs: no CUDA device is reported, and the report says why."""
    found = doctor(torch_npu(tmp_path / "site", WORKS + ALIASES), python=warm_torch)
    assert found["torch_npu"]["transfer"]
    assert "cuda" not in [each["type"] for each in found["accelerators"]]
    site = tmp_path / "startup"  # at work before anything else, as where an image's sitecustomize does it
    site.mkdir()
    (site / "sitecustomize.py").write_text(ALIASES)
    found = doctor(site)
    assert found["accelerators"] == []
    assert [each["device"] for each in found["choices"]] == ["cpu"]
    assert (found["torch_npu"]["transfer"], found["problems"]) == (True, [])


def test_no_torch_at_all(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    found = doctor(tmp_path)
    assert found["torch"] is None
    assert problems(found)["torch"] == "torch cannot be imported: it needs the Python package torch | pip install torch"


# ---------- `import tokenring` itself


class TestImport:
    NEEDS_TORCH = "import tokenring; print(tokenring.__version__); tokenring.attention"

    @pytest.mark.parametrize("body", [NO_CANN, CLASH])
    def test_is_one_sentence(self, body: str, tmp_path: Path, warm_torch: str) -> None:
        ran = vendor.run(torch_npu(tmp_path / "site", body), "-c", self.NEEDS_TORCH, python=warm_torch)
        assert (ran.code, ran.out) == (1, "0.1.0\n")
        assert "During handling" not in ran.err and "direct cause" not in ran.err
        last = ran.err.strip().splitlines()[-1]
        assert last.startswith("tokenring.errors.BackendUnavailable: torch cannot be imported: it loads torch_npu,")
        assert last.endswith("or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run without it; `tokenring doctor` says more")

    def test_of_commands_as_well(self, tmp_path: Path, warm_torch: str) -> None:
        ran = tokenring(torch_npu(tmp_path / "site", NO_CANN), "schedule", "ring", "--ranks", "2", python=warm_torch)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("tokenring: torch cannot be imported: it loads torch_npu, which fails: libhccl.so")
        assert ran.err.count("\n") == 1

    def test_other_errors_are_not_dressed_up(self, tmp_path: Path) -> None:
        (tmp_path / "torch.py").write_text("raise RuntimeError('something else')")
        ran = vendor.run(tmp_path, "-c", self.NEEDS_TORCH)
        assert ran.err.strip().splitlines()[-1] == "RuntimeError: something else"

    def test_cpu_is_unaffected_without_the_autoload(self, tmp_path: Path, warm_torch: str) -> None:
        code = (
            "import torch, tokenring as tr; q = torch.ones(1, 4, 2, 8); "
            "print(tr.attention(q, q, q, tr.ContextParallel()).sum())"
        )
        site = torch_npu(tmp_path / "site", NO_CANN)
        ran = vendor.run(site, "-c", code, python=warm_torch, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert (ran.code, ran.out) == (0, "tensor(64.)\n")


# ---------- it never fails itself


def test_a_part_that_fails_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(examine, "find_cann", broken)
    monkeypatch.setattr(examine, "ask", lambda *_: ask.Answer(ending="it ends the process with exit code 1"))
    out, err = StringIO(), StringIO()
    assert cli.main(["doctor"], out, err) == 0
    assert "this part of the examination failed: OSError: the disk is gone" in out.getvalue()
    assert "torch cannot be imported: it ends the process with exit code 1" in out.getvalue()
    assert "torch     cannot be imported" in out.getvalue()
    assert err.getvalue() == ""


def test_python_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    found = examine.examine({}, 5.0)
    assert found.torch is None and found.problems


def test_a_line_that_is_cut_is_left_out() -> None:
    answer = ask.Answer()
    ask._take(answer, '["import torch", true, "2.1')
    assert answer == ask.Answer()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e9"])
def test_time_limits_that_make_no_sense(seconds: str) -> None:
    err = StringIO()
    assert cli.main(["doctor", "--seconds", seconds], StringIO(), err) == 2
    assert err.getvalue().startswith(f"tokenring: --seconds {float(seconds):g}: give a time above 0")


# ---------- the report


def test_report_in_full() -> None:
    path = Path(__file__).resolve().parents[1] / "data" / "doctor.txt"
    assert report(full_findings()) == path.read_text(encoding="utf-8")


def full_findings() -> Findings:
    """An A2 server on which all but one thing is well."""
    from tokenring.cli.doctor import findings as f

    return Findings(
        "0.1.0", "3.11.7", "Linux aarch64", "2.9.1+cpu",
        f.TorchNpu("2.9.1", True, "works", "==2.9.1+cpu"),
        f.Cann("9.0.0", "/usr/local/Ascend/cann"),
        [f.Accelerators("npu", ["Ascend910B3"] * 8, [64 << 30] * 8)],
        [f.OperatorFinding("npu_fusion_attention", ["query", "key", "value", "scale"]),
         f.OperatorFinding("npu_ring_attention_update", None)],
        [f.DefaultChoice("npu", f.Option("hccl", "it moves npu tensors from device to device"),
                         f.Option("reference", "why"),
                  [f.Option("cpu-flash", "computes on the CPU")], f.Option("torch", "no other is here"))],
        [f.Variable("HCCL_BUFFSIZE", "200"), f.Variable("P2P_HCCL_BUFFSIZE", "0", "one stream")],
        [f.Problem("environment", "P2P_HCCL_BUFFSIZE=0: one stream", "unset it", hurts=False),
         f.Problem("npu", "something", "do something")],
    )  # fmt: skip


def test_names_of_others_are_shown_as_text() -> None:
    found = full_findings()
    found.environment[0] = type(found.environment[0])("HCCL_X", "a\x1b[31mred\nline")
    assert "\x1b" not in report(found) and "\nline" not in report(found)


def test_output_goes_to_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tokenring.cli.doctor.command.examine", lambda *_: full_findings())
    out = StringIO()
    assert cli.main(["doctor", "-o", str(tmp_path / "a.txt")], out, StringIO()) == 0
    assert out.getvalue() == ""
    assert (tmp_path / "a.txt").read_text() == report(full_findings())
    assert cli.main(["doctor", "-o", str(tmp_path / "no" / "a.txt")], out, StringIO()) == 2


if __name__ == "__main__":  # with PYTHONPATH=tests/fakes:tests/support
    (Path(__file__).resolve().parents[1] / "data" / "doctor.txt").write_text(report(full_findings()), encoding="utf-8")
