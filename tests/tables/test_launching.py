"""What launches take: measured with the rates of a kernel, kept with them, and read again from tables of any age."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ascend.operators import register
from ascend.ranks import NpuPools
from ranks import Here

from tokenring.backends import measuring
from tokenring.backends.kernels.npu_fusion import NpuFusion
from tokenring.backends.kernels.reference import Reference
from tokenring.backends.measuring import measured_rates
from tokenring.cli.rates.command import table
from tokenring.errors import ConfigurationError
from tokenring.tables.kernel_rates import KernelKey, read_table, to_json
from tokenring.tables.launching import Launching
from tokenring.tables.rates import Rates

KEY = KernelKey("an NPU", "npu-fusion", "bfloat16", 128, "2.9")
TABLE = Rates("by hand", ((16, 0.5),), ((16, 0.25),), 1e-5, 9.0, 1e-6, launching=Launching(7e-6, "npu-fusion"))


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_launches_are_kept(tmp_path: Path) -> None:
    assert read_table(written(tmp_path / "table", to_json(TABLE, KEY))) == (KEY, TABLE)
    assert table(TABLE)[-1] == "a launch 7 µs of the host"


def test_tables_from_before_are_read(tmp_path: Path) -> None:
    """A table that says nothing of launches: each instruction is one operation, as it was."""
    document = json.loads(to_json(TABLE, KEY))
    del document["rates"]["launching"]
    found = read_table(written(tmp_path / "table", json.dumps(document)))[1]
    assert found == replace(TABLE, launching=None)


@pytest.mark.parametrize("spoilt", [{"seconds": -1.0, "kernel": "npu-fusion"}, {"seconds": 1e-6, "kernel": "none"}, {}])
def test_launches_that_cannot_be(tmp_path: Path, spoilt: dict[str, object]) -> None:
    document = json.loads(to_json(TABLE, KEY))
    document["rates"]["launching"] = spoilt
    with pytest.raises(ConfigurationError, match=r"launches of|not a table of rates"):
        read_table(written(tmp_path / "table", json.dumps(document)))


def measured(here: Here) -> Rates:
    register("2.9.1")
    setattr(measuring, "SIDES", (16, 32))  # noqa: B010 - of this rank alone, which ends with the test
    return measured_rates(NpuFusion(), torch.device("npu"), torch.bfloat16, 64, seconds=1e-9)


def test_rates_measure_launches(npus: NpuPools) -> None:
    """On an NPU: of the host, one by one, so that merges are no more than what they launch."""
    with npus.expendable(1) as alone:
        (found,) = alone(measured)
    assert found.launching is not None and found.launching.kernel == "npu-fusion"
    assert found.launching.seconds > 0 and found.op_seconds > 0 and found.merge_seconds == 0


def test_elsewhere_a_merge_is_measured_beside_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SIDES", (16,))
    monkeypatch.setattr(measuring, "timed", lambda call, _: 5e-6 if "_merge_seconds" in call.__qualname__ else 2e-6)
    found = measured_rates(Reference(), torch.device("cpu"), torch.float32, 64)
    assert found.launching is None
    assert found.op_seconds == 2e-6 and found.merge_seconds == pytest.approx(3e-6)
    assert "a copy 2 µs, a merge 5 µs" in table(found)[-1]
