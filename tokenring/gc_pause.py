"""A pause of Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect nothing inside the block: proofs and plans make much that lives to the end, and clocks run elsewhere.

    What is left at the end counts as old, unless somebody has frozen objects: looking at all of it as the youngest
    would take longer than what the pause saved.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
