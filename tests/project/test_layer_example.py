"""The example of linear layers over ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_examples import FOLDER, output_of


@pytest.mark.slow
@pytest.mark.waits
def test_an_mlp_over_ranks(tmp_path: Path, warm: str) -> None:
    said = output_of(warm, FOLDER / "tensor_parallel_mlp.py", 2, TMPDIR=str(tmp_path))
    found = re.search(r"2 ranks, relative difference (\S+), x.grad \[1, 128, 64\]", said)
    assert found is not None, said
    assert float(found[1]) < 1e-5
