"""What print and help show: a context, a plan."""

from __future__ import annotations

import pydoc
import re

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
    "kernel_name", "layout", "memory_limit_bytes", "pieces", "rank", "schedule", "tensor_parallel", "timeout_seconds",
    "topology", "world_size",
}  # fmt: skip


def test_help_shows_what_users_call() -> None:
    """A method that is new is for users, or is listed with those that are not."""
    text = pydoc.plain(pydoc.render_doc(ContextParallel))
    shown = set(re.findall(r"^ \|  ([a-z]\w*)(?:\(|$)", text, re.MULTILINE))
    assert shown == CALLED
    assert {name for name in dir(ContextParallel()) if not name.startswith("_")} == CALLED | ASKED
    for part in ("cp = tr.ContextParallel(", "tr.shard(x, cp", "tr.attention(q, k, v, cp", "cp.rank of cp.world_size"):
        assert part in text


def test_what_is_not_shown_is_there() -> None:
    assert all(hasattr(ContextParallel(), name) for name in ContextParallel._internal)
