"""Block formats of OCP Microscaling: elements of a block, then its scale; in a row, all elements, then all scales.

The scale is the least power of two by which the block's largest magnitude does not exceed that of the elements, so
nothing is clipped. Its byte is the exponent plus 127, and 255 where the block has a number that is not finite.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from tokenring.ir.wire_formats import WireFormat

BIAS = 127  # of a scale's byte, and of the exponents of fp32
MANTISSA_BITS = 23  # of fp32
HIGHEST, NOT_FINITE = 254, 255  # bytes of scales
NAN_BITS, MAGNITUDE_BITS = 0x7FC00000, 0x7FFFFFFF  # of fp32
HALF_BITS = 0x3F80 - 0x8000  # of fp16, as int16: its sign, and what E4M3 has of its exponent and mantissa


class BlockCodec(ABC):
    """A codec of one block format, whose elements a subclass writes and reads."""

    largest: ClassVar[float]  # magnitude of an element

    def __init__(self, form: WireFormat) -> None:
        self.format = form
        bits = int(struct.unpack("<I", struct.pack("<f", self.largest))[0])
        self._rounded_up = (BIAS << MANTISSA_BITS) - bits + (1 << MANTISSA_BITS) - 1

    def encode(self, rows: torch.Tensor, into: torch.Tensor) -> None:
        """Write rows [..., width] as bytes [..., row_bytes]."""
        blocks = _apart(rows.to(torch.float32), self.format.block)
        scales = self._scales((blocks.view(torch.int32) & MAGNITUDE_BITS).amax(-1))
        scaled = (blocks * _powers(HIGHEST - scales).unsqueeze(-1)).flatten(-2)
        elements, into_scales = self._parts(into)
        self._write(scaled, elements)
        into_scales.copy_(scales)

    def decode(self, rows: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Read bytes [..., row_bytes] as rows [..., width] in the dtype of `into`, contiguous, and return that.

        What was rounded up past that dtype is its largest. In fp16, whose exponents are fewer than those of scales,
        rows are read and scaled in fp32; in bf16 on a CPU, too, which is faster there.
        """
        elements, scales = self._parts(rows)
        slow = into.dtype == torch.bfloat16 and into.device.type == "cpu"
        wide = torch.empty_like(into, dtype=torch.float32) if slow or into.dtype == torch.float16 else into
        self._read(elements, wide)
        _apart(wide, self.format.block).mul_(_powers(scales).to(wide.dtype).unsqueeze(-1))
        most = torch.finfo(into.dtype).max
        wide.clamp_(-most, most)
        return into if wide is into else into.copy_(wide)

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the bytes of elements and of scales."""
        blocks = rows.shape[-1] // self.format.row_bytes(self.format.block)
        return rows[..., :-blocks], rows[..., -blocks:]

    def _scales(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the bytes of scales, of the bits of the largest magnitude of each block; int32.

        Bits of magnitudes have the order of these. The exponent of the quotient by an element's largest is that of the
        difference of both, rounded up.
        """
        scales = ((largest + self._rounded_up) >> MANTISSA_BITS).clamp_(0, HIGHEST)
        return scales.masked_fill_(largest >= NOT_FINITE << MANTISSA_BITS, NOT_FINITE)

    @abstractmethod
    def _write(self, scaled: torch.Tensor, into: torch.Tensor) -> None:
        """Write fp32 [..., width], of the elements' range, as their bytes."""

    @abstractmethod
    def _read(self, elements: torch.Tensor, into: torch.Tensor) -> None:
        """Read bytes of elements as numbers [..., width]."""


def _apart(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return a view of rows [..., width] as [..., width / count, count]."""
    return rows.view(*rows.shape[:-1], -1, count)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Return two to the power of bytes less the bias, in fp32: subnormal at 0, and NaN at 255, which -1 is, too."""
    exponents = exponents.to(torch.int32) & NOT_FINITE
    bits = (exponents << MANTISSA_BITS).clamp_(min=1 << (MANTISSA_BITS - 1))
    return bits.masked_fill_(exponents == NOT_FINITE, NAN_BITS).view(torch.float32)


def _read_e4m3(elements: torch.Tensor, into: torch.Tensor) -> None:
    """Read bytes as E4M3, of which NaN is never written.

    A CPU reads them as fp16 in a quarter of the time that it takes to copy FP8: exponents of fp16 are larger by eight.
    """
    if elements.device.type != "cpu":
        into.copy_(elements.view(torch.float8_e4m3fn))
        return
    bits = elements.view(torch.int8).to(torch.int16)  # with the sign in all bits from the seventh on
    bits.bitwise_left_shift_(7).bitwise_and_(HALF_BITS)
    into.copy_(bits.view(torch.float16)).mul_(2.0**8)


class _Float8(BlockCodec):
    dtype: ClassVar[torch.dtype]

    def _write(self, scaled: torch.Tensor, into: torch.Tensor) -> None:
        into.view(self.dtype).copy_(scaled)

    def _read(self, elements: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(elements.view(self.dtype))


class E4M3(_Float8):
    """FP8 with three bits of mantissa: MXFP8, as activations have it."""

    largest, dtype = 448.0, torch.float8_e4m3fn

    def _read(self, elements: torch.Tensor, into: torch.Tensor) -> None:
        _read_e4m3(elements, into)


class E5M2(_Float8):
    """FP8 with two bits of mantissa and a wider range: the other MXFP8."""

    largest, dtype = 57344.0, torch.float8_e5m2


class Int8(BlockCodec):
    """MXINT8: elements are whole 64ths, from -127 to 127 of them."""

    largest = 127 / 64

    def _write(self, scaled: torch.Tensor, into: torch.Tensor) -> None:
        into.view(torch.int8).copy_(scaled.mul_(64).round_().clamp_(-127, 127))

    def _read(self, elements: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(elements.view(torch.int8)).mul_(1 / 64)


class E2M1(BlockCodec):
    """FP4: two elements a byte, the first in its low bits, each a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6."""

    largest = 6.0
    halfway = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between two magnitudes: it goes to the one of even code

    def _write(self, scaled: torch.Tensor, into: torch.Tensor) -> None:
        codes = torch.signbit(scaled).to(torch.uint8) << 3
        magnitudes = scaled.abs_()
        for code, limit in enumerate(self.halfway):
            codes += magnitudes >= limit if code % 2 else magnitudes > limit
        torch.bitwise_or(codes[..., ::2], codes[..., 1::2] << 4, out=into)

    def _read(self, elements: torch.Tensor, into: torch.Tensor) -> None:
        """Read them as E4M3, whose exponents are larger by six where the bits stand in the same places."""
        pairs = _apart(into, 2)
        _read_e4m3(((elements & 7) << 2) | ((elements & 8) << 4), pairs[..., 0])
        _read_e4m3(((elements & 0x70) >> 2) | (elements & 0x80), pairs[..., 1])
        into.mul_(64)
