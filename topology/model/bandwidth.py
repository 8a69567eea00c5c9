"""Published bandwidth, GB/s one way. What is not published is None; nothing here is guessed.

Figures are of one link, as payload. Which generation it is follows from the device's model or
architecture; without either, a label such as NV18 says how many links there are and not how fast.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from tokenring.topology.model.facts import Device


@dataclass(frozen=True)
class Published:
    """One generation: whose links, GB/s one way of each, and how many a device has."""

    kind: str
    devices: str
    link_gbs: float
    links: int


# Longer names before those that they contain; the first that matches counts.
PUBLISHED = (
    Published("nvlink", r"P100|sm60", 20, 4),
    Published("nvlink", r"V100|sm70", 25, 6),
    Published("nvlink", r"A800", 25, 8),
    Published("nvlink", r"A100|sm80", 25, 12),
    Published("nvlink", r"A6000|\bA40\b|3090|sm86", 14.062, 4),
    Published("nvlink", r"H800", 25, 8),
    Published("nvlink", r"\bGH200|H100|H200|\bH20\b|sm90", 25, 18),
    Published("nvlink", r"G?B[23]00|sm10[03]", 50, 18),
    Published("nvlink", r"Rubin|VR200|sm107", 50, 36),
    Published("xgmi", r"MI250|MI210|gfx90a", 50, 7),
    Published("xgmi", r"MI3(?:00X|25X|08X)|gfx942", 64, 7),
    Published("xgmi", r"MI35[05]X|gfx950", 76.5, 7),
    Published("hccs", r"910A", 30, 3),  # 3 × 240 Gbit/s, as conference notes have it: no page of the vendor's found
    Published("hccs", r"910B", 28, 7),  # 4 lanes × 56 Gbit/s in the driver's source; a pair was measured with 26.2
    Published("hccs", r"910C|910_93|A3", 28, 7),  # of a die: 196 in all, a third party's table; npu-smi prints 7 × 224
    # SIO: no figure found. UB of the 950: 840 GB/s a device is announced, how many links share it is not.
)
LINKS_WHERE_UNKNOWN = {"nvlink": 18, "xgmi": 7, "hccs": 7}  # the most that devices in use have
WHOLE_DEVICE = (12, 18, 36)  # so many NVLinks of one pair are all that a device has
PCIE_GBS = {8.0: 15.75, 16.0: 31.0, 32.0: 63.0, 64.0: 121.0}  # x16, by GT/s


def published(kind: str, device: Device) -> Published | None:
    """Return the generation of a device's links; None if neither its model nor its architecture gives it."""
    return _published(kind, device.model, device.arch)


@lru_cache(4096)
def _published(kind: str, *texts: str | None) -> Published | None:
    for text in texts:
        for entry in PUBLISHED:
            if text and entry.kind == kind and re.search(entry.devices, text):
                return entry
    return None


def links_per_device(kind: str, device: Device) -> int | None:
    """Return how many links of a kind the device has; the most there are where the model is unknown."""
    entry = published(kind, device)
    return entry.links if entry else LINKS_WHERE_UNKNOWN.get(kind)
