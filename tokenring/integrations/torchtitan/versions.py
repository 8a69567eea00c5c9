"""Versions of torchtitan that these modules know."""

from __future__ import annotations

import re

from tokenring.errors import BackendUnavailable, UnsupportedError

OLDEST, NEWEST = (0, 3), (0, 3)  # run, by benchmarks/torchtitan_models.py


def check_version(any_version: bool = False) -> str:
    """Return torchtitan's version. Raises UnsupportedError for an unknown one, BackendUnavailable for none.

    any_version: take an unknown one.
    """
    try:
        from torchtitan import __version__
    except ImportError as error:
        raise BackendUnavailable(
            f"torchtitan cannot be imported ({error}): pip install 'torchtitan{pip_requirement()}'"
        ) from None
    match = re.match(r"(\d+)\.(\d+)", __version__)
    found = (int(match[1]), int(match[2])) if match else None
    if not any_version and (found is None or not OLDEST <= found <= NEWEST):
        raise UnsupportedError(
            f"torchtitan {__version__} is not one that tokenring was run with: install "
            f"torchtitan{pip_requirement()}, or compare the gradients of a step with those of one process and say "
            f"any_version=True"
        )
    return str(__version__)


def pip_requirement() -> str:
    """Return the versions as pip takes them."""
    return f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
