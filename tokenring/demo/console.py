"""Where the demo writes: results on standard output, progress on standard error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import TextIO

BAR_WIDTH = 30
PLAIN_LINES = 8  # of progress, where there is no terminal


class Ink:
    """Colours of the terminal, or none."""

    def __init__(self, colour: bool = False) -> None:
        self.colour = colour

    def bold(self, text: str) -> str:
        return self._paint("1", text)

    def pale(self, text: str) -> str:
        return self._paint("2", text)

    def good(self, text: str) -> str:
        return self._paint("32", text)

    def bad(self, text: str) -> str:
        return self._paint("31", text)

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text


class Console:
    """Results as they come; below them, on a terminal, one line that is written over and over."""

    def __init__(self, out: TextIO, err: TextIO, environment: Mapping[str, str]) -> None:
        self._out, self._err = out, err
        self._live = err.isatty() and environment.get("TERM") != "dumb"
        self._shown = ""
        self.ink = Ink(out.isatty() and self._live and "NO_COLOR" not in environment)

    def say(self, text: str) -> None:
        """Lines that stay."""
        self.clear()
        self._out.write(text + "\n")
        self._out.flush()

    def complain(self, text: str) -> None:
        """Lines that stay, on standard error."""
        self.clear()
        self._err.write(text + "\n")
        self._err.flush()

    def status(self, text: str) -> None:
        """A line until the next one comes; nothing where there is no terminal."""
        if self._live and text != self._shown:
            width = shutil.get_terminal_size().columns - 1
            self._err.write("\r\x1b[2K" + text[:width])
            self._err.flush()
            self._shown = text

    def progress(self, done: int, total: int, loss: float, tokens_per_second: float, seconds_left: float) -> None:
        """A bar on a terminal, and some lines elsewhere."""
        if self._live:
            self.status("   " + progress_bar(done, total, loss, tokens_per_second, seconds_left))
        elif is_landmark(done, total):
            self.complain("   " + progress_line(done, total, loss, tokens_per_second))

    def clear(self) -> None:
        """Take away the line of the moment."""
        if self._shown:
            self._err.write("\r\x1b[2K")
            self._err.flush()
            self._shown = ""


def progress_bar(done: int, total: int, loss: float, tokens_per_second: float, seconds_left: float) -> str:
    """━━━━━━━━━━────────── 12/24   loss 2.913   3,204 tokens/s   0:34 left"""
    filled = BAR_WIDTH * done // total
    bar = "━" * filled + "─" * (BAR_WIDTH - filled)
    minutes, seconds = divmod(round(seconds_left), 60)
    counted = f"{done:{len(str(total))}}/{total}"
    return f"{bar} {counted}   loss {loss:.3f}   {tokens_per_second:,.0f} tokens/s   {minutes}:{seconds:02} left"


def progress_line(done: int, total: int, loss: float, tokens_per_second: float) -> str:
    """step 12/24   loss 2.913   3,204 tokens/s"""
    return f"step {done:{len(str(total))}}/{total}   loss {loss:.3f}   {tokens_per_second:,.0f} tokens/s"


def is_landmark(done: int, total: int) -> bool:
    """Whether a step gets a line of its own: the first, the last, and some at equal distances."""
    return done in (1, total) or done * PLAIN_LINES // total > (done - 1) * PLAIN_LINES // total


def cores() -> int:
    """How many cores we may use."""
    return len(os.sched_getaffinity(0))


def machine() -> str:
    """The processor's name and its cores."""
    name = "processor of unknown name"
    try:
        with open("/proc/cpuinfo", errors="replace") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    except OSError:
        pass
    count = cores()
    return f"{name}, {count} core{'s' if count != 1 else ''}"
