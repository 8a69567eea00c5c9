"""Contexts, linear layers, caches and plans, as print and help show them."""

from __future__ import annotations

import pydoc
import re

import pytest
import torch
from ranks import Here, RankPools

import tokenring as tr
from tokenring import ContextParallel

X = torch.ones(1, 16, 2, 16)


def of_ranks(here: Here) -> str:
    return repr(here.cp(schedule="usp/2", layout="striped"))


def test_a_context_says_what_it_is(ranks: RankPools) -> None:
    assert repr(ContextParallel()) == "ContextParallel(schedule auto, layout zigzag, rank 0 of 1)"
    said = "ContextParallel(schedule usp/2, layout striped, rank {} of 2)"
    assert ranks(2)(of_ranks) == [said.format(0), said.format(1)]


def test_of_a_schedule_and_a_layout_of_ones_own() -> None:
    made = tr.schedule("ring", 1, "striped", length=16)
    cp = ContextParallel(schedule=made, layout=made.q_layout)
    assert str(cp) == "ContextParallel(schedule ring, layout striped, rank 0 of 1)"
    cp.close()
    assert str(cp).endswith("rank 0 of 1, closed)")


CALLED = {"close", "group", "trace", "transport"}
ASKED = {
    "kernel_name", "layout", "max_error", "memory_limit_bytes", "pieces", "rank", "schedule", "tensor_parallel",
    "timeout_seconds", "topology", "wire", "world_size",
}  # fmt: skip


def test_help_shows_what_users_call() -> None:
    """A method that is new is for users, or is listed with those that are not."""
    text = pydoc.plain(pydoc.render_doc(ContextParallel))
    shown = set(re.findall(r"^ \|  ([a-z]\w*)(?:\(|$)", text, re.MULTILINE))
    assert shown == CALLED
    assert {name for name in dir(ContextParallel()) if not name.startswith("_")} == CALLED | ASKED
    for part in ("cp = tr.ContextParallel(", "tr.shard(x, cp", "tr.attention(q, k, v, cp", "cp.rank of cp.world_size"):
        assert part in text


EXAMPLES: dict[type, tuple[set[str], tuple[str, ...]]] = {
    tr.TensorParallel: (
        {"close", "plan", "shard"},
        ("tp = tr.TensorParallel(", "tp.shard(", "tr.column_linear(x, w_in, tp)", "tp.rank of tp.world_size"),
    ),
    tr.KVCache: (
        {"capacity", "close", "crop", "drop", "held", "length", "local_length", "nbytes", "page", "positions",
         "reorder", "reset", "starts", "step"},
        ("cache = tr.KVCache(cp, ", "with cache.step(token_ids):", "tr.cached_attention(q, k, v, cache, layer=3)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_help_of_the_others(kind: type) -> None:
    text = pydoc.plain(pydoc.render_doc(kind))
    called, parts = EXAMPLES[kind]
    assert set(re.findall(r"^ \|  ([a-z]\w*)(?:\(|$)", text, re.MULTILINE)) == called
    assert "__annotations__" not in text and "_internal" not in text
    assert not [part for part in parts if part not in text]


def test_of_linear_layers() -> None:
    tp = tr.TensorParallel(schedule="direct-q")
    assert repr(tp) == "TensorParallel(schedule direct-q, rank 0 of 1)"
    tp.close()
    assert repr(tp) == "TensorParallel(schedule direct-q, rank 0 of 1, closed)"


def test_what_is_not_shown_is_there() -> None:
    assert all(hasattr(ContextParallel(), name) for name in ContextParallel._internal)
    assert all(hasattr(tr.TensorParallel(), name) for name in tr.TensorParallel._internal)
