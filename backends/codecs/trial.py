"""The trial of a codec on a device: torch's operators of one may lack copies to and from FP8, or round otherwise."""

from __future__ import annotations

from functools import cache

import torch

from tokenring.backends.codecs.choice import codec_of, there_and_back
from tokenring.errors import UnsupportedError, one_line

TRUSTED = frozenset({"cpu"})  # whose operators tests hold to what formats say


def check_device(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedError unless tensors of a dtype are encoded and decoded on this device as on a CPU."""
    if device.type not in TRUSTED and (why := _fault(name, dtype, device)) is not None:
        raise UnsupportedError(
            f"{name} on the wire was tried on {device.type} in {dtype}, and {why}: take another format, as "
            f"mxint8, or leave wire out"
        )


@cache
def _fault(name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return what is wrong with a few rows that were encoded and decoded; None: nothing. Tried once in a process."""
    try:
        codec, random = codec_of(name), torch.Generator("cpu").manual_seed(1)
        rows = torch.randn(8, 64, generator=random, dtype=torch.float32, device="cpu").to(dtype)
        found, wanted = there_and_back(codec, rows.to(device)), there_and_back(codec, rows)
        alike = all(torch.equal(each.cpu(), right) for each, right in zip(found, wanted, strict=True))
    except Exception as error:  # whatever a device says of an operator that it lacks, at once or when it is waited for
        return f"it fails there ({one_line(error)})"
    return None if alike else "it gives other numbers there than on a CPU"
