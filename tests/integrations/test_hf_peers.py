"""Tables beside the context parallelism of others: a right peer is called right, a wrong one is found out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hf_families import need
from ranks import RankPools

need()
pytest.importorskip("accelerate", reason="accelerate is not installed: it is a peer")
pytest.importorskip("ringmaster", reason="axolotl-ringmaster is not installed: it is a peer")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from hf_peers import REFUSED, peer_error  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("peer", "family", "kind", "right"),
    [
        ("accelerate", "deepseek_v3", "dense", True),
        ("accelerate", "llama", "packed", False),
        ("ringmaster-ring", "qwen3", "right-padded", True),
        ("ringmaster-ring", "gpt_oss", "dense", False),
        ("ringmaster-ulysses", "granite", "packed", True),
    ],
)
def test_peers(peer: str, family: str, kind: str, right: bool, ranks: RankPools) -> None:
    error, name = max(ranks(2)(peer_error, peer, family, kind, 48))
    assert (0 <= error <= 1e-5) if right else error > 0.1, name


def test_refusals_of_peers_are_theirs(ranks: RankPools) -> None:
    for error, text in ranks(2)(peer_error, "accelerate", "mistral", "dense", 48):
        assert error == REFUSED and "Context parallelism does not support attention layers of type" in text
