"""Times and sizes as people write them."""

from __future__ import annotations


def time_text(seconds: float) -> str:
    """Return a time with its unit: s, ms or µs."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def mb_text(nbytes: int) -> str:
    """Return a size in kB, MB or GB, of 10^3, 10^6 or 10^9 bytes."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"
