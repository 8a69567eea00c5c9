"""The operators beside attention: linear layers, whose tiles are products without a softmax, and collectives.

Rows are tokens and go with q; columns are output features, or ranks, and go with kv. A weight is [features, width], so
its rows are columns here. Where nothing of a side is carried, the tile has it in its tensor of pairs.
"""

from __future__ import annotations

from tokenring.ir.schedule_data import ATTENTION, TileOperator

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
    {"forward": ("c",), "backward": ()},
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
    {"forward": (), "backward": ("dc",)},
)
REDUCE = TileOperator(  # y = sum over the columns of a: reduce-scatter; backward all-gather
    "reduce",
    {("q", "backward"): ((), ("dy",)), ("q_partial", "forward"): ((), ("y",))},
    {"forward": ("q_partial",), "backward": ()},
    "sum",
    {"forward": (0, 0), "backward": (0, 0)},
    {"forward": ("a",), "backward": ("da",)},
    {"forward": (), "backward": ("da",)},
)
GATHER = TileOperator(  # a = x in every column: all-gather; backward reduce-scatter
    "gather",
    {("q", "forward"): ((), ("x",)), ("q_partial", "backward"): ((), ("dx",))},
    {"forward": (), "backward": ("q_partial",)},
    "sum",
    {"forward": (0, 0), "backward": (0, 0)},
    {"forward": ("a",), "backward": ("da",)},
    {"forward": ("a",), "backward": ()},
)
OPERATORS = {each.name: each for each in (ATTENTION, COLUMN, ROW, REDUCE, GATHER)}
