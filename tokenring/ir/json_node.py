"""A value of a JSON document, read with errors that say where in it they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from tokenring.errors import ScheduleError

INTEGER_LIMIT = 2**53 - 1  # beyond it JSON readers of other languages lose digits
T = TypeVar("T")
Name = TypeVar("Name", bound=str)


class JsonNode:
    """A value of the document and where it stands, for errors that say so."""

    def __init__(self, value: object, path: str) -> None:
        self.value, self.path = value, path

    def error(self, text: str) -> ScheduleError:
        """Return an error that says where in the document it is, and then what is wrong."""
        return ScheduleError(f"{self.path or 'document'}: {text}")

    def _expected(self, what: str) -> ScheduleError:
        return self.error(f"expected {what}, found {shown_short(self.value)}")

    def fields(self, *names: str, others: bool = False, optional: tuple[str, ...] = ()) -> dict[str, JsonNode]:
        """Return the values of an object with these keys; it may have those of `optional`, with `others` any more.

        Raises ScheduleError.
        """
        if not isinstance(self.value, dict):
            raise self._expected("an object")
        for name in names:
            if name not in self.value:
                raise self.error(f"has no key {name!r}")
        for name in self.value:
            if name not in names and name not in optional and not others:
                raise self.error(f"has an unknown key {shown_short(name)}")
        dot = "." if self.path else ""
        found = (*names, *(name for name in optional if name in self.value))
        return {name: JsonNode(self.value[name], f"{self.path}{dot}{name}") for name in found}

    def each(self, read: Callable[[JsonNode], T]) -> list[T]:
        """Return what `read` makes of each element of a list. Raises ScheduleError if this is no list."""
        if not isinstance(self.value, list):
            raise self._expected("a list")
        return [read(JsonNode(value, f"{self.path}[{index}]")) for index, value in enumerate(self.value)]

    def distinct(self, read: Callable[[JsonNode], T]) -> list[T]:
        """Return what `read` makes of each element of a list. Raises ScheduleError if two of them are the same."""
        values = self.each(read)
        if len(set(values)) < len(values):
            raise self.error("names something twice")
        return values

    def optional(self, read: Callable[[JsonNode], T]) -> T | None:
        """Return None for null, and what `read` makes of any other value."""
        return None if self.value is None else read(self)

    def integer(self, least: int = 0, most: int = INTEGER_LIMIT) -> int:
        """Return an integer in [least, most]. Raises ScheduleError if this is none."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self._expected("an integer")
        if not least <= self.value <= most:
            raise self.error(f"{shown_short(self.value)} is not between {least} and {most}")
        return self.value

    def index(self, count: int, what: str) -> int:
        """Return the number of one of `count` things, from 0 on. Raises ScheduleError if it is not in range."""
        value = self.integer(-INTEGER_LIMIT)
        if not 0 <= value < count:
            raise self.error(f"{value} is not {what} of {count}")
        return value

    def boolean(self) -> bool:
        """Return true or false. Raises ScheduleError if this is neither."""
        if not isinstance(self.value, bool):
            raise self._expected("true or false")
        return self.value

    def name(self) -> str:
        """Return a name that can be printed on one line. Raises ScheduleError if this is none."""
        if not isinstance(self.value, str) or not self.value or not self.value.isprintable():
            raise self._expected("a printable name")
        return self.value

    def choice(self, *values: Name) -> Name:
        """Return the value if it is one of these strings. Raises ScheduleError if it is none of them."""
        for value in values:
            if self.value == value:
                return value
        raise self._expected(" or ".join(json.dumps(value) for value in values))


def shown_short(value: object) -> str:
    """Return a value as an error message shows it; never the inside of a list, which may be deep."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
