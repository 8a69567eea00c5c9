"""Fixtures broken at random: an answer, or our own error with line and column; never anything else."""

from __future__ import annotations

import random

import pytest
from broken_dumps import DATA, answer, fixtures, mutate

from tokenring.topology.model.schema import to_json
from tokenring.topology.sources import read


@pytest.mark.parametrize("seed", range(8))
def test_broken_fixtures(seed: int) -> None:
    """2,000 in all; benchmarks/mutations.py makes 100,000."""
    chance, texts = random.Random(seed), fixtures()
    assert len(texts) > 100
    for _ in range(250):
        mutate(texts, chance)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "GPU0 " * 200_000,
        "\tGPU0\n" + "GPU0\tX\n" * 100_000,
        "NV" * 1_000_000 + "\nGPU0 CPU Affinity\n",
        "GPU0\t" + "NODE" * 500_000,
        "<system>" + "<pci>" * 100_000,
        "<system>" + '<pci busid="0000:00:00.0" class="0x030200"/>' * 20_000 + "</system>",
        "\t" + "\t".join(f"GPU{i}" for i in range(2000)),
        "|GPU0|" * 100_000,
        "mlx" + "a_" * 500_000 + " GPU0 CPU Affinity",
        "Link Type between two GPUs\n" + " ".join(f"GPU{i}" for i in range(9000)),
        "Link Type between two GPUs\nGPU0 GPU1\n" + "GPU0 0 XGMI\n" * 100_000,
        "LINK METRIC TABLE:\n" + "".join(f"GPU{i} 0000:{i:02x}:00.0 32 Gb/s 512 Gb/s XGMI\n" for i in range(256)) * 99,
        "GPU 0: x (UUID: y)\n" + " " * 1_000_000 + "GPU",
        "GPU 0: " + " " * 1_000_000 + "x\n\t Link 0: 25 GB/s",
        "GPU 0: x (UUID: y)\n" + "\t Link 0: Remote Device 00000000:07:00.0: Link 0\n" * 50_000,
        "NVSMI LOG\n" + "GPU 00000000:07:00.0\n" * 50_000,
        "-[0000:00]-+-00.0\n" + " " * 500_000 + "\\-01.0-[01]-" + "-00.0-[02]-" * 50_000,
        "-[0000:00]-+-00.0\n"
        + "".join(f"  \\-{i % 256:02x}.{i // 256}  NVIDIA Corporation GA100\n" for i in range(2000)),
        "<graphs>"
        + '<graph speedintra="9" typeintra="SYS"><channel><gpu dev="0"/><gpu dev="1"/></channel></graph>' * 9000,
        "<topology>" + '<object type="Bridge" bridge_pci="0000:[00-01]">' * 250,
        '<topology><object type="PCIDev" pci_busid="0000:00:00.0" pci_type="0302 [10de:1]"/>' + "<object/>" * 100_000,
        '{"matrix": [' + "[" * 500_000,
        '{"ids": ["0"], "matrix": [["' + "X" * 1_000_000 + '"]]}',
    ],
    ids=lambda text: text[:20].strip(),
)
def test_big_ones_have_an_answer(text: str) -> None:
    """Within the time limit: each takes minutes if its cost grows with the square of its length."""
    answer(text)


def test_halves_of_characters_can_be_printed() -> None:
    """JSON may spell what no text can hold."""
    text = (DATA / "hccl-1.0.json").read_text(encoding="utf-8").replace('"server_id": "', '"server_id": "\\ud800', 1)
    assert "\\ud800" in text
    to_json([read(text)]).encode()
