"""Sizes as people write them: 4096, 128k, 1M."""

from __future__ import annotations

import re

from tokenring.errors import ConfigurationError

LARGEST = 1 << 50
SIZES = {"k": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def read_size(option: str, text: str) -> int:
    """Return a count such as 4096, 128k or 1M. Raises ConfigurationError."""
    match = re.fullmatch(r"([0-9]{1,12})([kMG]?)", text.strip(), re.ASCII)
    size = int(match[1]) * SIZES.get(match[2], 1) if match else 0
    if not 1 <= size <= LARGEST:
        raise ConfigurationError(
            f"{option} {text}: write a number from 1 to {LARGEST >> 30}G, which may end in {', '.join(SIZES)}"
        )
    return size
