"""The kernel "auto" on CUDA as the registry gives it, and the tables of rates that it goes by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_cuda_choice import NO_CUDNN, Refusing, choosing

from tokenring.backends import registry
from tokenring.backends.kernels.auto import Choosing, for_device
from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.backends.kernels.order import default_order
from tokenring.backends.kernels.reference import Reference
from tokenring.backends.table_keys import key_of
from tokenring.cli.rates.command import main as rates_main
from tokenring.tables.kernel_rates import kept


def test_auto_on_cuda_chooses() -> None:
    made = registry.make_kernel("auto", torch.device("cuda"))
    assert isinstance(made, Choosing) and made.name == "auto"
    assert made is registry.make_kernel("auto", torch.device("cuda")), "what it finds out, it says once"
    assert made.order == default_order((0, 0)), "no device here"
    assert "takes CUDA tensors" not in str(made.why_not("torch-flash", 64, torch.bfloat16))


def test_nothing_is_imported_before_it_is_asked_for(run_python: Callable[[str], str]) -> None:
    code = (
        "import sys, tokenring, tokenring.backends.registry\n"
        "names = ('auto', 'torch_cuda', 'flash_attn', 'flex')\n"
        "print([n for n in names if f'tokenring.backends.kernels.{n}' in sys.modules], 'flash_attn' in sys.modules)"
    )
    assert run_python(code) == "[] False\n"


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[[str], str]:
    import vendor

    return lambda code: vendor.run(tmp_path, "-c", code).out


def test_kept_tables_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tokenring rates` measures each kernel, keeps a table of each, and the choice goes by them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu = torch.device("cpu")
    chosen = for_device(cpu, lambda name: Reference() if name == "reference" else CpuFlash())
    chosen.order = ("torch-efficient", "reference")
    monkeypatch.setattr("tokenring.cli.rates.command.make_kernel", lambda name, device: chosen)
    assert rates_main(["--device", "cpu", "--dtype", "fp32", "--dim", "16", "--seconds", "0.001"]) == 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert kept(key_of(CpuFlash(), cpu, torch.float32, 16)) is not None
        assert kept(key_of(chosen, cpu, torch.float32, 16)) is not None
        assert "by `tokenring rates`" in chosen.picks("forward", 64, 16, torch.float32)[0].why
    finally:
        torch.set_num_threads(threads)


def test_a_kernel_that_cannot_be_measured_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = choosing(Refusing("torch-cudnn", NO_CUDNN), Refusing("torch-flash"))
    monkeypatch.setattr("tokenring.cli.rates.command.make_kernel", lambda name, device: chosen)
    assert rates_main(["--device", "cpu", "--dtype", "fp32", "--dim", "16", "--seconds", "0.001"]) == 0
    said = capsys.readouterr().out
    assert "torch-cudnn is left out: cuDNN Frontend error" in said and said.count("kept in") == 2
