"""The formats that we read: one module and one line of REGISTRY each.

A module has two functions:

    recognises(text: str) -> bool      cheap, and True for its own format only
    parse(text: str) -> Facts          raises TopologyError, with line and column, and nothing else
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from tokenring.errors import TopologyError
from tokenring.topology.facts import MAX_DEVICES, Facts, Origin

MAX_CHARACTERS = 16 << 20


@dataclass(frozen=True)
class Source:
    """A format: its name, its module here, and the command whose output it is, which a probe runs."""

    name: str
    module: str
    command: tuple[str, ...] = ()


REGISTRY = (
    Source("nvidia-smi topo -m", "nvidia_topo", ("nvidia-smi", "topo", "-m")),
    Source("npu-smi info -t topo", "npu_topo", ("npu-smi", "info", "-t", "topo")),
    Source("NCCL topology XML", "nccl_xml"),
    Source("p2pBandwidthLatencyTest", "p2p_bandwidth"),
    Source("nvbandwidth", "nvbandwidth"),
    Source("superbench gpu_copy", "superbench"),
    Source("nccl-tests", "nccl_tests"),
)


class Parser(Protocol):
    def recognises(self, text: str) -> bool: ...

    def parse(self, text: str) -> Facts: ...


def parser_of(source: Source) -> Parser:
    return cast(Parser, importlib.import_module(f"{__name__}.{source.module}"))


def recognise(text: str) -> Source | None:
    """The first format that takes a text for its own."""
    return next((source for source in REGISTRY if parser_of(source).recognises(text)), None)


def read(text: str, file: str | None = None, host: str | None = None) -> Facts:
    """What a dump says, whichever of the known formats it has."""
    if len(text) > MAX_CHARACTERS:
        raise TopologyError(f"a dump of {len(text)} characters is too long; at most {MAX_CHARACTERS}", file=file)
    source = recognise(text)
    if source is None:
        known = ", ".join(each.name for each in REGISTRY)
        raise TopologyError(f"this is no format that we know; we know {known}", file=file)
    try:
        facts = parser_of(source).parse(text)
    except TopologyError as error:
        raise TopologyError(f"{source.name}: {error.message}", error.line, error.column, file) from None
    if len(facts.devices) > MAX_DEVICES:
        raise TopologyError(f"{source.name}: {len(facts.devices)} devices; at most {MAX_DEVICES}", 1, 1, file)
    return facts.of(Origin(source.name, file, host))
