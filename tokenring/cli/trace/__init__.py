"""`tokenring trace`: what every rank did when, in one call: as a table, as a picture and as a Chrome trace.

The ranks (`worker`) run the call with `ContextParallel.trace`; `bars` puts their events on one clock, with
words for each. `record` says what comes out, `table` sums it up by step, `picture` and `chrome` draw it.
"""

from tokenring.cli.trace.command import main

__all__ = ["main"]
