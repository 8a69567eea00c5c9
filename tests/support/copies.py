"""Copies that executors make as one, as on a device, where CPUs make each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tokenring.runtime import copying, executor


@contextmanager
def copied_as_one() -> Iterator[None]:
    """Let executors that are made inside make copies as one."""
    plain = executor._Binder.__init__

    def asking(self: executor._Binder, *given: Any) -> None:
        plain(self, *given)
        self.copying = copying

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor._Binder, "__init__", asking)
        yield
