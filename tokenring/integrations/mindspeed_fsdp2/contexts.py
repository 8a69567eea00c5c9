"""The ContextParallel of a trainer's group, made of the options of `use_tokenring`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from tokenring.api.arguments import check_schedule_name
from tokenring.api.context import ContextParallel
from tokenring.api.standing import is_open
from tokenring.errors import ConfigurationError

# Under a full mask the order of tokens means nothing, and this gives each rank as many as these trainers do: the first
# ranks one more where a length does not divide. All other calls say their layout.
LIKE_THEIRS = "striped"
THEIRS = ("group", "layout")  # which follow from the trainer


class TrainerContexts:
    """Hold options, and the contexts that were made of them, one for each group of ranks.

    options: None while tokenring is not used. There is one of these in a process: what was put into a model by one
    `use_tokenring` goes by the options of the last.
    """

    def __init__(self) -> None:
        self.options: dict[str, Any] | None = None
        self._made: list[ContextParallel] = []

    def use(self, options: Mapping[str, Any]) -> None:
        """Make contexts of these options from now on; those that there are are closed."""
        self.stop()
        self.options = dict(options)

    def of(self, group: Any) -> ContextParallel:
        """Return the ContextParallel of a process group; all its ranks come here together."""
        for each in self._made:
            if is_open(each) and each.group is group:
                return each
        made = ContextParallel(group, LIKE_THEIRS, **(self.options or {}))
        self._made = [*filter(is_open, self._made), made]
        return made

    def stop(self) -> None:
        """Close all contexts, and make none."""
        for each in self._made:
            each.close()
        self._made.clear()
        self.options = None


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for options that ContextParallel has not, or the trainer determines."""
    known = [name for name in inspect.signature(ContextParallel).parameters if name not in THEIRS]
    for name in options:
        if name in THEIRS:
            raise ConfigurationError(
                f"use_tokenring({name}=...): the trainer's own options say which ranks hold which tokens; leave it out"
            )
        if name not in known:
            raise ConfigurationError(f"use_tokenring({name}=...) is no option: choose among {', '.join(known)}")
    if isinstance(schedule := options.get("schedule"), str):
        check_schedule_name(schedule)
