"""Masks by class, by text and by is_causal: what is clear is taken, else all ranks hear how to write it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ranks import Here, RankPools

import tokenring as tr
from tokenring import ConfigurationError, ContextParallel
from tokenring.runtime.agreement import Disagreement

ODD = 1
X = torch.randn(1, 16, 2, 16, generator=torch.Generator().manual_seed(0))
ALONE = ContextParallel()

TAKEN: list[tuple[dict[str, Any], tr.Mask]] = [
    ({"mask": tr.Causal}, tr.Causal()),
    ({"mask": tr.Full}, tr.Full()),
    ({"mask": "causal"}, tr.Causal()),
    ({"mask": "full"}, tr.Full()),
    ({"mask": "window(4,0) & documents(0,7,16)"}, tr.SlidingWindow(4) & tr.Documents([0, 7, 16])),
    ({"is_causal": True}, tr.Causal()),
    ({"is_causal": False}, tr.Full()),
    ({"mask": tr.Causal(), "is_causal": True}, tr.Causal()),
    ({"mask": "window(4,0)", "is_causal": True}, tr.SlidingWindow(4)),
    ({"mask": tr.SlidingWindow(4, 4), "is_causal": False}, tr.SlidingWindow(4, 4)),
]
USE = "use Full(), Causal(), SlidingWindow or Documents"
DIFFER = "say different things: leave is_causal out"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mask": "casual"}, "joined by & or |, with &start(q_start) at the end; did you mean causal?"),
    ({"mask": "Causal"}, "did you mean causal?"),
    ({"mask": "sliding_window(4)"}, "did you mean window?"),
    ({"mask": tr.SlidingWindow}, "mask=SlidingWindow has no sizes: write SlidingWindow(left, right); "),
    ({"mask": tr.Documents}, "mask=Documents has no sizes: write Documents([0, end of the first, ...]); "),
    ({"mask": torch.ones(16, 16).tril() > 0}, f"mask is of type Tensor; {USE}: say which positions see which"),
    ({"mask": True}, f"mask is of type bool; {USE}; is_causal=True says what that seems to mean"),
    ({"mask": 3}, f"mask is of type int; {USE}"),
    ({"mask": [4, 0]}, f"mask is of type list; {USE}"),
    ({"mask": ([0, 7, 16],)}, f"mask is of type tuple; {USE}"),
    ({"is_causal": 1}, "is_causal is neither True nor False"),
    ({"mask": tr.Causal(), "is_causal": False}, DIFFER),
    ({"mask": tr.Full(), "is_causal": True}, DIFFER),
    ({"mask": "documents(0,7,16)", "is_causal": True}, DIFFER),
]


def shown(case: object) -> str:
    return str(case) if isinstance(case, (dict, str)) and "0x" not in str(case) else ""


@pytest.mark.parametrize(("given", "meant"), TAKEN, ids=shown)
def test_what_is_clear(given: dict[str, Any], meant: tr.Mask) -> None:
    assert torch.equal(tr.attention(X, X, X, ALONE, **given), tr.attention(X, X, X, ALONE, meant))
    assert tr.plan(X, X, X, ALONE, **given).schedule.mask == meant


@pytest.mark.parametrize(("given", "says"), REFUSED, ids=shown)
def test_what_is_not(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        tr.attention(X, X, X, ALONE, **given)
    assert says in str(caught.value)
    with pytest.raises(ConfigurationError) as again:
        tr.plan(X, X, X, ALONE, **given)
    assert str(again.value) == str(caught.value)


def test_of_a_schedule() -> None:
    for given in (tr.Causal, "causal"):
        assert tr.schedule("ring", 2, mask=given) == tr.schedule("ring", 2, mask=tr.Causal())
    with pytest.raises(ConfigurationError, match="did you mean causal"):
        tr.schedule("ring", 2, mask="casual")


# ---------- under torch.compile


def compiled(cp: ContextParallel, given: dict[str, Any]) -> torch.Tensor:
    """The result of a call that was traced as one graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of its own parts
        import torch._dynamo as dynamo

        dynamo.reset()

        def call(x: torch.Tensor) -> torch.Tensor:
            attended: torch.Tensor = tr.attention(x, x, x, cp, **given)
            return attended

        made: Any = torch.compile(call, backend="aot_eager", fullgraph=True)
        out: torch.Tensor = made(X)
        dynamo.reset()
    return out


@pytest.mark.parametrize(("given", "meant"), [TAKEN[0], TAKEN[2], TAKEN[4], TAKEN[5], TAKEN[8]], ids=shown)
def test_what_is_clear_to_a_compiler(given: dict[str, Any], meant: tr.Mask) -> None:
    assert torch.equal(compiled(ALONE, given), tr.attention(X, X, X, ALONE, meant))


@pytest.mark.parametrize(("given", "says"), [REFUSED[0], REFUSED[3], REFUSED[7], REFUSED[-2]], ids=shown)
def test_what_is_not_to_a_compiler(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        compiled(ALONE, given)
    assert says in str(caught.value)


# ---------- what one rank refuses, all hear


def one_refuses(here: Here, given: dict[str, Any], is_compiled: bool) -> tuple[str, str]:
    cp = here.cp(schedule="ring")
    mine = given if here.rank == ODD else {"mask": tr.Causal()}
    try:
        compiled(cp, mine) if is_compiled else tr.attention(X, X, X, cp, **mine)
        found = ("nothing", "")
    except tr.TokenRingError as error:
        found = (type(error).__name__, str(error))
    tr.attention(X, X, X, cp, "causal")  # and life goes on
    return found


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("given", "says"), [REFUSED[0], REFUSED[-3]], ids=shown)
def test_all_ranks_hear(given: dict[str, Any], says: str, is_compiled: bool, ranks: RankPools) -> None:
    for rank, (kind, text) in enumerate(ranks(2)(one_refuses, given, is_compiled)):
        assert says in text
        assert kind == (ConfigurationError if rank == ODD else Disagreement).__name__
