"""Known machines, to plan for without one: `preset("hgx-h100")`, `preset("atlas-800t-a2*4")` over their NICs.

Every figure is one of GB/s (10^9 bytes) one way, as payload, and says where it is from. What a transfer reaches
of it is the preset's `reached`, kept apart: a graph bears what is published, as a probe's would.
`server_spec` says how to read contention from the graphs; docs/presets.md is written from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tokenring.errors import ConfigurationError
from tokenring.nearest import nearest
from tokenring.planner.machines.server_spec import (
    Level,
    Links,
    Nics,
    Server,
    Switch,
    cluster_facts,
    full_mesh,
    topology,
)
from tokenring.planner.machines.sourced import Figure, unknown
from tokenring.topology.model.facts import Facts
from tokenring.topology.ranks import Topology

MAX_HOSTS = 1024
PREFIX = "preset:"

# ---------- figures that several machines share

_TABLE = "the network chapter of the book ML Engineering, tables of NVLink, PCIe, xGMI and InfiniBand"
NVLINK_2 = Figure(
    25, "Alibaba Cloud's page on GPU topology: V100, 25 one way, 50 both ways; NVLink generation 2", "table"
)
NVLINK_3 = Figure(25, f"{_TABLE}: A100, 12 links, 300 one way", "table")
NVLINK_4 = Figure(25, f"{_TABLE}: H100, 18 links, 450 one way; tools print 26.562, the rate of signals", "table")
_LESS = "with 8 links, 400 both ways, according to the trade press"
NVLINK_3_A800 = Figure(25, f"{_TABLE}: A100's link; A800 is A100 {_LESS}", "table")
NVLINK_4_H800 = Figure(25, f"{_TABLE}: H100's link; H800 is H100 {_LESS}", "table")
XGMI_MI300X = Figure(64, f"{_TABLE}: 7 links, 448 one way; amd-smi prints 32 Gbit/s x 16 lanes", "table")
HCCS_910A = Figure(
    30, "notes from Hot Chips 2019: three ports of 240 Gbit/s; no vendor page was found", "repeated"
)
HCCS_910B = Figure(28, "source of Ascend's npu-smi: 4 lanes of 56 Gbit/s per link", "vendor")
HCCS_A3 = Figure(28, "Ascend's msmodeling: 196 per die; npu-smi prints seven links of 224 Gbit/s", "vendor")
UB_950 = Figure(
    50, "topology file of the Atlas 850 in the driver's source: one port per pair; hccn_tool: 400 Gbit/s per port",
    "vendor",
)
SIO_A3 = Figure(224, "Ascend's msmodeling, between the dies of a package", "vendor")
PCIE_3 = Figure(15.75, "8 GT/s, 128b/130b, x16, computed", "table")
PCIE_4 = Figure(31, f"{_TABLE}: x16", "table")
PCIE_5 = Figure(63, f"{_TABLE}: x16", "table")
X16_UP = "we assume one x16 uplink per PCIe switch, of the switch's generation; no page on the server says so"
UP_3, UP_4, UP_5 = (Figure(each.value, X16_UP, "assumed") for each in (PCIE_3, PCIE_4, PCIE_5))
INSIDE = unknown("no limit between a host bridge and its CPU is published; we assume none")

_NCCL = "NCCL's table of GPU bandwidth between sockets"
QPI_BROADWELL = Figure(6, f"{_NCCL}: Broadwell, as in DGX-1", "vendor")
UPI_TAKEN = Figure(22, f"{_NCCL}: Sapphire Rapids, which we assume in these servers", "assumed")
AMD_SOCKETS = Figure(16, f"{_NCCL}: AMD CPUs", "vendor")
BETWEEN_QUADS = Figure(
    31,
    "Huawei Cloud's page on affinity says PCIe between the quads, but no width; we assume one x16 link of PCIe 4",
    "assumed",
)
ONE_SOCKET = unknown("there is only one NUMA node")

_IB = "nominal port rate"
EDR = Figure(12.5, f"{_IB}: four EDR InfiniBand ports in a DGX-1 (nvidia-smi topo -m of one)", "table")
HDR = Figure(
    25, f"{_IB}: eight HDR ports, two below each of four PCIe switches (NCCL topology of Azure ND A100 v4)", "table"
)
NDR = Figure(50, f"{_IB}: eight NDR ports, one beside each GPU (NCCL topologies of Azure and Nebius)", "table")
HDR_800 = Figure(25, "one port of 200 Gbit/s per GPU; servers with this board differ", "assumed")
NDR_MI300X = Figure(50, f"{_IB}: eight NDR ports (Azure's page on ND MI300X v5)", "table")
ROCE_200_L40S = Figure(25, "two ports of 200 Gbit/s, one per socket; servers with this board differ", "assumed")
ROCE_200_L20 = Figure(25, "two ports of 200 Gbit/s, one per socket; servers with this board differ", "assumed")
ROCE_100_A10 = Figure(12.5, "one port of 100 Gbit/s; the TokenRing paper describes no network", "assumed")
ROCE_100_4090 = Figure(12.5, "one port of 100 Gbit/s per socket; servers with this board differ", "assumed")
ROCE_100 = Figure(12.5, "summary of a paper's appendix: 100 Gbit/s RoCE on each 910A", "repeated")
ROCE_200 = Figure(25, "hccn_tool prints 200000 Mbit/s for each 910B", "measured")
CLOS_950 = Figure(400, "the Atlas 850's topology file: eight ports of 400 Gbit/s from each NPU to CLOS", "vendor")
ROCE_A3 = Figure(25, "texts on CloudMatrix384: 400 Gbit/s RoCE per package; we assume 200 per die", "table")

# Shares of a published rate that a copy reached.
REACHED_V100 = Figure(0.97, "p2pBandwidthLatencyTest, DGX-1: 96.9 of 100 both ways over two links", "measured")
REACHED_A100 = Figure(0.92, "nvbandwidth's README, 8 A100: 276 of 300", "measured")
REACHED_H100 = Figure(0.84, "an issue of NCCL, H100: 380 of 450", "measured")
REACHED_A800 = Figure(0.92, "same links as A100", "assumed")
REACHED_H800 = Figure(0.84, "same links as H100", "assumed")
REACHED_XGMI = Figure(0.75, "the book ML Engineering: all-reduce of two MI300X, 47.7 of 64", "measured")
REACHED_910B = Figure(0.94, "ascend-dmi, 910B3: 26.2 of 28 one way, 50.8 both ways", "measured")
REACHED_910A = Figure(0.94, "as on 910B; no measurement was found", "assumed")
REACHED_SIO = Figure(0.89, "ascend-dmi's own test data, two dies: 198.9 of 224", "measured")
REACHED_A3 = Figure(0.94, "as on 910B; ascend-dmi's test data show 391.2 of 392 between packages", "assumed")
REACHED_950 = Figure(0.94, "as on 910B; no measurement was found", "assumed")
REACHED_CLOS = Figure(0.94, "as between peers; no measurement was found", "assumed")
REACHED_PCIE_3 = Figure(0.76, "NCCL plans with 12 of 15.75", "vendor")
REACHED_PCIE_4 = Figure(0.85, "p2pBandwidthLatencyTest, RTX 6000 Ada below one host bridge: 26.3 of 31", "measured")
REACHED_4090 = Figure(
    0.48, "p2pBandwidthLatencyTest, two RTX 4090 without peer access: 29.8 of 62 both ways, 21.7 of 31 one way",
    "measured",
)
REACHED_PCIE_5 = Figure(0.88, "ML Engineering, nvbandwidth on H200, host and device: 55.4 of 63", "measured")
REACHED_SOCKETS = Figure(
    1.0, "NCCL's figure is already the reached bandwidth; DGX-1 pairs measured 4.3 to 5.9 of 6", "vendor"
)
REACHED_NET = Figure(
    0.97, "an NVIDIA engineer in an issue of nccl-tests: 48 to 49 of 50 through one NDR port", "vendor"
)
REACHED_ROCE = Figure(0.97, "as over InfiniBand; no measurement of a single flow was found", "assumed")

# What a message costs beside its bytes: the smallest all-reduce of two devices.
_SMALL = "nccl-tests, all-reduce of 512 bytes by 2 GPUs, in aiconfigurator's data"
OP_V100 = Figure(10.0, "as on A100; no measurement was found", "assumed")
OP_A100, OP_H100, OP_L40S = (
    Figure(us, f"{_SMALL}: {name}", "measured") for us, name in ((10.0, "A100 SXM"), (6.2, "H100 SXM"), (7.7, "L40S"))
)
OP_A800 = Figure(10.0, "as on A100; no measurement was found", "assumed")
OP_H800 = Figure(6.2, "as on H100; no measurement was found", "assumed")
OP_L20 = Figure(7.7, "as on L40S; no measurement was found", "assumed")
OP_4090 = Figure(
    12.2, "p2pBandwidthLatencyTest, two RTX 4090 without peer access: 11.4 to 13.1 us per copy between them",
    "measured",
)
OP_A10 = Figure(7.7, "as on L40S; no measurement was found", "assumed")
OP_ASCEND = Figure(10.0, "Ascend's msmodeling: 10 us per operation", "vendor")
OP_910A = Figure(10.0, "as on 910B; no figure was found", "assumed")
OP_950 = Figure(10.0, "as on 910B; no figure was found", "assumed")
OP_MI300X = Figure(10.0, "as on A100; no measurement was found", "assumed")


@dataclass(frozen=True)
class Preset:
    """A server and what is known of it beside its links.

    device: its accelerators in `devices`. reached: by kind of link, the share of the published rate that a copy
    reaches. operation_us: what a message costs beside its bytes. shape: what `classify` says.
    """

    name: str
    title: str
    device: str
    shape: str
    server: Server
    reached: Mapping[str, Figure]
    operation_us: Figure
    note: str = ""

    def topology(self, hosts: int = 1) -> Topology:
        """Return the topology of one rank on each accelerator of so many of these servers, host by host."""
        reached = {kind: share.known() for kind, share in self.reached.items()}
        return replace(topology(self.server, hosts), reached=reached)

    def facts(self, hosts: int = 1) -> list[Facts]:
        """Return the facts as probes would have found them: what `to_json` saves."""
        return cluster_facts(self.server, hosts)


def _numa_tree(bridges: int, sockets: Figure, up: Figure, switches: int = 1) -> tuple[Level, ...]:
    """Return the levels of two NUMA nodes; host bridges of each; PCIe switches below each of these."""
    return (
        Level("numa", 2, sockets),
        Level("host-bridge", bridges, INSIDE),
        Level("pcie-switch", switches, up),
    )


# nvidia-smi topo -m of a DGX-1: 2 links on one side and one diagonal of each quad, and across on 0-4 and 1-5.
_CUBE_TWICE = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
_CUBE_ONCE = ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7))
_CUBE = tuple((a, b, 2) for a, b in _CUBE_TWICE) + tuple((a, b, 1) for a, b in _CUBE_ONCE)
_QUADS = full_mesh(range(4)) + full_mesh(range(4, 8))
_PACKAGES = tuple((die, die + 1, 1) for die in range(0, 16, 2))

_ALL = (
    Preset(
        "dgx-1-v100", "NVIDIA DGX-1, 8 V100: hybrid cube mesh", "v100-sxm2", "cube-mesh",
        Server(8, "GPU", "Tesla V100-SXM2-32GB", "nvidia", Nics(4, EDR, level=2),
               links=(Links("nvlink", NVLINK_2, _CUBE),),
               levels=_numa_tree(1, QPI_BROADWELL, UP_3, switches=2), slot=PCIE_3),
        {"nvlink": REACHED_V100, "pcie": REACHED_PCIE_3, "sys": REACHED_SOCKETS, "network": REACHED_NET}, OP_V100,
        "Each of four PCIe switches has two GPUs and one NIC, so two GPUs share a NIC.",
    ),
    Preset(
        "dgx-a100", "NVIDIA DGX A100, 8 A100 80 GB behind six NVSwitches", "a100-sxm", "switch",
        Server(8, "GPU", "NVIDIA A100-SXM4-80GB", "nvidia", Nics(8, HDR, level=2),
               switch=Switch("NVSwitch", "nvlink", NVLINK_3, 12),
               levels=_numa_tree(2, AMD_SOCKETS, UP_4), slot=PCIE_4),
        {"nvlink": REACHED_A100, "pcie": REACHED_PCIE_4, "sys": REACHED_SOCKETS, "network": REACHED_NET}, OP_A100,
        "Each of four PCIe switches has two GPUs and two NICs. The real switches have two levels; the preset has one.",
    ),
    Preset(
        "hgx-h100", "NVIDIA HGX H100, 8 H100 behind four NVSwitches", "h100-sxm", "switch",
        Server(8, "GPU", "NVIDIA H100 80GB HBM3", "nvidia", Nics(8, NDR, level=2),
               switch=Switch("NVSwitch", "nvlink", NVLINK_4, 18),
               levels=_numa_tree(4, UPI_TAKEN, UP_5), slot=PCIE_5),
        {"nvlink": REACHED_H100, "pcie": REACHED_PCIE_5, "sys": REACHED_SOCKETS, "network": REACHED_NET}, OP_H100,
        "Each GPU shares a PCIe switch with its NIC.",
    ),
    Preset(
        "a800-8", "8 A800 80 GB behind NVSwitches: A100 with 8 of its 12 links", "a100-sxm", "switch",
        Server(8, "GPU", "NVIDIA A800-SXM4-80GB", "nvidia", Nics(8, HDR_800, level=2),
               switch=Switch("NVSwitch", "nvlink", NVLINK_3_A800, 8),
               levels=_numa_tree(2, AMD_SOCKETS, UP_4), slot=PCIE_4),
        {"nvlink": REACHED_A800, "pcie": REACHED_PCIE_4, "sys": REACHED_SOCKETS, "network": REACHED_NET}, OP_A800,
        "Everything else is assumed to be as in DGX A100.",
    ),
    Preset(
        "h800-8", "8 H800 behind NVSwitches: H100 with 8 of its 18 links", "h100-sxm", "switch",
        Server(8, "GPU", "NVIDIA H800", "nvidia", Nics(8, HDR_800, level=2),
               switch=Switch("NVSwitch", "nvlink", NVLINK_4_H800, 8),
               levels=_numa_tree(4, UPI_TAKEN, UP_5), slot=PCIE_5),
        {"nvlink": REACHED_H800, "pcie": REACHED_PCIE_5, "sys": REACHED_SOCKETS, "network": REACHED_NET}, OP_H800,
        "Everything else is assumed to be as in HGX H100, except NICs of 200 Gbit/s.",
    ),
    Preset(
        "l40s-pcie-8", "8 L40S on PCIe 4, four below each of two switches, one a socket", "l40s", "pcie-numa",
        Server(8, "GPU", "NVIDIA L40S", "nvidia", Nics(2, ROCE_200_L40S, level=2),
               levels=_numa_tree(1, UPI_TAKEN, UP_4), slot=PCIE_4),
        {"pcie": REACHED_PCIE_4, "sys": REACHED_SOCKETS, "network": REACHED_ROCE}, OP_L40S,
        "The GPUs have no direct links. PCIe trees differ between servers: probe yours.",
    ),
    Preset(
        "l20-pcie-8", "8 L20 on PCIe 4, four below each of two switches, one a socket", "l20", "pcie-numa",
        Server(8, "GPU", "NVIDIA L20", "nvidia", Nics(2, ROCE_200_L20, level=2),
               levels=_numa_tree(1, UPI_TAKEN, UP_4), slot=PCIE_4),
        {"pcie": REACHED_PCIE_4, "sys": REACHED_SOCKETS, "network": REACHED_ROCE}, OP_L20,
        "The PCIe tree is copied from the L40S preset; no page on such a server was read. Probe yours.",
    ),
    Preset(
        "rtx4090-pcie", "8 RTX 4090 on PCIe 4, each on a host bridge of its own, four a socket, no peer access",
        "rtx4090", "pcie-numa",
        Server(8, "GPU", "NVIDIA GeForce RTX 4090", "nvidia", Nics(2, ROCE_100_4090, level=0),
               levels=(Level("numa", 2, AMD_SOCKETS), Level("host-bridge", 4, INSIDE)), slot=PCIE_4),
        {"pcie": REACHED_4090, "sys": REACHED_SOCKETS, "network": REACHED_ROCE}, OP_4090,
        "GeForce cards have no peer access: their messages pass through host memory. PCIe trees differ between servers "
        "(in an issue of NVIDIA's go-gpuallocator all pairs are SYS): probe yours.",
    ),
    Preset(
        "a10-pix-4", "4 A10 on PCIe 4 in pairs: PIX inside, PXB across (the TokenRing paper's machine)", "a10",
        "pcie-bridge",
        Server(4, "GPU", "NVIDIA A10", "nvidia", Nics(1, ROCE_100_A10, level=1),
               levels=(Level("numa", 1, ONE_SOCKET), Level("host-bridge", 1, INSIDE),
                       Level("pcie-switch", 1, UP_4), Level("pcie-switch", 2, UP_4)), slot=PCIE_4),
        {"pcie": REACHED_PCIE_4, "network": REACHED_ROCE}, OP_A10,
        "The paper gives the labels but not the widths. We assume two x16 uplinks between the pairs.",
    ),
    Preset(
        "atlas-800-910a", "Huawei Atlas 800 (model 9000), 8 Ascend 910A: two HCCS quads, PCIe between", "910a",
        "islands",
        Server(8, "NPU", "910A", "huawei", Nics(8, ROCE_100), links=(Links("hccs", HCCS_910A, _QUADS),),
               levels=(Level("numa", 2, BETWEEN_QUADS), Level("pcie-switch", 1, UP_4)), slot=PCIE_4),
        {"hccs": REACHED_910A, "pcie": REACHED_PCIE_4, "sys": REACHED_PCIE_4, "network": REACHED_ROCE}, OP_910A,
        "The width of the links between the quads is not published. Each NPU has a NIC.",
    ),
    Preset(
        "atlas-800t-a2", "Huawei Atlas 800T A2, 8 Ascend 910B: full HCCS mesh", "910b3", "full-mesh",
        Server(8, "NPU", "910B3", "huawei", Nics(8, ROCE_200),
               links=(Links("hccs", HCCS_910B, full_mesh(range(8))),)),
        {"hccs": REACHED_910B, "network": REACHED_ROCE}, OP_ASCEND,
        "Each NPU has a NIC. PCIe to the host is left out, because no traffic between NPUs uses it.",
    ),
    Preset(
        "atlas-a3", "Huawei Atlas 800T A3, 16 dies in 8 Ascend 910C: SIO pairs, HCCS switch", "910c-die", "switch",
        Server(16, "NPU", "910C", "huawei", Nics(16, ROCE_A3), links=(Links("sio", SIO_A3, _PACKAGES),),
               switch=Switch("HCCS switch", "hccs", HCCS_A3, 7), dies=2),
        {"sio": REACHED_SIO, "hccs": REACHED_A3, "network": REACHED_ROCE}, OP_ASCEND,
        "Several servers are joined by RoCE here. A SuperPoD joins them by HCCS at the full rate.",
    ),
    Preset(
        "atlas-850", "Huawei Atlas 850, 8 Ascend 950DT: full UB mesh", "950dt", "full-mesh",
        Server(8, "NPU", "950DT", "huawei", Nics(8, CLOS_950),
               links=(Links("ub", UB_950, full_mesh(range(8))),)),
        {"ub": REACHED_950, "network": REACHED_CLOS}, OP_950,
        "All figures are the vendor's; none was measured. Eight UB ports of each NPU join several servers at the "
        "CLOS level. A single server leaves that level out.",
    ),
    Preset(
        "mi300x-8", "8 AMD MI300X: full xGMI mesh", "mi300x", "full-mesh",
        Server(8, "GPU", "AMD Instinct MI300X", "amd", Nics(8, NDR_MI300X, level=2),
               links=(Links("xgmi", XGMI_MI300X, full_mesh(range(8))),),
               levels=_numa_tree(4, AMD_SOCKETS, UP_5), slot=PCIE_5),
        {"xgmi": REACHED_XGMI, "pcie": REACHED_PCIE_5, "sys": REACHED_SOCKETS, "network": REACHED_NET}, OP_MI300X,
        "Each GPU shares a PCIe switch with its NIC.",
    ),
)  # fmt: skip

PRESETS: Mapping[str, Preset] = MappingProxyType({each.name: each for each in _ALL})


def like(name: str, prefix: str) -> str:
    """Return the end of a sentence on a name that is no preset's: which it is like, with so many servers."""
    base, star, hosts = name.removeprefix(PREFIX).strip().partition("*")
    found = base if base in PRESETS else nearest(base.rpartition("/")[2], PRESETS)
    return "" if found is None else f"; did you mean {prefix}{found}{star}{hosts}?"


def find(name: str) -> tuple[Preset, int]:
    """Return the preset that a name means, and how many of its servers: "hgx-h100", "preset:hgx-h100*4".

    Raises ConfigurationError for an unknown name, or a number of hosts that cannot be had.
    """
    match = re.fullmatch(r"([^*]+)(?:\*([0-9]{1,9}))?", name.removeprefix(PREFIX).strip(), re.ASCII)
    found = PRESETS.get(match[1].strip()) if match else None
    if match is None or found is None:
        raise ConfigurationError(
            f"unknown preset {name[:60]!r}; choose one of {', '.join(PRESETS)}, or NAME*4 for four over their NICs"
            f"{like(name, PREFIX if name.startswith(PREFIX) else '')}"
        )
    hosts = int(match[2] or 1)
    if not 1 <= hosts <= MAX_HOSTS:
        raise ConfigurationError(f"preset {name[:60]!r} asks for {hosts} hosts; from 1 to {MAX_HOSTS} can be had")
    return found, hosts


def preset(name: str) -> Topology:
    """Return the topology of a preset, one rank on each accelerator, host by host: "atlas-800t-a2", "hgx-h100*4".

    Raises ConfigurationError for an unknown name.
    """
    found, hosts = find(name)
    return found.topology(hosts)
