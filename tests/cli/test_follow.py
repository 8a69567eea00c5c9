"""Ranks that fail, and whoever follows them: each has time for its last words, and all are heard out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tokenring.errors import ConfigurationError
from tokenring.launch import follow
from tokenring.launch.follow import LAST_WORDS_SECONDS, CommandFailed, Failed
from tokenring.launch.processes import Interrupts


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Ranks:
    """What ranks say, and when; they end all together."""

    def __init__(self, clock: Clock, said: dict[float, str], ends: float) -> None:
        self.clock, self.said, self.ends = clock, dict(said), ends

    def read(self, seconds: float) -> list[str]:
        self.clock.now += seconds
        return [self.said.pop(at) for at in sorted(self.said) if at <= self.clock.now]

    def exit_code(self) -> int | None:
        return 1 if self.clock.now >= self.ends else None

    def log(self) -> str:
        return ""

    def killed(self) -> tuple[int, int] | None:
        return None


@pytest.mark.parametrize(("error", "expected"), [(ConfigurationError("two\nlines"), True), (ValueError("odd"), False)])
def test_a_rank_that_fails(
    error: Exception, expected: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Says so at once, with a traceback in its log, and ends only after others could have said more."""
    clock, said = Clock(monkeypatch), list[tuple[float, Failed]]()
    monkeypatch.setenv("RANK", "3")
    assert follow.fail(error, lambda failed: said.append((clock.now, failed))) == 1
    assert said == [(0.0, Failed(3, type(error).__name__, " ".join(str(error).split()), expected))]
    assert clock.slept == [LAST_WORDS_SECONDS]
    assert type(error).__name__ in capsys.readouterr().err


@pytest.mark.usefixtures("own_signals")
def test_all_who_fail_are_heard_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that lost a peer says so first; the peer itself, last of all, knows more. Then nobody is waited for."""
    clock = Clock(monkeypatch)
    failures = {"first": Failed(0, "PeerLost", "lost rank 1", True), "last": Failed(1, "Refused", "no memory", True)}
    ranks = Ranks(clock, {1.0: "first", 1.0 + LAST_WORDS_SECONDS: "last"}, ends=600.0)
    with pytest.raises(CommandFailed, match=r"^no memory$"):
        follow.follow(ranks, Interrupts(), failures.get, lambda seconds: None, lambda: "testing", 900.0)
    assert clock.now < 1.0 + 3 * LAST_WORDS_SECONDS
