"""`tokenring bench`: schedules, the plain kernel and other libraries on the same inputs, in turns.

The process that the user starts (`command`) starts ranks of its own, or is one of those that torchrun has
started. Each rank (`worker`) makes ready what there is to run (`candidates`, `peers`), compares its results
with a reference (`reference`) and times it in turns (`race`). `results` says what comes out, as values and
as JSON (docs/bench.md), `table` and `picture` show it.
"""

from tokenring.cli.bench.command import main

__all__ = ["main"]
