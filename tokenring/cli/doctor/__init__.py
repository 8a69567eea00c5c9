"""`tokenring doctor`: what is installed, what would be used, what is missing, and what to do about it.

It never fails itself: everything that imports torch or a vendor's package runs in a process of its own with a time
limit (`ask`, `probes`), and each part of the examination (`examine`) is guarded. `findings` says what comes out, as
values and as JSON (docs/doctor.md), `report` shows it. Nothing here imports torch.
"""

from tokenring.cli.doctor.command import main

__all__ = ["main"]
