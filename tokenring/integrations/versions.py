"""Versions of other projects' packages that integrations were run with."""

from __future__ import annotations

import re
from importlib import import_module
from typing import NamedTuple

from tokenring.errors import BackendUnavailable, UnsupportedError

Version = tuple[int, int]


class KnownVersions(NamedTuple):
    """Hold the first and the last version of a package that were run, major and minor.

    compare: what users of another version are to compare with one process.
    """

    package: str
    oldest: Version
    newest: Version
    compare: str = "the gradients of a step"

    def pip_requirement(self) -> str:
        """Return the versions as pip takes them."""
        (major, minor), (last_major, last_minor) = self.oldest, self.newest
        return f">={major}.{minor},<{last_major}.{last_minor + 1}"

    def check(self, any_version: bool = False) -> str:
        """Return the installed version. Raises UnsupportedError for an unknown one, BackendUnavailable for none.

        any_version: take an unknown one.
        """
        try:
            installed = str(import_module(self.package).__version__)
        except (ImportError, AttributeError) as error:  # a folder of that name is a package, without a version
            raise BackendUnavailable(
                f"{self.package} cannot be imported ({error}): pip install '{self.package}{self.pip_requirement()}'"
            ) from None
        match = re.match(r"(\d+)\.(\d+)", installed)
        found = (int(match[1]), int(match[2])) if match else None
        if not any_version and (found is None or not self.oldest <= found <= self.newest):
            raise UnsupportedError(
                f"{self.package} {installed} is not one that tokenring was run with: install "
                f"{self.package}{self.pip_requirement()}, or compare {self.compare} with those of one process and say "
                f"any_version=True"
            )
        return installed
