"""The codec of a wire format, by its name."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from tokenring.backends.codecs.blocks import E2M1, E4M3, E5M2, Int8
from tokenring.ir.wire_formats import FORMATS, WireFormat


class Codec(Protocol):
    """Writes rows of numbers in one wire format, and reads them.

    format: its name and sizes. Rows are [..., width], of which the width is a multiple of the block, in any float
    dtype and with any strides; on the wire they are uint8 [..., format.row_bytes(width)], whose last axis is
    contiguous. The same numbers give the same bytes. A block with a number that is not finite is read as NaN.
    """

    format: WireFormat

    def encode(self, rows: torch.Tensor, into: torch.Tensor) -> None:
        """Write rows [..., width] as bytes [..., row_bytes]."""
        ...

    def decode(self, rows: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Read bytes [..., row_bytes] as rows [..., width] in the dtype of `into`, contiguous, and return that."""
        ...


class Cast:
    """A codec that is a dtype: numbers are rounded to it, each by itself. What is not finite stays as it is."""

    def __init__(self, form: WireFormat, dtype: torch.dtype) -> None:
        self.format, self._dtype = form, dtype

    def encode(self, rows: torch.Tensor, into: torch.Tensor) -> None:
        """Write rows [..., width] as bytes [..., row_bytes], aligned to the dtype."""
        into.view(self._dtype).copy_(rows)

    def decode(self, rows: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Read bytes [..., row_bytes] as rows [..., width], and return them."""
        return into.copy_(rows.view(self._dtype))


def there_and_back(codec: Codec, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of rows [..., width]; and the rows as whoever decodes them reads them, contiguous."""
    nbytes = codec.format.row_bytes(rows.shape[-1])
    wire = torch.empty(*rows.shape[:-1], nbytes, dtype=torch.uint8, device=rows.device)
    codec.encode(rows, wire)
    return wire, codec.decode(wire, torch.empty(rows.shape, dtype=rows.dtype, device=rows.device))


@cache
def codec_of(name: str) -> Codec:
    """Return the codec of a wire format. Raises KeyError for a name that `wire_format` does not know."""
    form = FORMATS[name]
    match name:
        case "bf16":
            return Cast(form, torch.bfloat16)
        case "fp16":
            return Cast(form, torch.float16)
        case "mxint8":
            return Int8(form)
        case "mxfp8":
            return E4M3(form)
        case "mxfp8-e5m2":
            return E5M2(form)
    return E2M1(form)
