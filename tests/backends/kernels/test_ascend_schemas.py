"""The signatures that the emulation registers are those of the wheels; binding to them refuses what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ascend.binding import bind
from ascend.schemas import BRANCHES, CURRENT, OFFERS, RING, WHEELS
from test_topology_dumps import shared

RECORDED = Path(__file__).resolve().parents[2] / "data" / "npu_signatures.txt"
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


class Signature(NamedTuple):
    """Arguments as (name, type, default, by name only), and the types of what is returned."""

    arguments: tuple[tuple[str, str, str, bool], ...]
    returns: tuple[str, ...]


def recorded(text: str) -> dict[str, dict[str, Signature]]:
    """By wheel and operator, from the table in tests/data."""
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    operators = {row[1]: (row[2], tuple(row[3:])) for row in rows if row[0] == "operator"}
    (head,) = (row for row in rows if row[0] == "argument")
    places: dict[str, dict[int, tuple[str, str, str, bool]]] = {short: {} for short in operators}
    for name, kind, default, *where in rows[rows.index(head) + 1 :]:
        for short, place in zip(head[3:], where, strict=True):
            if place != ".":
                places[short][int(place.removesuffix("k"))] = name, kind, default, place.endswith("k")
    made = {}
    for short, (name, returns) in operators.items():
        assert sorted(places[short]) == list(range(1, len(places[short]) + 1)), short
        made[short] = name, Signature(tuple(each for _, each in sorted(places[short].items())), returns)
    return {row[1]: dict(made[short] for short in row[2:]) for row in rows if row[0] == "wheel"}


def signature(text: str) -> Signature:
    """Of a schema as the dispatcher writes it."""
    inside, _, returns = text.partition("(")[2].partition(") -> (")
    arguments, by_name = list[tuple[str, str, str, bool]](), False
    for each in inside.split(", "):
        if each == "*":
            by_name = True
            continue
        kind, _, rest = each.partition(" ")
        name, _, default = rest.partition("=")
        arguments.append((name, kind, default or "-", by_name))
    return Signature(tuple(arguments), tuple(returns.removesuffix(")").split(", ")))


def check_recorded(text: str) -> None:
    ours = {wheel: {name: signature(each) for name, each in WHEELS[wheel].items()} for wheel in WHEELS}
    assert ours == recorded(text)


SPOILT = {
    "spelling": ("\npre_tockens ", "\npre_tokens  "),
    "default": (" 2147483647 ", " 2147483646 "),
    "place": ("23    19k", "24    19k"),
    "by name": ("29k ", "29  "),
    "type": ("\nsink                  Tensor?", "\nsink                  Tensor "),
    "return": ("Tensor Tensor int int int", "Tensor int int int"),
    "wheel": ("wheel  2.9.1         v1 grad v2 grad_2 update", "wheel  2.9.1         v1 grad v2 grad_2 update ring"),
}  # fmt: skip


def test_the_emulation_registers_what_was_recorded() -> None:
    """In a fresh clone, too."""
    check_recorded(RECORDED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("what", SPOILT)
def test_another_record_is_another(what: str) -> None:
    text, (old, new) = RECORDED.read_text(encoding="utf-8"), SPOILT[what]
    assert old in text
    with pytest.raises(AssertionError):
        check_recorded(text.replace(old, new, 1))


@pytest.mark.parametrize("wheel", WHEELS)
def test_wheels_hold_what_we_wrote(wheel: str) -> None:
    """Against the extracts of the wheels themselves, where they are at hand: both records."""
    found = shared()
    path = None if found is None else found / f"ascend/fixtures/op_schemas_torch_npu_{wheel}.txt"
    if path is None or not path.exists():
        pytest.skip("no extracts of the wheels beside this repository")
    lines = [line.strip() for line in path.read_text().splitlines() if line.startswith("npu_")]
    held = {line.partition("(")[0]: line for line in lines}
    assert {name: canonical(held[name]) if name in held else None for name in CURRENT} == {
        name: canonical(WHEELS[wheel][name]) if name in WHEELS[wheel] else None for name in CURRENT
    }
    ours = recorded(RECORDED.read_text(encoding="utf-8"))[wheel]
    assert ours == {name: signature(text) for name, text in held.items() if name in CURRENT}


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
