"""Masks that cannot be are refused, in a sentence that says what to do, whatever their size."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from operator import or_
from typing import Any

import pytest
import torch

import tokenring as tr
from tokenring.errors import ConfigurationError
from tokenring.sequence.mask import parse_mask
from tokenring.sequence.slices import MOST_SLICES

MILLION = 10**6
FORM = "a slice is (q0, q1, kv0, kv1), or (q0, q1, kv0, kv1, low, high); got "
RANGES = "ranges begin at 0 or later, and end after they begin"
TOO_MANY = f"a mask of more than {MOST_SLICES} slices is not supported"
SEGMENTS = "give each segment its length, from 1 on, and its parent"

BAD: list[tuple[Callable[..., tr.Mask], tuple[Any, ...], str]] = [
    (tr.Slices, ([],), "Slices([]): give one slice at least"),
    (tr.Slices, ([(0, 4, 0)],), f"{FORM}[0, 4, 0]"),
    (tr.Slices, ([3],), f"{FORM}3"),
    (tr.Slices, (5,), "slices are a list of (q0, q1, kv0, kv1, low, high); got 5"),
    (tr.Slices, ([(4, 4, 0, 4)],), f"slice [4, 4, 0, 4]: {RANGES}"),
    (tr.Slices, ([(0, 4, 5, 4)],), f"slice [0, 4, 5, 4]: {RANGES}"),
    (tr.Slices, ([(-1, 4, 0, 4)],), f"slice [-1, 4, 0, 4]: {RANGES}"),
    (tr.Slices, ([(0, 2**60, 0, 4)],), RANGES),
    (tr.Slices, ([(None, 4, 0, 4)],), "give integers; only ends and bounds may be None"),
    (tr.Slices, ([(0, 4.5, 0, 4)],), "slice [0, 4.5, 0, 4]: give integers; only ends and bounds may be None"),
    (tr.Slices, ([(0, 4, 0, 4, 9, None)],), "slice (q 0:4, kv 0:4, 9 <= kv - q) is empty"),
    (tr.Slices, ([(0, 4, 0, 4, 2, 1)],), "slice (q 0:4, kv 0:4, 2 <= kv - q <= 1) is empty"),
    (tr.Slices, (torch.zeros(2, 2),), FORM),
    (tr.Slices, ([(0, 5, 0, 9), (3, 6, 8, 10)],), "slices (q 0:5, kv 0:9) and (q 3:6, kv 8:10) overlap"),
    (tr.Chunks, (0,), "Chunks(0): give the positions of a chunk, a positive integer"),
    (tr.Chunks, ("4",), "Chunks('4'): give the positions of a chunk"),
    (tr.BlockCausal, (-1,), "Chunks(-1): give the positions of a chunk"),
    (tr.Bidirectional, ([],), "spans are a list of pairs, one at least; got []"),
    (tr.Bidirectional, ([(3,)],), "spans are a list of pairs, one at least; got [(3,)]"),
    (tr.Bidirectional, (7,), "spans are a list of pairs, one at least; got 7"),
    (tr.Bidirectional, ([(5, 3)],), f"slice [5, 3, 5, 3]: {RANGES}"),
    (tr.Bidirectional, ([(0, 5), (4, 9)],), "slices (q 0:5, kv 0:5) and (q 4:9, kv 4:9) overlap"),
    (tr.PrefixLM, (-1,), "PrefixLM(-1): a prefix has 0 positions or more, an integer"),
    (tr.PrefixLM, ("a",), "PrefixLM('a'): a prefix has 0 positions or more, an integer"),
    (tr.PrefixLM, ([1, 2],), "PrefixLM: 2 prefixes, but 1 documents; give one for each"),
    (tr.PrefixLM, ([1, 2], [0, 5]), "PrefixLM: 2 prefixes, but 1 documents; give one for each"),
    (tr.PrefixLM, ([1, 2], [1, 5]), "Documents wants [0, end of the first, "),
    (tr.PrefixTree, ([], []), SEGMENTS),
    (tr.PrefixTree, ([3, 0], [None, 0]), SEGMENTS),
    (tr.PrefixTree, ([3], [None, 0]), SEGMENTS),
    (tr.PrefixTree, ([3, 2], [None, 1]), "parent 1 of segment 1: give an earlier one, or None"),
    (tr.PrefixTree, ([3, 2], [None, "a"]), "parent 'a' of segment 1: give an earlier one, or None"),
    (tr.Documents, ([0, 5], [0, 3, 4]), "Documents: 1 parts of q, but 2 of kv; cut both into as many"),
    (tr.Mask, (None, None, None, (), [(0, 4, 0)]), FORM),
    (tr.Mask, (None, None, None, (), None, ((tr.Causal(), 3),)), "| joins a mask and a mask"),
]


@pytest.mark.parametrize(("make", "given", "says"), BAD, ids=[f"{each[0].__name__}{each[1]}"[:60] for each in BAD])
def test_what_is_wrong(make: Callable[..., tr.Mask], given: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        make(*given)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cu_seqlens_kv": [0, 3], "windows": [(1, 1)]}, "take no windows and no q_start: say these by Slices"),
        ({"cu_seqlens_kv": [0, 3], "q_start": 4}, "take no windows and no q_start: say these by Slices"),
        ({"windows": []}, "windows are a list of pairs, one at least; got []"),
        ({"windows": 7}, "windows are a list of pairs, one at least; got 7"),
        ({"windows": [(1, 1)] * 2}, "Documents: 2 windows for 1 documents; give each one"),
        ({"windows": [(-2, 0)]}, "a document's window(-2, 0): use integers, 0 or more"),
        ({"q_start": -1}, "q_start=-1: the position of the first of q among those of kv is an integer, 0 or more"),
        ({"q_start": 1.5}, "q_start=1.5: the position"),
        ({"q_start": True}, "q_start=True: the position"),
    ],
)
def test_documents(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        tr.Documents([0, 5], **options)


@pytest.mark.parametrize("join", ["__and__", "__or__"])
def test_masks_that_number_q_differently(join: str) -> None:
    for other in (tr.Causal(), tr.Causal(q_start=4), tr.Slices([(0, 4, 0, 4)])):
        with pytest.raises(ConfigurationError, match="number q differently, 'causal&start\\(3\\)' from 3 and"):
            getattr(tr.Causal(q_start=3), join)(other)
    assert (tr.Causal() & tr.Slices([(0, 4, 0, 4)])).q_start is None  # both begin at 0
    assert (tr.Causal(q_start=3) & tr.Full()).q_start == 3


@pytest.mark.parametrize(
    ("join", "found"),
    [
        (lambda: or_(tr.Causal(), 3), "one of type int"),
        (lambda: or_(None, tr.Causal()), "one of type NoneType"),
        (lambda: or_(tr.Causal, tr.Chunks(3)), "Causal without ()"),
    ],
)
def test_what_is_joined(join: Callable[[], object], found: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        join()
    assert str(refusal.value) == f"| joins a mask and a mask, as in Causal() | Bidirectional(...); found {found}"


class TestSize:
    """What has too many slices is refused before they are all made, or compared."""

    def test_a_million_slices(self) -> None:
        starts = torch.arange(MILLION)
        squares = torch.stack([starts, starts + 1, starts, starts + 1], dim=1)
        for given in (squares, [(0, 1, 0, 1)] * MILLION, ((at, at + 1, at, at + 1) for at in itertools.count())):
            with pytest.raises(ConfigurationError, match=TOO_MANY):
                tr.Slices(given)

    def test_a_tree_of_many_ancestors(self) -> None:
        """Each of 40,000 segments sees half of those before it: 400 million slices."""
        with pytest.raises(ConfigurationError, match=TOO_MANY):
            tr.PrefixTree([1] * 40_000, [None, *(max(0, at - 2) for at in range(1, 40_000))])

    def test_slices_across_each_other(self) -> None:
        """Nothing orders these, so that each would have to be compared with each."""
        count = MOST_SLICES // 4
        rows = [(at, None, at * 7919 % count, at * 7919 % count + 1) for at in range(count)]
        with pytest.raises(ConfigurationError, match="lie too much across each other to be compared"):
            tr.Slices(rows)

    def test_conjunctions_of_many(self) -> None:
        """1,000 columns and 1,000 rows make a million slices."""
        thin, whole = [(2 * at, 2 * at + 1) for at in range(1000)], (0, 2000)
        rows, columns = tr.Slices([(*each, *whole) for each in thin]), tr.Slices([(*whole, *each) for each in thin])
        with pytest.raises(ConfigurationError, match=TOO_MANY):
            rows & columns

    def test_many_documents_are_cheap(self) -> None:
        """Of 100,000 documents a pair of chunks looks at few; Chunks have no number at all."""
        mask = tr.Causal() & tr.Documents(range(0, 700_001, 7))
        assert len(mask.region(tr.Positions(349_990, 350_020), tr.Positions(350_000, 350_040))) == 3
        assert len(mask._cuts) == 1 and mask.slices is None
        far = 2**50
        assert len(tr.Chunks(7).region(tr.Positions(far, far + 20), tr.Positions(far, far + 20))) == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slices(0,5,0,5,,;4,9,0,9,,)", "slices (q 0:5, kv 0:5) and (q 4:9, kv 0:9) overlap"),
        ("slices(0,5)", FORM),
        ("slices()", "Slices([]): give one slice at least"),
        ("bidirectional(5,3)", RANGES),
        ("tree(3,2;,4)", "parent 4 of segment 1"),
        ("tree(3,2)", "unknown mask 'tree(3,2)'"),
        ("chunks(0)", "unknown mask 'chunks(0)'"),
        ("chunks(3;4)", "unknown mask 'chunks(3;4)'"),
        ("start(3)&start(4)", "unknown mask 'start(4)'"),
        ("start(a)", "unknown mask 'start(a)'"),
        ("(causal|", "unknown mask '(causal|'"),
        ("causal|", "unknown mask ''"),
        ("()", "unknown mask ''"),
        ("causal)(", "unknown mask 'causal)('"),
        ("(" * 40 + "causal" + ")" * 40, "more than 16 parentheses stand in each other"),
        ("prefixx(3)", "did you mean prefix"),
    ],
)
def test_texts(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        parse_mask(text)


@pytest.mark.parametrize("make", [tr.PrefixLM, tr.Chunks, tr.BlockCausal, tr.Bidirectional, tr.PrefixTree, tr.Slices])
def test_classes_without_their_sizes(make: Callable[..., tr.Mask]) -> None:
    x = torch.randn(1, 4, 1, 8)
    with pytest.raises(ConfigurationError, match=rf"^mask={make.__name__} has no sizes: write {make.__name__}\("):
        tr.attention(x, x, x, tr.ContextParallel(), make)
