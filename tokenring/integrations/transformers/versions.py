"""Versions of transformers that these modules know."""

from __future__ import annotations

import re

from tokenring.errors import BackendUnavailable, UnsupportedError

OLDEST, NEWEST = (5, 23), (5, 23)  # run, by the tests and benchmarks/transformers_families.py


def check_version(any_version: bool = False) -> str:
    """Return transformers' version. Raises UnsupportedError for an unknown one, BackendUnavailable for none.

    any_version: take an unknown one.
    """
    try:
        from transformers import __version__
    except ImportError as error:
        raise BackendUnavailable(
            f"transformers cannot be imported ({error}): pip install 'transformers{pip_requirement()}'"
        ) from None
    match = re.match(r"(\d+)\.(\d+)", __version__)
    found = (int(match[1]), int(match[2])) if match else None
    if not any_version and (found is None or not OLDEST <= found <= NEWEST):
        raise UnsupportedError(
            f"transformers {__version__} is not one that tokenring was run with: install "
            f"transformers{pip_requirement()}, or compare the gradients of a step with those of one process and say "
            f"any_version=True"
        )
    return str(__version__)


def pip_requirement() -> str:
    """Return the versions as pip takes them."""
    return f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
