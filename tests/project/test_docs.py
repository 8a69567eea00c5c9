"""The documentation's examples are run as they stand."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.schedule.families import FAMILIES

DOCS = Path(__file__).resolve().parents[2] / "docs"


def example(page: str) -> str:
    """The page's first Python block."""
    found = re.search(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert found is not None
    return found.group(1)


def run_text(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(text, "example", "exec"), names)
    return names


def test_new_schedule_is_thirty_lines() -> None:
    code = [line for line in example("new-schedule.md").splitlines() if line.strip()]
    assert len(code) <= 30


def test_new_schedule_runs_as_written() -> None:
    names = run_text(example("new-schedule.md"))
    steps = {move.step for move in names["schedule"].moves if move.block.kind == "kv"}
    assert steps == {0, 1, 2}


def run_on_ranks(here: Here, text: str) -> list[float]:
    scheme = run_text(text)["scheme"]
    cp = here.cp(schedule=scheme)
    torch.manual_seed(3)
    q, k, v, dout = (torch.randn(2, 64, 4, 32) for _ in range(4))
    q_part, k_part, v_part = (tr.shard(x, cp).requires_grad_() for x in (q, k, v))
    out = tr.attention(q_part, k_part, v_part, cp, mask=tr.Causal())
    torch.autograd.backward(out, tr.shard(dout, cp))
    want = attention64(q, k, v, dout, allowed(tr.Causal(), 64, 64))
    grads = [x.grad for x in (q_part, k_part, v_part) if x.grad is not None]
    got = [tr.unshard(out, cp), *(tr.unshard(grad, cp) for grad in grads)]
    return [relative_error(a, b) for a, b in zip(got, (want.out, want.dq, want.dk, want.dv), strict=True)]


def test_new_schedule_is_exact_on_four_ranks(ranks: RankPools) -> None:
    for errors in ranks(4)(run_on_ranks, example("new-schedule.md")):
        assert max(errors) <= 2e-6


class TestSchedules:
    def test_page_has_every_family_as_the_registry_says_it(self) -> None:
        rows = [
            line.split(" | ") for line in (DOCS / "schedules.md").read_text().splitlines() if line.startswith("| `")
        ]
        shown = {(row[0].strip("| `"), row[2], row[5]) for row in rows}
        assert shown == {(family.form, family.shape, family.source) for family in FAMILIES.values()}

    def test_example_runs(self) -> None:
        names = run_text(example("schedules.md"))
        assert names["scheme"].name == "double-ring/4"
