"""The grid: exact texts of schedules that people will read, exact round trips, errors that say where."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_interchange import CUSTOM, relayed, schedules, ulysses

from tokenring.errors import ScheduleError
from tokenring.ir.text import ranges
from tokenring.schedule.by_name import schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import contiguous
from tokenring.sequence.mask import Causal, Full, Mask

LEGEND = """\
# A cell: requests sent (kv3>2: kv chunk 3, to rank 2), tiles computed (q × kv), partials sent.
# Partials: o is out, in backward dq; dkv is dk and dv, in backward only; + is added to the receiver's own.
"""
RING = f"""\
schedule  ring
ranks     4
mask      causal
layout    zigzag of 512: 0,7 | 1,6 | 2,5 | 3,4
slack     1
{LEGEND}\
step | rank 0                       | rank 1                         | rank 2                         | rank 3
   0 | kv0>3  q0,7×kv0,7            | kv1,6>0  q1,6×kv1,6            | kv2,5>1  q2,5×kv2,5            | kv3,4>2  q3,4×kv3,4
   1 | kv1>3  q7×kv1,6    dkv1,6>3+ | kv2,5>0  q6×kv2,5    dkv2,5>0+ | kv3,4>1  q5×kv3,4    dkv3,4>1+ | kv0>2    q3,4×kv0    dkv0>2+
   2 | kv2>3  q7×kv2,5    dkv2,5>3+ | kv3,4>0  q6×kv3,4    dkv3,4>0+ | kv0>1    q2,5×kv0    dkv0>1+   | kv1>2    q3,4×kv1    dkv1,6>2+
   3 |        q7×kv3,4    dkv3,4>3  |          q1,6×kv0    dkv0>0    |          q2,5×kv1    dkv1,6>1  |          q3,4×kv2    dkv2,5>2"""  # noqa: E501
TOKENRING = f"""\
schedule  tokenring
ranks     4
mask      causal
layout    zigzag of 512: 0,7 | 1,6 | 2,5 | 3,4
slack     2
{LEGEND}\
step | rank 0                   | rank 1                     | rank 2                     | rank 3
   0 | q7>3  q0,7×kv0,7         | q1,6>0  q1,6×kv1,6         | q2,5>1  q2,5×kv2,5         | q3,4>2  q3,4×kv3,4
   1 | q6>3  q1,6×kv0    o1,6>1 | q2,5>0  q2,5×kv1    o2,5>2 | q3,4>1  q3,4×kv2    o3,4>3 | q7>2    q7×kv3,4    o7>0
   2 | q5>3  q2,5×kv0    o2,5>2 | q3,4>0  q3,4×kv1    o3,4>3 | q7>1    q7×kv2,5    o7>0   | q6>2    q6×kv3,4    o6>1
   3 |       q3,4×kv0    o3,4>3 |         q7×kv1,6    o7>0   |         q6×kv2,5    o6>1   |         q5×kv3,4    o5>2"""
DIRECT_Q = f"""\
schedule  direct-q
ranks     4
mask      causal
layout    zigzag of 512: 0,7 | 1,6 | 2,5 | 3,4
{LEGEND}\
step | rank 0                     | rank 1                            | rank 2                            | rank 3
   0 | q7>1-3  q0,7×kv0,7         | q6>2,3 q1,6>0  q1,6×kv1,6         | q5>3 q2,5>0,1  q2,5×kv2,5         | q3,4>0-2  q3,4×kv3,4
   1 |         q3,4×kv0    o3,4>3 |                q7×kv1,6    o7>0   |                q6×kv2,5    o6>1   |           q5×kv3,4    o5>2
   2 |         q2,5×kv0    o2,5>2 |                q3,4×kv1    o3,4>3 |                q7×kv2,5    o7>0   |           q6×kv3,4    o6>1
   3 |         q1,6×kv0    o1,6>1 |                q2,5×kv1    o2,5>2 |                q3,4×kv2    o3,4>3 |           q7×kv3,4    o7>0"""  # noqa: E501
BIDIRECTIONAL = f"""\
schedule   bidirectional
ranks      3
mask       full
layout     contiguous of 6: 0 | 1 | 2
kv_pieces  2
slack      1
{LEGEND}\
# Pieces: kv3.p1 is piece 1 of kv chunk 3; kv3 is all of them.
step | rank 0                                                   | rank 1                                                   | rank 2
   0 | kv0.p0>1 kv0.p1>2  q0×kv0                                | kv1.p0>2 kv1.p1>0  q1×kv1                                | kv2.p0>0 kv2.p1>1  q2×kv2
   1 | kv2.p0>1 kv1.p1>2  q0×kv1.p1,2.p0  dkv2.p0>1+ dkv1.p1>2+ | kv0.p0>2 kv2.p1>0  q1×kv0.p0,2.p1  dkv0.p0>2+ dkv2.p1>0+ | kv1.p0>0 kv0.p1>1  q2×kv0.p1,1.p0  dkv1.p0>0+ dkv0.p1>1+
   2 |                    q0×kv1.p0,2.p1  dkv1.p0>1 dkv2.p1>2   |                    q1×kv0.p1,2.p0  dkv2.p0>2 dkv0.p1>0   |                    q2×kv0.p0,1.p1  dkv0.p0>0 dkv1.p1>1"""  # noqa: E501


class TestText:
    @pytest.mark.parametrize("text", [RING, TOKENRING, DIRECT_Q])
    def test_of_the_schemes(self, text: str) -> None:
        name = text.split()[1]
        assert str(schedule(name, ranks=4, layout="zigzag", mask=Causal())) == text

    def test_of_pieces(self) -> None:
        assert str(schedule("bidirectional", ranks=3, layout="contiguous", length=6)) == BIDIRECTIONAL

    def test_of_head_groups_what_is_kept_and_codecs(self) -> None:
        lines = str(ulysses(2, contiguous(2, 12, cuts=3), Full())).splitlines()
        assert lines[3:8] == [
            "layout       contiguous/3 of 12: 0-2 | 3-5",
            "head_groups  2",
            "keep         kv q",
            "slack        1",
            "codecs       kv=bf16 q=fp16",
        ]
        first, second = (line.split("|")[1].split() for line in lines[-2:])
        assert first == ["h1:kv0-2>1", "h1:q0-2>1", "h0:q0-2×kv0-2"]
        assert second[-2:] == ["h0:dkv3-5>1", "h0:o3-5>1"]

    def test_of_a_partial_that_is_passed_on(self) -> None:
        assert str(relayed()).splitlines()[-4:] == [
            "step | rank 0       | rank 1 | rank 2",
            "   0 |              |        | q2>0",
            "   1 | q2×kv0  o2>1 |        |",
            "   2 |              | o2@0>2 |",
        ]

    def test_columns_are_aligned(self) -> None:
        lines = str(schedule("bidirectional", ranks=8, mask=Causal())).splitlines()
        bars = [[i for i, letter in enumerate(line) if letter == "|"] for line in lines if line[:4].strip().isdigit()]
        assert len(bars) == 8
        assert all(line == bars[0] for line in bars)

    @pytest.mark.parametrize(
        "numbers, text", [((), ""), ((3,), "3"), ((0, 1), "0,1"), ((0, 1, 2, 5, 4), "0-2,5,4"), ((2, 1, 0), "2,1,0")]
    )
    def test_ranges(self, numbers: tuple[int, ...], text: str) -> None:
        assert ranges(numbers) == text


class TestRoundTrip:
    @settings(max_examples=60, deadline=None)
    @given(schedules)
    def test_is_exact(self, made: Schedule) -> None:
        assert Schedule.parse(str(made)) == made

    @pytest.mark.parametrize("made", CUSTOM, ids=lambda made: made.name)
    def test_of_what_no_name_makes(self, made: Schedule) -> None:
        assert Schedule.parse(str(made)) == made

    def test_of_masks_that_have_no_name(self) -> None:
        made = schedule("ring", ranks=2, mask=Mask(low=-5, high=-1, cu_seqlens=(0, 9, 9, 100)))
        assert "mask      band(-5,-1)&documents(0,9,100)" in str(made)
        assert Schedule.parse(str(made)) == made

    def test_of_a_layout_that_only_shares_a_name(self) -> None:
        """A layout is written out when its name alone would give another."""
        own = schedule("ring", ranks=2, layout="contiguous", length=8)
        swapped = own.q_layout.__class__("contiguous", 2, 8, own.q_layout.chunks, (1, 0))
        made = schedule("ring", ranks=2, layout=swapped)
        assert "layout    contiguous of 8: 1 | 0\nchunks    0:4 4:8\n" in str(made)
        assert Schedule.parse(str(made)) == made

    def test_is_kind_to_people(self) -> None:
        """Blanks, empty lines, remarks, header lines in any order, x for ×, Windows line ends."""
        text = """
        # by hand
        mask causal
        ranks   2
        layout  contiguous of 4: 0|1
        slack   2
        schedule tokenring

        step|rank 0|rank 1
        0|q0xkv0|q1>0 q1xkv1
        1|q1×kv0 o1>1|
        """
        made = schedule("tokenring", ranks=2, layout="contiguous", mask=Causal(), length=4)
        assert Schedule.parse(text) == made
        assert Schedule.parse(text.replace("\n", "\r\n")) == made


REFUSED = [
    ("q7>3", "q8>3", "line 9, column 9: '8' is not a q chunk of 8"),
    ("q7>3", "q7>4", "line 9, column 11: '4' is not a rank of 4"),
    ("q7>3", "q7>3+", "line 9, column 8: 'q7>3+' is a request, to which nothing is added"),
    ("q7>3", "q7.p1>3", "line 9, column 12: '1' is not a q piece of 1"),
    ("q7>3", "q7@1>3", "line 9, column 9: '7@1' is not a q chunk, a range of them or a piece of one"),
    ("q7>3", "h1:q7>3", "line 9, column 9: '1' is not a head group of 1"),
    ("q7>3", "q7>", "line 9, column 8: 'q7>' is neither a tile like q0,7×kv3 nor a move like kv3>2"),
    ("q7>3", "q7>3,", "line 9, column 13: '' is not a number of at least 0"),
    ("q7>3", "q7-6>3", "line 9, column 9: '7-6' is an empty range"),
    ("q7>3", "q7>0-99999999999", "line 9, column 13: '99999999999' is not a rank of 4"),
    ("q7×kv3,4", "q7×kv3,4,", "line 10, column 110: '' is not a kv chunk, a range of them or a piece of one"),
    ("o3,4>3 |         q7", "o3,4@7>3 |         q7", "line 12, column 31: '7' is not a rank of 4"),
    ("   3 |", "   2 |", "line 12, column 4: '2' comes after step 2"),
    ("   3 |", "   x |", "line 12, column 4: 'x' is not a number of at least 0"),
    ("   3 |", "   3", "line 12, column 1: '   3       q3,4×kv0    o3,4>3 |      ...' has 3 cells for 4 ranks"),
    ("| rank 3", "| rank 4", "line 8, column 93: 'rank 4' should be 'rank 3'"),
    ("step |", "stop |", "line 12, column 1: '   3 |       q3,4×kv0    o3,4>3 |    ...' is the end, but"),
    ("ranks     4", "ranks     3", "line 4, column 26: '0,7 | 1,6 | 2,5 | 3,4' lists the chunks of 4 ranks"),
    ("ranks     4", "ranks     four", "line 2, column 11: 'four' is not a number of at least 1"),
    ("ranks     4\n", "", "line 7, column 1: 'step | rank 0                   | ran...' comes before any line 'ranks'"),
    ("ranks     4", "ranks 4\nranks 4", "line 3, column 1: 'ranks' stands twice"),
    ("tokenring", 'a "b"', "line 1, column 11: 'a \"b\"' is not a name; quote it as in JSON"),
    ("tokenring", '"\\u0007"', "line 1, column 11: '\"\\\\u0007\"' is not a name"),
    ("causal", "acausal", "line 3, column 11: 'acausal' is not a mask for 512 positions: unknown mask 'acausal'"),
    ("causal", "documents(0,513)", "line 3, column 11: 'documents(0,513)' is not a mask for 512 positions"),
    ("causal", '{"low": 1}', "line 3, column 11: '{\"low\": 1}' is not a mask for 512 positions: unknown mask '{"),
    ("zigzag of", "zigzag/2 of", "line 4, column 11: 'zigzag/2 of 512: 0,7 | 1,6 | 2,5 | 3,4' is not a known layout"),
    ("zigzag of", "zigzag/99999999 of", "line 4, column 11: 'zigzag/99999999 of 512: 0,7 | 1,6 | 2...' is not a known"),
    ("zigzag of 512", "zigzag", "line 4, column 11: 'zigzag: 0,7 | 1,6 | 2,5 | 3,4' is not 'NAME of LENGTH: "),
    ("0,7 | 1,6", "1,6 | 0,7", "line 4, column 11: 'zigzag of 512: 1,6 | 0,7 | 2,5 | 3,4' is not a known layout"),
    ("2,5 | 3,4", "2,5 | 3,5", "line 4, column 44: '3,5' has chunk 5, which rank 2 has"),
    ("2,5 | 3,4", "2,5 | 3,9", "line 4, column 26: '0,7 | 1,6 | 2,5 | 3,9' leaves out chunk 4"),
    ("3,4\n", "3,4\nchunks 0:64\n", "line 4, column 11: 'zigzag of 512: 0,7 | 1,6 | 2,5 | 3,4' cannot be"),
    ("3,4\n", "3,4\nchunks 0\n", "line 5, column 8: '0' is not start:stop or start:stop:step"),
    ("slack     2", "slacks    2", "line 5, column 1: 'slacks' is not a line of the header"),
    ("slack     2", "slack     -2", "line 5, column 11: '-2' is not a number of at least 0"),
    ("slack     2", "q_pieces  3", "line 5, column 11: '3' pieces do not divide chunks of 64 positions"),
    ("slack     2", "keep      v", "line 5, column 11: 'v' is not 'q', 'kv' or 'kv q'"),
    ("slack     2", "codecs    o=bf16", "line 5, column 11: 'o=bf16' is not like 'q=bf16 kv=bf16'"),
    ("slack     2", "codecs    q=a q=b", "line 5, column 11: 'q=a q=b' names a kind twice"),
    ("slack     2", "head_groups 2", "line 9, column 8: 'q7>3' does not say which of 2 head groups, as in h0:q7>3"),
]


class TestRefusals:
    @pytest.mark.parametrize("old, new, says", REFUSED, ids=range(len(REFUSED)))
    def test_says_where(self, old: str, new: str, says: str) -> None:
        text = TOKENRING.replace(old, new, 1)
        assert text != TOKENRING
        with pytest.raises(ScheduleError) as refusal:
            Schedule.parse(text)
        assert str(refusal.value).startswith(says)

    def test_of_a_text_without_a_grid(self) -> None:
        with pytest.raises(ScheduleError, match="line 2, column 1: '' is the end, but there is no line 'step"):
            Schedule.parse("ranks 4\n")

    def test_of_what_reads_but_proves_nothing(self) -> None:
        """A mutant reads back; only its proof fails."""
        made = Schedule.parse(TOKENRING.replace("o7>0", "", 1))
        with pytest.raises(ScheduleError, match="made o7@3, which never reaches its owner, rank 0"):
            made.verify()

    places = st.integers(0, len(TOKENRING))

    @settings(max_examples=200, deadline=None)
    @given(places, st.integers(0, 6), st.text(alphabet='0123456789,-|.:>@+hqkvop×x\n #{}"=', max_size=4))
    def test_whatever_the_text_is(self, at: int, length: int, put: str) -> None:
        text = TOKENRING[:at] + put + TOKENRING[at + length :]
        try:
            made = Schedule.parse(text)
        except ScheduleError:
            return
        assert Schedule.parse(str(made)) == made
