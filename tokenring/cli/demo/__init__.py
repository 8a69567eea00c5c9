"""`tokenring demo`: local ranks train a small transformer on one long sequence that is split over them.

The process that the user starts (`command`) runs torchrun, shows what the ranks report (`results`), and
ends them all (`tokenring.launch.processes`). It computes nothing; the ranks (`worker`) print nothing.
"""

from tokenring.cli.demo.command import main

__all__ = ["main"]
