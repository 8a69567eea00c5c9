"""What the demo says and draws, and what it complains about: golden texts."""

from __future__ import annotations

import io
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from tokenring.cli.demo.console import DemoConsole, is_landmark, progress_bar, progress_line
from tokenring.cli.demo.report import link_matrix, schedule_text, split_text, timeline, training_text
from tokenring.cli.demo.results import Checked, DemoMeasured, Pass, Stepped, from_line, to_line, training_complaint
from tokenring.cli.trace.picture import to_svg
from tokenring.cli.trace.record import Bar, Stretch, TracedMessage
from tokenring.display.console import Ink
from tokenring.display.svg import axis_step
from tokenring.launch.follow import Failed, failure_text

CHECKED = Checked(5.5, 5.5, {"a.weight": 1e-7, "b.weight": 2e-6}, 1.0)


@pytest.mark.parametrize(
    ("checked", "says"),
    [
        (CHECKED, None),
        (replace(CHECKED, split_loss=5.5001), "the split loss 5.5001 differs"),
        (replace(CHECKED, split_loss=float("nan")), "the split loss nan differs"),
        (replace(CHECKED, gradient_errors={"a": 3e-5, "b": 1e-6}), "the gradient of a differs by 3.0e-05 relative"),
        (replace(CHECKED, gradient_errors={"a": 1.0, "b": float("nan")}), "the gradient of b differs by nan"),
    ],
)
def test_complaints_of_the_check(checked: Checked, says: str | None) -> None:
    complaint = checked.complaint()
    assert complaint is None if says is None else says in str(complaint)


def test_complaint_of_training() -> None:
    assert training_complaint([5.5, 5.0, 4.5, 3.5, 3.0, 2.5]) is None
    says = "the loss went from 5.000 to 4.500: it should fall by 1 or more"
    assert training_complaint([5.5, 5.0, 4.5, 4.5, 4.5, 4.5]) == says
    assert training_complaint([5.0, 5.0, 5.0, float("nan"), 3.0, 3.0]) is not None


FORWARD = Pass(
    "forward", [[0, 1024], [2048, 0]], [[0, 1024], [2048, 0]], {"compute": 0.06, "exposed": 0.03, "rest": 0.01}
)
BACKWARD = Pass("backward", [[0, 4096], [0, 0]], [[0, 4095], [0, 0]], {"compute": 0.1, "exposed": 0.0, "rest": 0.1})
BARS = [
    Bar(0, "forward", "compute", "attention of 4 × 4 tokens", "4 × 4", 0.0, 0.04),
    Bar(1, "forward", "wait", "wait for <message> 1", "", 0.01, 0.1),
    Bar(0, "backward", "post", "post", "", 0.11, 0.1101),
]
STRETCHES = [Stretch(0, "forward", 0.0, 0.04), Stretch(1, "forward", 0.01, 0.1), Stretch(0, "backward", 0.11, 0.1101)]
MESSAGES = [TracedMessage(0, 1, "kv0", 0.01, 0.1)]
MEASURED = DemoMeasured("ring", "few bytes " * 12, [FORWARD, BACKWARD], STRETCHES, BARS, MESSAGES)


@pytest.mark.parametrize(
    ("done", "text"),
    [
        (1, "─" * 30 + "  1/40   loss 5.512   8,123 tokens/s   1:05 left"),
        (20, "━" * 15 + "─" * 15 + " 20/40   loss 5.512   8,123 tokens/s   1:05 left"),
        (40, "━" * 30 + " 40/40   loss 5.512   8,123 tokens/s   1:05 left"),
    ],
)
def test_progress_bar(done: int, text: str) -> None:
    assert progress_bar(done, 40, 5.512, 8123.4, 64.9) == text


def test_progress_line() -> None:
    assert progress_line(7, 20, 4.25, 900.0) == "step  7/20   loss 4.250   900 tokens/s"
    assert [done for done in range(1, 21) if is_landmark(done, 20)] == [1, 3, 5, 8, 10, 13, 15, 18, 20]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_console_on_a_terminal() -> None:
    out, err = Terminal(), Terminal()
    console = DemoConsole(out, err, {"TERM": "xterm"})
    console.progress(1, 2, 5.5, 100.0, 3.0)
    console.say(console.ink.good("fine"))
    assert err.getvalue().startswith("\r\x1b[2K   ━") and err.getvalue().endswith("\r\x1b[2K")
    assert out.getvalue() == "\x1b[32mfine\x1b[0m\n"
    assert DemoConsole(out, err, {"TERM": "xterm", "NO_COLOR": "1"}).ink.good("fine") == "fine"


def test_console_in_a_file() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = DemoConsole(out, err, {"TERM": "xterm"})
    console.status("starting")
    console.progress(1, 2, 5.5, 100.0, 3.0)
    console.say(console.ink.good("fine"))
    assert out.getvalue() == "fine\n"
    assert err.getvalue() == "   step 1/2   loss 5.500   100 tokens/s\n"


def test_link_matrix() -> None:
    assert link_matrix(FORWARD, Ink()).splitlines() == [
        "   bytes, forward              to 0          to 1",
        "   from 0                         ·       1,024 ✓",
        "   from 1                   2,048 ✓             ·",
    ]
    assert link_matrix(BACKWARD, Ink()).splitlines() == [
        "   bytes, backward                to 0             to 1",
        "   from 0                            ·  4,095 (4,096) ✗",
        "   from 1                          0 ✓                ·",
    ]


def test_complaint_of_bytes() -> None:
    assert MEASURED.complaint() == "backward: link 0 → 1 carried 4,095 bytes; predicted were 4,096"
    assert replace(MEASURED, passes=[FORWARD]).complaint() is None


def test_split_table() -> None:
    assert split_text(MEASURED, 4, 2, Ink()).splitlines() == [
        "   time, mean of 4 ranks            forward        backward",
        "   █ compute                  60.0 ms   60%  100.0 ms   50%",
        "   ▒ exposed communication    30.0 ms   30%    0.0 ms    0%",
        "   ░ rest: merge, pack, post   10.0 ms   10%  100.0 ms   50%",
        "",
        "   forward   " + "█" * 26 + "▒" * 14 + "░" * 4,
        "   backward  " + "█" * 22 + "░" * 22,
        "   4 ranks share 2 cores: every part includes time without a core",
    ]
    assert "cores" not in split_text(MEASURED, 2, 2, Ink())


def test_other_texts() -> None:
    assert schedule_text(MEASURED).splitlines() == ["   schedule   ring", f"   why        {MEASURED.reason}"]
    text = training_text([5.0, 5.0, 5.0, 3.0, 3.0, 3.0], 100, 2.0, 9, Ink())
    assert text.splitlines() == [
        "   loss 5.000 → 3.000 (means of the first and last 3 steps)  ✓",
        "   6 steps of 9 (time was up) in 2 s, 300 tokens/s",
    ]


@pytest.mark.parametrize("result", [CHECKED, MEASURED, Stepped(1, 5.5, 0.1), Failed(1, "PeerLost", "gone", True)])
def test_results_come_back_from_their_lines(result: Checked | DemoMeasured | Stepped | Failed) -> None:
    assert from_line(to_line(result)) == result
    assert from_line("something else that a rank prints") is None


def test_timeline() -> None:
    picture = ElementTree.fromstring(to_svg(timeline(MEASURED, "8 tokens & <more>")))
    tips = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert "forward, rank 1: wait for <message> 1, 90.000 ms" in tips
    assert "kv0: rank 0 → rank 1" in tips
    assert len(tips) == 1 + len(BARS) + 1
    assert [axis_step(span) for span in (0.9, 11.0, 110.0, 700.0)] == [0.1, 1.0, 10.0, 100.0]


def test_failure_text() -> None:
    lost, cause = Failed(0, "PeerLost", "no answer", True), Failed(3, "ScheduleError", "no such link", True)
    assert failure_text([lost, cause], 1, "a log") == "no such link"
    assert failure_text([lost], 1, "a log") == "no answer"
    assert failure_text([lost], 1, "", (2, 9)) == "rank 2 was ended by SIGKILL; the others were ended too"
    assert failure_text([], -9, "") == "torchrun was ended by SIGKILL; the ranks were ended too"
    assert failure_text([], 1, "one\ntwo") == "the ranks ended with exit code 1; the end of their log:\none\ntwo"
    unforeseen = replace(cause, kind="IndexError", expected=False)
    assert failure_text([unforeseen], 1, "where") == "rank 3: IndexError: no such link\nwhere"
