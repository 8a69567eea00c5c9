"""What one rank refuses, all ranks hear: it speaks where the others tell of the call that they are about to make."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tokenring.errors import PeerLost, one_line
from tokenring.runtime.agreement import REFUSED, Description, Disagreement, agree, settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenring.ir.schedule_data import Pass
    from tokenring.runtime.caller import Caller

LOG = logging.getLogger("tokenring")
TOLD = "_tokenring_told"  # of an error that passes through several calls, as in a checkpoint: it is told once


class refusing:
    """This rank's own checks of a call on which all ranks are about to agree.

    What they raise, all hear: this rank raises it, every other one a Disagreement that names rank and reason.
    """

    __slots__ = ("_cp", "_direction", "_given")

    def __init__(self, cp: Caller, direction: Pass, *given: object) -> None:
        """given: the call's tensors, or its device; by it ranks that have not spoken yet find the same transport."""
        self._cp, self._direction, self._given = cp, direction, given

    def __enter__(self) -> None:
        """Nothing: calls that pass cost nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            reason = one_line(error)
            tell(self._cp, error, lambda: self.speak(reason))

    def speak(self, reason: str) -> None:
        """Take part with the reason in the exchange in which the others wait. Raises Disagreement, PeerLost."""
        transport = self._cp.speaker(_device(self._given))
        if transport is not None:
            agree(transport, Description.of({"pass": self._direction, REFUSED: reason}))
            settle(transport)


def tell(cp: Caller, error: BaseException, speak: Callable[[], object]) -> None:
    """Take part, by `speak`, in the exchange in which the others wait. Raises nothing: the caller raises `error`."""
    heard = isinstance(error, (PeerLost, Disagreement)) or hasattr(error, TOLD)
    if cp.world_size == 1 or heard or not isinstance(error, Exception):
        return
    setattr(error, TOLD, True)
    try:
        with cp.turn, _disable_current_modes(), torch._C.DisableTorchFunction():  # such as of FakeTensor, torch.device
            speak()
    except Disagreement:
        pass
    except Exception as unheard:  # whatever it is, it is not what the caller wants to know
        LOG.warning("the other ranks may wait for this one, which could not tell them that it raises: %s", unheard)


def _device(given: tuple[object, ...]) -> torch.device | None:
    """An accelerator before the CPU: on some rank a tensor was left behind there."""
    devices = [each if isinstance(each, torch.device) else getattr(each, "device", None) for each in given]
    found = [each for each in devices if isinstance(each, torch.device) and each.type != "meta"]
    return next((each for each in found if each.type != "cpu"), found[0] if found else None)
