"""The signatures that the emulation registers are those of the wheels; binding to them refuses what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend.binding import bind
from ascend.schemas import BRANCHES, CURRENT, OFFERS, RING, WHEELS
from test_topology_dumps import shared

FIRST = CURRENT["npu_fusion_attention"]
X = torch.zeros(1)
FORWARD = (X, X, X, 2, "BNSD")
BAD_CALLS: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (FORWARD, {"pre_tokens": 3}, "unknown keyword argument .'pre_tokens'"),
    (FORWARD, {"scale_value": 0.5}, "unknown keyword argument .'scale_value'"),
    (FORWARD, {"query": X}, "twice"),
    (FORWARD[:4], {}, "missing .'input_layout'"),
    (FORWARD, {"actual_seq_qlen": X}, "actual_seq_qlen is Optional.List.int.., got Tensor"),
    (FORWARD, {"sparse_mode": True}, "sparse_mode is int, got bool"),
    (FORWARD, {"scale": X}, "scale is float, got Tensor"),
    (FORWARD, {"atten_mask": [X]}, "atten_mask is Optional.Tensor., got list"),
]


def canonical(text: str) -> str:
    return str(torch._C.parse_schema(f"npu::{text}"))


@pytest.mark.parametrize("wheel", WHEELS)
def test_wheels_hold_what_we_wrote(wheel: str) -> None:
    """Against the extracts of the wheels themselves, where they are at hand."""
    found = shared()
    path = None if found is None else found / f"ascend/fixtures/op_schemas_torch_npu_{wheel}.txt"
    if path is None or not path.exists():
        pytest.skip("no extracts of the wheels beside this repository")
    lines = [line.strip() for line in path.read_text().splitlines() if line.startswith("npu_")]
    held = {line.partition("(")[0]: canonical(line) for line in lines}
    assert {name: held.get(name) for name in CURRENT} == {
        name: canonical(WHEELS[wheel][name]) if name in WHEELS[wheel] else None for name in CURRENT
    }


def test_what_sets_them_apart() -> None:
    assert [wheel for wheel in WHEELS if RING not in WHEELS[wheel]] == ["2.9.1"]
    without = {offer: [name for name in ("softmax_layout", "sink", "dropout_mask") if name not in
                       OFFERS[offer].get("npu_fusion_attention", FIRST)] for offer in OFFERS}  # fmt: skip
    assert without == {
        **{wheel: [] for wheel in WHEELS},
        "op-plugin 7.1.0": ["softmax_layout", "sink", "dropout_mask"],
        "op-plugin 7.2.0": ["sink", "dropout_mask"],
        "op-plugin 7.3.0": ["dropout_mask"],
        "second version only": [],
    }
    for offer in BRANCHES.values():
        for text in offer.values():
            canonical(text)  # they parse


class TestBinding:
    def test_takes(self) -> None:
        named = {"scale": 0.5, "pre_tockens": 3, "sparse_mode": 4, "atten_mask": X, "actual_seq_qlen": [2, 5]}
        assert bind(FIRST, FORWARD, dict(named)) == {
            "query": X, "key": X, "value": X, "head_num": 2, "input_layout": "BNSD", **named,
        }  # fmt: skip

    @pytest.mark.parametrize(("positional", "named", "says"), BAD_CALLS)
    def test_refuses(self, positional: tuple[Any, ...], named: dict[str, Any], says: str) -> None:
        with pytest.raises(TypeError, match=says):
            bind(FIRST, positional, named)

    def test_by_position_what_goes_by_name_only(self) -> None:
        with pytest.raises(TypeError, match="takes 6 arguments by position"):
            bind(CURRENT["npu_fusion_attention_grad"], (X, X, X, X, 2, "BNSD", X), {})
