"""Wire formats: how the numbers of a record are written where it travels, as names and sizes.

Block formats are those of OCP Microscaling (MX) 1.0: 32 neighbouring elements share one byte, a power of two by which
all of them are scaled. The elements are FP8 (E4M3, E5M2), INT8 or FP4 (E2M1). `backends.codecs` writes and reads them.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenring.errors import ConfigurationError
from tokenring.nearest import hint


class WireFormat(NamedTuple):
    """One format.

    block: elements that share a scale, of which a row must be a multiple. element_bits: of one element. scale_bytes: of
    one block. relative_rms: the error of one encoding over the rms of normally distributed data, as tests measure it.
    """

    name: str
    block: int
    element_bits: int
    scale_bytes: int
    relative_rms: float

    def row_bytes(self, elements: int) -> int:
        """Return the bytes of a row of so many elements, scales included: a multiple of the block."""
        return elements * self.element_bits // 8 + elements // self.block * self.scale_bytes


FORMATS = {
    each.name: each
    for each in (
        WireFormat("bf16", 1, 16, 0, 0.0017),
        WireFormat("fp16", 1, 16, 0, 0.0002),
        WireFormat("mxint8", 32, 8, 1, 0.0083),
        WireFormat("mxfp8", 32, 8, 1, 0.0266),  # E4M3
        WireFormat("mxfp8-e5m2", 32, 8, 1, 0.0529),
        WireFormat("mxfp4", 32, 4, 1, 0.116),
    )
}


def wire_format(name: object) -> WireFormat:
    """Return the format of this name. Raises ConfigurationError, which lists those that there are."""
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigurationError(f"wire={name!r}: use one of {', '.join(FORMATS)}{hint(name, FORMATS)}")
    return found
