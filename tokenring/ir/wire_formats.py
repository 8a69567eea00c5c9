"""Wire formats: how the numbers of a record are written where it travels, as names and sizes.

Block formats are those of OCP Microscaling (MX) 1.0: 32 neighbouring elements share one byte, a power of two by which
all of them are scaled. The elements are FP8 (E4M3, E5M2), INT8 or FP4 (E2M1). `backends.codecs` writes and reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import FULL, PASSES, Kind, Pass
from tokenring.nearest import hint

if TYPE_CHECKING:
    import torch

    from tokenring.ir.schedule_data import ScheduleData

Made = TypeVar("Made", bound="ScheduleData")
Codecs = tuple[tuple[str, str], ...]
SHORT = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}  # formats that are a dtype
ENCODED: tuple[Kind, ...] = ("kv", "q", "q_partial")  # of a linear layer with a format: never gradients of weights
REQUESTS_ENCODED: tuple[Kind, ...] = ("kv", "q")  # of attention with a format: never its results
# What is encoded on the way to a result: the factors that may travel, and itself where it goes home.
ON_THE_WAY: Mapping[str, Mapping[Pass, Mapping[str, tuple[Kind, ...]]]] = {
    "column": {"forward": {"c": ("q", "kv")}, "backward": {"dx": ("kv", "q_partial"), "dw": ("q",)}},
    "row": {"forward": {"y": ("kv", "q_partial")}, "backward": {"dc": ("q", "kv"), "dw": ("q",)}},
    "reduce": {"forward": {"y": ("q_partial",)}, "backward": {"da": ("q",)}},
}


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


def check_width(name: str, width: int) -> None:
    """Raise ConfigurationError unless the blocks of a format divide rows of this width."""
    block = wire_format(name).block
    if width % block:
        raise ConfigurationError(
            f"{name} on the wire has blocks of {block} elements, which do not divide rows of {width}: take a width "
            f"that is a multiple of {block}, or another format, as bf16"
        )


def padded(name: str, width: int) -> int:
    """Return the least width, not below this one, that the blocks of a format divide."""
    block = wire_format(name).block
    return -(-width // block) * block


def check_smaller(name: str, dtype: torch.dtype) -> None:
    """Raise ConfigurationError unless elements of a format are smaller than those of tensors of this dtype."""
    bits = wire_format(name).element_bits
    if bits >= 8 * dtype.itemsize:
        raise ConfigurationError(
            f"{name} on the wire has {bits} bits an element, and saves nothing over {dtype} of the tensors, which has "
            f"{8 * dtype.itemsize}: take a format of blocks, as mxfp8, or leave wire out"
        )


def codecs_of(wire: str | None, dtype: torch.dtype, kinds: Iterable[str]) -> Codecs:
    """Return the codecs by which these kinds go in a format. Raises ConfigurationError if it saves nothing."""
    if wire is None:
        return ()
    check_smaller(wire, dtype)
    return tuple((kind, wire) for kind in kinds)


def encoded(schedule: Made, codecs: Codecs) -> Made:
    """Return a schedule with these codecs, but for those of partials to which relays add: these go in fp32."""
    if not codecs:
        return schedule
    added = {str(move.block.kind) for move in schedule.moves if move.add}
    return schedule.replace(codecs=tuple(each for each in codecs if each[0] not in added or each[1] == FULL))


def encodings(schedule: ScheduleData, direction: Pass) -> dict[str, list[WireFormat]]:
    """Return what is encoded on the way to each result of a linear layer's pass: once each, also by way of relays."""
    formats = schedule.formats
    moving = {move.block.kind for move in schedule.moves_in(direction)}
    ways = ON_THE_WAY.get(schedule.operator.name, {}).get(direction, {})
    return {
        result: [FORMATS[formats[kind]] for kind in kinds if kind in moving and kind in formats]
        for result, kinds in ways.items()
    }


def added_error(forms: Iterable[WireFormat]) -> float:
    """Return the relative rms error of encodings that are independent of each other."""
    return math.sqrt(sum(form.relative_rms**2 for form in forms))


def collected(schedule: ScheduleData, passes: Iterable[Pass]) -> list[WireFormat]:
    """Return what is encoded on the way to the result of a collective, whose passes follow one another."""
    return [form for direction in passes for forms in encodings(schedule, direction).values() for form in forms]


def _results(
    schedule: ScheduleData, passes: Iterable[Pass]
) -> Iterable[tuple[str, Mapping[str, Sequence[WireFormat]]]]:
    """Yield the results of each pass, with what is encoded on the way; of a collective there is one, of all passes."""
    if schedule.operator.name == "reduce":
        yield "in all", {"out": collected(schedule, passes)}
        return
    for direction in passes:
        yield direction, encodings(schedule, direction)


def wire_report(schedule: ScheduleData, passes: Iterable[Pass] = PASSES) -> list[str]:
    """Return what a plan says of the schedule's formats: bytes, and the error that they add; nothing without any."""
    lines = []
    for name in sorted(set(schedule.formats.values())):
        form, kinds = FORMATS[name], [kind for kind, each in schedule.formats.items() if each == name]
        size = (form.element_bits + 8 * form.scale_bytes / form.block) / 8
        lines.append(
            f"on the wire: {', '.join(kinds)} in {name}, {size:.3f} bytes an element; each is encoded once, with a "
            f"relative error of {form.relative_rms:.2g}"
        )
    for where, found in _results(schedule, passes):
        errors = [f"{result} {added_error(forms):.2g}" for result, forms in found.items()]
        if lines and errors:
            lines.append(
                f"relative error that this adds, {where}, for normally distributed data: about {', '.join(errors)}"
            )
    return lines
