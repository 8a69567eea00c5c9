"""Ranks that take each other for processes of other machines, so that they share no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist

from tokenring.backends.control import control
from tokenring.backends.control import process_info as members

APART = "gloo, apart"  # the name of a transport between such ranks


@contextmanager
def transport_name(name: str) -> Iterator[str]:
    """What the registry calls it; while such ranks make it, of which there is one on a machine."""
    whole = control.this_process  # type: ignore[attr-defined]
    if name == APART:
        me = replace(members.this_process(), boot_id=f"machine {dist.get_rank()}")
        control.this_process = lambda: me  # type: ignore[attr-defined]
    try:
        yield name.partition(",")[0]
    finally:
        control.this_process = whole  # type: ignore[attr-defined]
