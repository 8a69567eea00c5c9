"""Parts that commands share in front of the user: options, results on standard output, the machine's name."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TextIO

from tokenring.display.safe_text import plain, plain_lines
from tokenring.display.wrapping import INK, fitted
from tokenring.errors import ConfigurationError
from tokenring.nearest import hint

CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
STRAY = re.compile(r"unrecognized arguments: (?:[^-]\S* )*(--?[^\s=]+)")
BARE = re.compile(r"unrecognized arguments: ([a-z][\w/,-]*)$")
SCHEDULES = "--schedules"  # of commands that take several
LARGEST = 1 << 50  # of any count; far above, Python's containers and torch overflow


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigurationError, as the rest of tokenring does."""

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        """Parse as argparse does, and refuse integers larger than LARGEST. Raises ConfigurationError."""
        found = super().parse_known_args(*given, **named)
        self._command = getattr(found[0], "command", None)
        for action in self._actions:
            value = getattr(found[0], action.dest, None)
            if isinstance(value, int) and abs(value) > LARGEST:
                self.error(f"argument {'/'.join(action.option_strings)}: {value} is too large: {LARGEST} at most")
        return found

    def error(self, message: str) -> NoReturn:
        """Raise ConfigurationError with argparse's message, a hint where one is known, and where to find help."""
        command = getattr(self, "_command", None)
        asked = self.prog if command is None else f"{self.prog} {command}"
        raise ConfigurationError(f"{message}{self._hint(message)}; see {asked} --help")

    def _hint(self, message: str) -> str:
        """Guess the choice or the option that was meant, from argparse's complaint; "" if nothing is near."""
        if (choice := CHOICE.search(message)) is not None:
            return hint(choice[1], re.findall(r"[\w./-]+", choice[2]))
        if (stray := STRAY.match(message)) is not None:
            long = [each.removeprefix("--") for each in _options(self) if each.startswith("--")]
            return hint(stray[1].lstrip("-"), long, "--")
        if (bare := BARE.match(message)) is not None and SCHEDULES in _options(self):
            return f"; did you mean {SCHEDULES} {bare[1]}?"
        return ""


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options that help shows, of the commands of a parser too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _options(each)
        elif action.help != argparse.SUPPRESS:
            yield from action.option_strings


def read_options(read: Callable[[list[str]], argparse.Namespace], argv: list[str]) -> argparse.Namespace | int:
    """Return what `read` parses from a command's arguments; the exit code where --help or --version has ended it.

    Raises ConfigurationError, from Parser, for arguments that are wrong.
    """
    try:
        return read(argv)
    except SystemExit as done:
        return int(done.code or 0)


class Ink:
    """The colours of a terminal, or none."""

    def __init__(self, colour: bool = False) -> None:
        self.colour = colour

    def bold(self, text: str) -> str:
        """Return the text in bold."""
        return self._paint("1", text)

    def pale(self, text: str) -> str:
        """Return the text in a pale colour."""
        return self._paint("2", text)

    def good(self, text: str) -> str:
        """Return the text in green."""
        return self._paint("32", text)

    def bad(self, text: str) -> str:
        """Return the text in red."""
        return self._paint("31", text)

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text


def harmless(text: str) -> str:
    """Return lines without anything that drives a terminal, except the colours of Ink: names may come from anybody."""
    parts = INK.split(text)
    return "".join(part if at % 2 else plain_lines(part) for at, part in enumerate(parts))


class Console:
    """An output of results as they come; below them, on a terminal, one line that is written over and over."""

    def __init__(self, out: TextIO, err: TextIO, environment: Mapping[str, str]) -> None:
        self._out, self._err = out, err
        self.live = err.isatty() and environment.get("TERM") != "dumb"
        self._shown = ""
        self.ink = Ink(out.isatty() and self.live and "NO_COLOR" not in environment)

    def say(self, text: str) -> None:
        """Write lines that stay, to standard output; on a terminal none is longer than it."""
        self.data(fitted(self._harmless(text), self._out) + "\n")

    def data(self, text: str) -> None:
        """Write text for a program, such as JSON, unchanged to standard output."""
        self.clear()
        self._out.write(text)
        self._out.flush()

    def complain(self, text: str) -> None:
        """Write lines that stay, to standard error."""
        self.clear()
        self._err.write(self._harmless(text) + "\n")
        self._err.flush()

    def _harmless(self, text: str) -> str:
        return harmless(text) if self.ink.colour else plain_lines(text)

    def status(self, text: str) -> None:
        """Show a line until the next one comes; do nothing where there is no terminal."""
        if self.live and text != self._shown:
            width = shutil.get_terminal_size().columns - 1
            self._err.write("\r\x1b[2K" + plain(text)[:width])
            self._err.flush()
            self._shown = text

    def clear(self) -> None:
        """Take away the line that status has shown."""
        if self._shown:
            self._err.write("\r\x1b[2K")
            self._err.flush()
            self._shown = ""


def check_suffix(option: str, path: str | None, *known: str) -> str:
    """Return the suffix of a file that an option names, or "" where it has none and any content will do.

    Raises ConfigurationError for a suffix that promises a format that the option does not write.
    """
    suffix = Path(path or "").suffix.lower()
    if suffix and suffix not in known:
        named = " or ".join(known)
        raise ConfigurationError(f"{option} {path!r}: {suffix!r} files are not supported; end the name in {named}")
    return suffix


def write_file(path: str, text: str) -> None:
    """Write a whole file. Raises ConfigurationError if it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path!r}: {error.strerror}") from None


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def processor() -> str:
    """Return the processor's name."""
    try:
        with open("/proc/cpuinfo", errors="replace") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "processor of unknown name"


def machine() -> str:
    """Return the processor's name and its number of cores."""
    count = cores()
    return f"{processor()}, {count} core{'s' if count != 1 else ''}"
