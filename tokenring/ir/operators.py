"""The operators beside attention: linear layers, whose tiles are products without a softmax, and collectives.

Rows are tokens and go with q; columns are output features, or ranks, and go with kv. A weight is [features, width], so
its rows are columns here. Where nothing of a side is carried, the tile has it in its tensor of pairs.

column-dx and the like are layers whose backward makes one result alone: of frozen weights, or of an input without a
gradient. Nothing moves that only the other one needs. column-x also keeps x of all rows, for who computes dw by itself.
"""

from __future__ import annotations

from dataclasses import replace

from tokenring.ir.schedule_data import ATTENTION, ATTENTION_OUT, Kind, TileOperator


def _backward_of(
    layer: TileOperator, result: str, home: tuple[Kind, ...], unused: tuple[Kind, ...], pairs: tuple[str, ...]
) -> TileOperator:
    """Return a layer whose backward makes this result alone: half of the products, without what is unused then."""
    return replace(
        layer,
        name=f"{layer.name}-{result}",
        carries={of: names for of, names in layer.carries.items() if of[1] == "forward" or of[0] not in unused},
        home={**layer.home, "backward": home},
        flops={**layer.flops, "backward": (2, 0)},
        pairs={**(layer.pairs or {}), "backward": pairs},
    )


COLUMN = TileOperator(  # c = x wᵀ: all-gather, then matmul; backward matmul, then reduce-scatter
    "column",
    {
        ("q", "forward"): ((), ("x",)),
        ("q", "backward"): ((), ("x",)),
        ("kv", "forward"): ((), ("w",)),
        ("kv", "backward"): ((), ("w",)),
        ("q_partial", "backward"): ((), ("dx",)),
        ("kv_partial", "backward"): ((), ("dw",)),
    },
    {"forward": (), "backward": ("q_partial", "kv_partial")},
    "sum",
    {"forward": (2, 0), "backward": (4, 0)},
    {"forward": ("c",), "backward": ("dc",)},
)
ROW = TileOperator(  # y = c w: matmul, then reduce-scatter; backward all-gather, then matmul
    "row",
    {
        ("q", "backward"): ((), ("dy",)),
        ("kv", "forward"): ((), ("w",)),
        ("kv", "backward"): ((), ("w",)),
        ("q_partial", "forward"): ((), ("y",)),
        ("kv_partial", "backward"): ((), ("dw",)),
    },
    {"forward": ("q_partial",), "backward": ("kv_partial",)},
    "sum",
    {"forward": (2, 0), "backward": (4, 0)},
    {"forward": ("c",), "backward": ("c", "dc")},
)
REDUCE = TileOperator(  # y = sum over the columns of a: reduce-scatter; backward all-gather
    "reduce",
    {("q", "backward"): ((), ("dy",)), ("q_partial", "forward"): ((), ("y",))},
    {"forward": ("q_partial",), "backward": ()},
    "sum",
    {"forward": (0, 0), "backward": (0, 0)},
    {"forward": ("a",), "backward": ("da",)},
)
GATHER = TileOperator(  # a = x in every column: all-gather; backward reduce-scatter
    "gather",
    {("q", "forward"): ((), ("x",)), ("q_partial", "backward"): ((), ("dx",))},
    {"forward": (), "backward": ("q_partial",)},
    "sum",
    {"forward": (0, 0), "backward": (0, 0)},
    {"forward": ("a",), "backward": ("da",)},
)
COLUMN_DX = _backward_of(COLUMN, "dx", ("q_partial",), ("q", "kv_partial"), ("dc",))
COLUMN_DW = _backward_of(COLUMN, "dw", ("kv_partial",), ("kv", "q_partial"), ("dc",))
ROW_DC = _backward_of(ROW, "dc", (), ("kv_partial",), ("dc",))
ROW_DW = _backward_of(ROW, "dw", ("kv_partial",), ("kv",), ("c",))
COLUMN_X = replace(COLUMN, name="column-x", pairs={**(COLUMN.pairs or {}), "forward": ("c", "a")})
OPERATORS = {
    each.name: each
    for each in (ATTENTION, COLUMN, ROW, REDUCE, GATHER, COLUMN_DX, COLUMN_DW, COLUMN_X, ROW_DC, ROW_DW, ATTENTION_OUT)
}
