"""Versions of Megatron-core that these modules know."""

from __future__ import annotations

import logging
import re
from functools import cache

import torch.distributed as dist

from tokenring.errors import BackendUnavailable, UnsupportedError

LOG = logging.getLogger("tokenring")
OLDEST, NEWEST = (0, 12), (0, 19)  # read
RUN = ((0, 12), (0, 14), (0, 16))  # by the tests
NAMES = tuple(".".join(map(str, each)) for each in (OLDEST, NEWEST))


def check_version() -> str:
    """Return Megatron-core's version. Raises UnsupportedError for an unknown one, BackendUnavailable for none."""
    try:
        from megatron.core import __version__
    except ImportError as error:
        raise BackendUnavailable(
            f"Megatron-core cannot be imported ({error}): pip install megatron-core, {NAMES[0]} to {NAMES[1]}"
        ) from None
    check_known(__version__)
    return str(__version__)


def check_known(version: str) -> None:
    """Raise UnsupportedError unless this is the text of a version in the range."""
    found = _minor(version)
    if found is None or not OLDEST <= found <= NEWEST:
        raise UnsupportedError(
            f"Megatron-core {version} is not one that tokenring knows ({NAMES[0]} to {NAMES[1]}): install one of "
            f"these, or compare gradients with those of context_parallel_size=1 and say any_version=True"
        )


def warn_if_not_run(version: str) -> None:
    """Warn at rank 0, once in a process, of a version in the range that no test runs.

    It is called after the process group is made.
    """
    if _minor(version) not in RUN and (not dist.is_initialized() or dist.get_rank() == 0):
        _warn(version)


@cache
def _warn(version: str) -> None:
    run = ", ".join(".".join(map(str, each)) for each in RUN)
    LOG.warning(
        "Megatron-core %s was read, but never run with tokenring; %s were: before you train, compare the gradients of "
        "a step with those of context_parallel_size=1",
        version,
        run,
    )


def _minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None
