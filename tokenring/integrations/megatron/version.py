"""Which versions of Megatron-core these modules know."""

from __future__ import annotations

import re

from tokenring.errors import BackendUnavailable, UnsupportedError

OLDEST, NEWEST = (0, 12), (0, 19)  # read; docs/megatron.md says which of them the tests run
NAMES = tuple(".".join(map(str, each)) for each in (OLDEST, NEWEST))


def check_version() -> None:
    """Raises UnsupportedError for a Megatron-core that we do not know, BackendUnavailable where there is none."""
    try:
        from megatron.core import __version__
    except ImportError as error:
        raise BackendUnavailable(
            f"Megatron-core cannot be imported ({error}): pip install megatron-core, {NAMES[0]} to {NAMES[1]}"
        ) from None
    check_known(__version__)


def check_known(version: str) -> None:
    """Raises UnsupportedError unless this is the text of a version in the range."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else None
    if found is None or not OLDEST <= found <= NEWEST:
        raise UnsupportedError(
            f"Megatron-core {version} is not one that tokenring knows ({NAMES[0]} to {NAMES[1]}): install one of "
            f"these, or compare gradients with those of context_parallel_size=1 and say any_version=True"
        )
