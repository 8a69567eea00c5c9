"""Versions of other projects' packages that integrations were run with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from tokenring.errors import BackendUnavailable, UnsupportedError, one_line

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


class KnownSource(NamedTuple):
    """Hold the commit at which the source of a project was read that says its releases by no version.

    A release is known by its functions: those that are replaced must be there, with the parameters that they had.
    """

    project: str
    commit: str
    needs: str

    def function(self, module: str, name: str, parameters: Sequence[str]) -> tuple[Any, Callable[..., Any]]:
        """Return a module, and a function of it; name: dotted, if it is a method.

        Raises BackendUnavailable where the module cannot be imported, UnsupportedError where the function is another.
        """
        try:
            found: Any = import_module(module)
        except Exception as error:  # what it imports in turn may raise anything where no accelerator is
            raise BackendUnavailable(
                f"{module} cannot be imported ({one_line(error)}): run in a checkout of {self.project} with "
                f"{self.needs}"
            ) from error
        home = found
        for part in name.split("."):
            found = getattr(found, part, None)
        has = list(inspect.signature(found).parameters) if callable(found) else None
        if has != list(parameters):
            what = "there is none" if has is None else f"it takes {', '.join(has)}"
            raise UnsupportedError(
                f"this release of {self.project} is not one that tokenring knows: of {name} in {module} {what}; take "
                f"one like commit {self.commit}, or a newer tokenring"
            )
        return home, found


# Read, and run as far as docs/mindspeed.md says.
MINDSPEED_LLM = KnownSource("MindSpeed-LLM", "c77308a1", "MindSpeed, fsdp_turbo, torch_npu, transformers and einops")
MINDSPEED_MM = KnownSource("MindSpeed-MM", "57069cd5", "MindSpeed, torch_npu, transformers, einops; NON_MEGATRON=true")
