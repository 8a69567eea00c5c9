"""The formats that are read: one module and one line of REGISTRY each.

A module has two functions:

    recognises(text: str) -> bool      cheap, and True for its own format only
    parse(text: str) -> Facts          raises TopologyError, with line and column, and nothing else
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import MAX_DEVICES, Facts, SourceOrigin
from tokenring.topology.model.sanity import sound, storable
from tokenring.topology.sources.pasted import as_printed

MAX_CHARACTERS = 16 << 20


@dataclass(frozen=True)
class Source:
    """A format: its name, its module here, and the command whose output it is, which a probe runs."""

    name: str
    module: str
    command: tuple[str, ...] = ()
    words: str = ""  # that must be in it too: for one of several forms that a module reads


REGISTRY = (
    Source("Ascend tools, collected", "ascend_log"),  # before what is inside of it
    Source("nvidia-smi topo -m", "nvidia_topo", ("nvidia-smi", "topo", "-m")),
    Source("npu-smi info -t topo", "npu_topo", ("npu-smi", "info", "-t", "topo")),
    Source("NCCL topology XML", "nccl_xml"),
    Source("npu-smi info", "npu_smi", ("npu-smi", "info")),
    Source("npu-smi info -m", "npu_smi_map", ("npu-smi", "info", "-m")),
    Source("npu-smi info of one NPU", "npu_smi_fields"),
    Source("Ascend 950 topology JSON", "ascend_topo_json"),
    Source("Ascend ToR JSON", "ascend_tor"),
    Source("HCCL rank table", "hccl_ranktable"),
    Source("hccn_tool", "hccn_tool"),
    Source("ascend-dmi p2p", "ascend_dmi"),
    Source("NCCL graph XML", "nccl_graph"),
    Source("amd-smi xgmi", "rocm_smi", words="LINK METRIC TABLE"),
    Source("rocm-smi --showtopo", "rocm_smi", ("rocm-smi", "--showtopo")),
    Source("mx-smi topo -m", "vendor_topo", ("mx-smi", "topo", "-m")),
    Source("nvidia-smi topo -p2p", "nvidia_p2p"),
    Source("nvidia-smi nvlink -R", "nvidia_nvlink", words="Remote Device"),
    Source("nvidia-smi nvlink -c", "nvidia_nvlink", words=" supported: "),
    Source("nvidia-smi nvlink -s", "nvidia_nvlink", ("nvidia-smi", "nvlink", "-s")),
    Source("nvidia-smi -L", "nvidia_list", words="(UUID: "),
    Source("nvidia-smi -q", "nvidia_list", ("nvidia-smi", "--query-gpu=index,pci.bus_id,name", "--format=csv")),
    Source("hwloc XML", "hwloc_xml"),
    Source("lspci -tv", "lspci"),
    Source("matrix JSON", "matrix_json"),
    Source("p2pBandwidthLatencyTest", "p2p_bandwidth"),
    Source("nvbandwidth", "nvbandwidth"),
    Source("superbench gpu_copy", "superbench"),
    Source("nccl-tests", "nccl_tests"),
)


class SourceParser(Protocol):
    """A module that reads one format."""

    def recognises(self, text: str) -> bool:
        """Return whether the text is of this format: cheap, and True for its own format only."""

    def parse(self, text: str) -> Facts:
        """Parse a text of this format. Raises TopologyError, with line and column, and nothing else."""


def parser_of(source: Source) -> SourceParser:
    """Import the parser of a format."""
    return cast(SourceParser, importlib.import_module(f"{__name__}.{source.module}"))


def facts_of(source: Source, text: str) -> Facts:
    """Parse a text of a known format, and leave out what cannot be. Raises TopologyError."""
    return sound(parser_of(source).parse(text))


def recognise(text: str) -> Source | None:
    """Return the first format that takes a text for its own; None if there is none."""
    start = text[:20_000]
    fitting = (source for source in REGISTRY if source.words in start)
    return next((source for source in fitting if parser_of(source).recognises(text)), None)


def read(text: str, file: str | None = None, host: str | None = None) -> Facts:
    """Read the facts of a dump, whichever of the known formats it has.

    Raises TopologyError for a text that is too long, of no known format, broken, or has too many devices.
    """
    if len(text) > MAX_CHARACTERS:
        raise TopologyError(f"a dump of {len(text)} characters is too long; at most {MAX_CHARACTERS}", file=file)
    text = as_printed(text)
    source = recognise(text)
    if source is None:
        known = ", ".join(each.name for each in REGISTRY)
        raise TopologyError(f"unknown format; the known ones are {known}", file=file)
    try:
        facts = facts_of(source, text)
    except TopologyError as error:
        raise TopologyError(f"{source.name}: {error.message}", error.line, error.column, file) from None
    if len(facts.devices) > MAX_DEVICES:
        raise TopologyError(f"{source.name}: {len(facts.devices)} devices; at most {MAX_DEVICES}", 1, 1, file)
    return facts.of(SourceOrigin(source.name, None if file is None else storable(file), host))
