"""A number from outside, with where it is from and how sure it is. What is not known is None, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tokenring.errors import ConfigurationError

Grade = Literal["vendor", "table", "measured", "repeated", "assumed", "unknown"]
GRADES: dict[Grade, str] = {
    "vendor": "the vendor's page or source code",
    "table": "a third party's table or text that names its source",
    "measured": "a published measurement",
    "repeated": "quoted in several places; the original source was not read",
    "assumed": "our assumption",
    "unknown": "no figure was found",
}


@dataclass(frozen=True)
class Figure:
    """`value` in the unit that the field's name says. `source` in words; of an unknown one, why it is unknown."""

    value: float | None
    source: str
    grade: Grade

    def __post_init__(self) -> None:
        if self.grade not in get_args(Grade) or not self.source:
            raise ConfigurationError(f"figure {self.value}: give a source, and a grade of {', '.join(GRADES)}")
        if (self.value is None) != (self.grade == "unknown") or (self.value is not None and not self.value > 0):
            raise ConfigurationError(f"figure {self.value} ({self.grade}): above 0, or None where it is unknown")

        if self.value is not None:  # 50 and 50.0 are equal, but not as JSON or in a digest
            object.__setattr__(self, "value", float(self.value))

    def known(self) -> float:
        """Return the value, where one is there by construction. Raises ConfigurationError if it is not known."""
        if self.value is None:
            raise ConfigurationError(f"this figure is not known: {self.source}")
        return self.value

    def times(self, count: int) -> Figure:
        """Return the figure of several."""
        return self if self.value is None else Figure(self.value * count, self.source, self.grade)


def unknown(reason: str) -> Figure:
    """Return a figure without a value, and the reason."""
    return Figure(None, reason, "unknown")
