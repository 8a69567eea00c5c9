"""The PCI devices that are accelerators, and their vendors: by the ids of vendors and classes."""

VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x19e5": "huawei", "0x8086": "intel"}
# By vendor, the first digits of the classes of accelerators: compute (0x12), 3D (0x0302), AMD's display (0x0380).
ACCELERATORS = {"0x10de": ("0x0302", "0x0300"), "0x1002": ("0x0380", "0x12"), "0x19e5": ("0x12",), "0x8086": ("0x12",)}
