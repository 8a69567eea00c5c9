"""What `tokenring doctor` says of transports whose devices are not here: each by name, and all that it lacks."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest

from tokenring.cli.doctor import examine
from tokenring.cli.doctor.ask import Answer
from tokenring.cli.doctor.findings import Cann, Findings, TorchNpu
from tokenring.cli.main import main

WANTED = """\
          other      symm: moves CUDA tensors; torch sees no CUDA device here
          other      nccl: moves CUDA tensors; this torch was built without NCCL; torch sees no CUDA device here
          other      nvshmem: moves CUDA tensors; torch sees no CUDA device here
          other      hccl: moves NPU tensors; torch_npu is not installed; CANN is not found; \
this machine has no /dev/davinci*
"""


def is_bare() -> bool:
    """A machine with a CPU alone, and a torch for it."""
    import torch

    built = torch.cuda.is_available() or torch.distributed.is_nccl_available()
    return not built and not examine._has("torch_npu") and not examine._npus_seen()


@pytest.mark.skipif(not is_bare(), reason="there are accelerators here, or packages for them")
def test_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "find_cann", lambda environment: None)
    out = StringIO()
    assert main(["doctor"], out, StringIO(), StringIO()) == 0
    assert WANTED in out.getvalue()
    assert "  other      npu-fusion: for NPU tensors\n" in out.getvalue()
    assert "flash-attn-3, flash-attn-4, flex: for CUDA tensors\n" in out.getvalue()  # one line for all of them


@pytest.mark.skipif(not is_bare(), reason="there are accelerators here, or packages for them")
def test_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "find_cann", lambda environment: None)
    out = StringIO()
    assert main(["doctor", "--json"], out, StringIO(), StringIO()) == 0
    (cpu,) = json.loads(out.getvalue())["choices"]
    said = {each["name"]: each["why"] for each in cpu["others"]}
    for line in WANTED.splitlines():
        name, _, why = line.split("other", 1)[1].strip().partition(": ")
        assert said[name] == why


@pytest.mark.parametrize(
    ("npu", "cann", "files", "lacks"),
    [
        (TorchNpu("2.9.1", False), None, ["davinci0"], "torch_npu cannot be imported; CANN is not found"),
        (TorchNpu("2.9.1", True), Cann("9.0", "/x"), [], "torch_npu sees no NPU; this machine has no /dev/davinci*"),
        (TorchNpu(), Cann("9.0", "/x"), ["davinci0"], "torch_npu is not installed"),
    ],
)
def test_what_hccl_lacks(
    npu: TorchNpu, cann: Cann | None, files: list[str], lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "_npus_seen", lambda: files)
    found = Findings("", "", "")
    found.torch_npu, found.cann = npu, cann
    assert examine._lacks_npu(found) == lacks


def choice(device: str) -> dict[str, Any]:
    nothing: dict[str, Any] = {"transport": None, "kernel": None, "others": [], "merge": None, "measured": []}
    return {"device": device, **nothing}


def test_where_npus_are_here_it_is_no_other() -> None:
    found, answers = Findings("", "", ""), {"torch": Answer(), "torch_npu": Answer()}
    answers["torch"].said = {"choices": [choice("cpu")], "elsewhere": []}
    answers["torch_npu"].said = {"choices": [choice("npu")]}
    examine._devices(found, answers, {}, 1.0)
    assert [each.others for each in found.choices] == [[], []]


def test_where_it_cannot_be_told() -> None:
    found, answers = Findings("", "", ""), {"torch": Answer()}
    answers["torch"].said = {"choices": [choice("cpu")]}
    answers["torch"].failed = {"elsewhere": "ImportError: no such library"}
    examine._devices(found, answers, {}, 1.0)
    assert found.choices[0].others[0].why == "not told: ImportError: no such library"
