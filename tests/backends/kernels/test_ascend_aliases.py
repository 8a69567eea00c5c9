"""Traps 13 and 16: torch.cuda that answers for NPUs, and a torch_npu that breaks `import torch`; with mutants of ours.

Each check passes as the code is, and fails for code that falls into the trap.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import vendor
from ascend.device import NpuTensor
from ascend.operators import calls, register
from ascend.ranks import NpuPools
from oracle import allowed, attention64, relative_error
from ranks import Here
from vendor import NO_CANN, REPO, torch_npu

from tokenring import Causal, ContextParallel, attention
from tokenring.backends import devices, registry
from tokenring.backends.merging import choice

Spoil = Callable[[pytest.MonkeyPatch], None]


# ---------- 13: transfer_to_npu


@contextmanager
def transferred() -> Iterator[pytest.MonkeyPatch]:
    """As torch_npu.contrib.transfer_to_npu leaves torch: torch.cuda and is_cuda answer for NPUs, "cuda" makes them."""
    npu, empty = torch.get_device_module("npu"), torch.empty

    def make(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        made: torch.Tensor = empty(*size, device="npu" if "cuda" in str(device) else device, **options)
        return made

    with pytest.MonkeyPatch.context() as patched:
        for name in ("is_available", "device_count", "current_device", "current_stream", "synchronize", "Stream"):
            patched.setattr(torch.cuda, name, getattr(npu, name))
        patched.setattr(NpuTensor, "is_cuda", property(lambda self: True), raising=False)
        patched.setattr(torch, "empty", make)
        yield patched


RIGHT = {
    "kernel": "npu-fusion", "transport": "hccl", "merge": "npu-update", "device": "npu", "accelerators": ["npu"],
}  # fmt: skip


def check_decisions() -> None:
    """What is taken for a tensor on an NPU, and a whole call."""
    q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
    there = [x.to("npu") for x in (q, k, v)]
    assert torch.cuda.is_available() and there[0].is_cuda  # what must not be asked
    where = there[0].device
    assert {
        "kernel": registry.make_kernel("auto", where).name,
        "transport": registry.automatic(None, where),  # type: ignore[arg-type]
        "merge": choice.choose_merger(where, 16).merger.name,
        "device": devices.device_of(there[0]).type,
        "accelerators": devices.accelerator_types(),
    } == RIGHT
    calls.clear()
    out = attention(there[0], there[1], there[2], cp=ContextParallel(), mask=Causal())
    assert [call.name for call in calls] == ["npu_fusion_attention"]
    assert relative_error(out.cpu(), attention64(q, k, v, q, allowed(Causal(), 32, 32), 0.25).out) < 1e-6


def lied_to(device: torch.device) -> torch.device:
    """What code believes that asks torch.cuda."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else device


def kernel_by_availability(patched: pytest.MonkeyPatch) -> None:
    real = registry.make_kernel
    patched.setattr(registry, "make_kernel", lambda name, device: real(name, lied_to(device)))


def transport_by_availability(patched: pytest.MonkeyPatch) -> None:
    real = registry.automatic
    patched.setattr(registry, "automatic", lambda group, device: real(group, lied_to(device)))


def merge_by_availability(patched: pytest.MonkeyPatch) -> None:
    real = choice.choose_merger
    patched.setattr(choice, "choose_merger", lambda device, head_dim: real(lied_to(device), head_dim))


def device_by_is_cuda(patched: pytest.MonkeyPatch) -> None:
    real = devices.device_of

    def device_of(where: Any) -> Any:
        return real(torch.device("cuda", 0)) if getattr(where, "is_cuda", False) else real(where)

    patched.setattr(devices, "device_of", device_of)


def types_by_availability(patched: pytest.MonkeyPatch) -> None:
    def has_device(kind: str) -> bool:
        module = getattr(torch, kind, None)
        return module is not None and bool(module.is_available())

    patched.setattr(devices, "has_device", has_device)


SPOILT: tuple[Spoil, ...] = (
    kernel_by_availability, transport_by_availability, merge_by_availability, device_by_is_cuda, types_by_availability,
)  # fmt: skip


def test_13_aliases_change_nothing(npus: NpuPools) -> None:
    npus(1)(under_aliases, None)


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: str(spoil.__name__))
def test_13_code_that_asks_the_aliases_is_found(npus: NpuPools, spoil: Spoil) -> None:
    npus(1)(under_aliases, spoil)


def under_aliases(here: Here, spoil: Spoil | None) -> None:
    register("2.13.0")
    with transferred() as patched:
        if spoil is None:
            check_decisions()
            return
        spoil(patched)
        with pytest.raises((AssertionError, RuntimeError)):
            check_decisions()


# ---------- 16: the wheel without CANN

IMPORT = "import tokenring; print(tokenring.__version__); tokenring.attention"


def check_doctor(folder: Path, python: str | None = None) -> None:
    """torch is found all the same, and what is wrong with torch_npu is said in words."""
    ran = vendor.tokenring(folder, "doctor", "--json", python=python)
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    said = {each["about"]: each["what"] for each in found["problems"]}
    assert found["torch"] == torch.__version__ and [each["device"] for each in found["choices"]] == ["cpu"]
    assert {"torch_npu", "autoload"} <= said.keys() and "libhccl.so" in said["torch_npu"]


def check_import(folder: Path, python: str | None = None) -> None:
    """`import tokenring` works; what needs torch says in one sentence why it cannot."""
    ran = vendor.run(folder, "-c", IMPORT, python=python)
    assert (ran.code, ran.out) == (1, "0.1.0\n")
    assert "direct cause" not in ran.err and "During handling" not in ran.err
    assert ran.err.strip().splitlines()[-1].startswith("tokenring.errors.BackendUnavailable: torch cannot be imported")


def spoilt_copy(folder: Path, file: str, old: str, new: str) -> Path:
    """The library beside the broken torch_npu, with one thing of it changed."""
    shutil.copytree(REPO / "tokenring", folder / "tokenring")  # links are followed; what is compiled stays so
    path = folder / "tokenring" / file
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")
    return folder


Check = Callable[[Path, str | None], None]
SOURCES: dict[str, tuple[Check, str, str, str]] = {
    "the doctor leaves autoload on": (check_doctor, "cli/doctor/examine.py", 'OFF = {say.AUTOLOAD: "0"}', "OFF = {}"),
    "the doctor imports torch itself": (
        check_doctor, "cli/doctor/examine.py", "import platform\n", "import platform\n\nimport torch\n",
    ),
    "torch is imported at once": (
        check_import, "__init__.py", "import importlib\n", "import importlib\n\nimport torch\n",
    ),
    "torch_npu is imported at once": (
        check_import, "__init__.py", "import importlib\n", "import importlib\n\nimport torch_npu\n",
    ),
    "errors are passed on": (check_import, "__init__.py", "except (ImportError, RuntimeError)", "except KeyError"),
}  # fmt: skip


@pytest.mark.parametrize("check", [check_doctor, check_import])
def test_16_a_wheel_without_cann(check: Check, tmp_path: Path) -> None:
    check(torch_npu(tmp_path / "site", NO_CANN), None)


@pytest.mark.parametrize("name", SOURCES)
def test_16_code_that_falls_into_it_is_found(name: str, tmp_path: Path, warm_torch: str) -> None:
    check, file, old, new = SOURCES[name]
    folder = spoilt_copy(torch_npu(tmp_path / "site", NO_CANN), file, old, new)
    with pytest.raises((AssertionError, json.JSONDecodeError)):
        check(folder, warm_torch)


def test_16_a_copy_that_is_not_spoilt_passes(tmp_path: Path, warm_torch: str) -> None:
    """So that mutants fail for what they change."""
    site = torch_npu(tmp_path / "site", NO_CANN)
    folder = spoilt_copy(site, "cli/doctor/cann.py", "MOST_BYTES = 1 << 16", "MOST_BYTES = 65536")
    check_doctor(folder, warm_torch)
    check_import(folder, warm_torch)
