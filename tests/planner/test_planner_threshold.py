"""s*: the fewest tokens a rank at which attention is compute-bound."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_heads import MODELS, ModelHeads
from s_star import POINTS, SHARE, SHOWN, Place, main, places, share, thresholds

from tokenring.errors import ConfigurationError
from tokenring.planner.machines.presets import PRESETS
from tokenring.sequence.mask import Causal, Full

NICS = Place("hgx-h100", over_nics=True)


def model(heads: int) -> ModelHeads:
    return next(each for each in MODELS.values() if each.q_heads == heads)


@pytest.mark.parametrize("family", ["ring", "direct-kv"])
def test_it_is_the_first_point_that_is_enough(family: str) -> None:
    some = model(32)
    net, tensor = NICS.network()
    tokens = thresholds(NICS, some, (family,))[family]
    assert tokens is not None and tokens > POINTS[0]
    mask = Causal() if some.causal else Full()
    at, before = (share(NICS, net, some, tensor, mask, family, n) for n in (tokens, POINTS[POINTS.index(tokens) - 1]))
    assert before < SHARE <= at


def test_heads_that_do_not_split_over_the_node() -> None:
    with pytest.raises(ConfigurationError, match=r"38 .*heads.* 8|8 .*38"):
        thresholds(NICS, model(38), ("ring",))


def test_a_family_has_the_best_of_its_members() -> None:
    """No member of usp is compute-bound earlier than the family."""
    net, tensor = NICS.network()
    some = model(32)
    family = thresholds(NICS, some, ("usp",))["usp"]
    assert family is not None
    mask = Causal() if some.causal else Full()
    earlier = POINTS[POINTS.index(family) - 1]
    assert share(NICS, net, some, tensor, mask, "usp/2", earlier) < SHARE


@pytest.mark.parametrize(
    ("option", "known"), [("--presets", "hgx-h100"), ("--models", "llama-3-8b"), ("--families", "ring")]
)
def test_names_that_are_none(option: str, known: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names what there is; not an empty table, and no traceback."""
    assert main([option, f"{known},nothing"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"{option} {known},nothing: 'nothing' is not one of " in err and known in err.partition(" is not one of ")[2]


@pytest.mark.parametrize("more", [(), ("all-gather-kv", "tiles", "mixed")])
def test_the_page_is_what_the_command_prints(more: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """A row of one of its tables; and every table of the page has its columns, or those of its last section."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "s-star.md").read_text(encoding="utf-8")
    families = ["--families", ",".join(more)] if more else []
    some = list(MODELS)[-1 if more else 0]
    assert main(["--where", "nics", "--presets", "hgx-h100", "--models", some, *families]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 6 and set(printed.splitlines()) <= set(page.splitlines())
    heads = [line for line in page.splitlines() if line == f"| model | {' | '.join(more or SHOWN)} |"]
    assert len(heads) == (len(PRESETS) if more else len(places()))


def test_rings_in_seven_pieces() -> None:
    """Which no power of two divides: at the next length that they do."""
    some = model(24)
    place = Place("hgx-h100", over_nics=False)
    found = thresholds(place, some, ("multi-ring", "ring"))
    assert set(found) == {"multi-ring", "ring"}
    net, tensor = place.network()
    assert 0 < share(place, net, some, tensor, Full(), "multi-ring", 64) < SHARE


def test_what_does_not_fit_is_left_out() -> None:
    """28 heads over 8 ranks: no Ulysses."""
    found = thresholds(Place("hgx-h100", over_nics=False), model(28), ("ulysses", "ring"))
    assert set(found) == {"ring"}
