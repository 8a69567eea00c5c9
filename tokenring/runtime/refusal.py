"""Refusals: a rank that refuses a call sends its reason in the exchange where the others describe the call."""

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
    """A guard around this rank's own checks of a call on which all ranks are about to agree.

    An error of the checks is sent to all ranks: this one raises it, every other a Disagreement with rank and reason.
    """

    __slots__ = ("_cp", "_direction", "_given")

    def __init__(self, cp: Caller, direction: Pass, *given: object) -> None:
        """Guard a pass. given: the call's tensors or device, by which ranks without a transport find the same one."""
        self._cp, self._direction, self._given = cp, direction, given

    def __enter__(self) -> None:
        """Do nothing: calls that pass cost nothing."""

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
    """Return the device of a call's tensors: an accelerator before the CPU, where some rank left a tensor behind."""
    devices = [each if isinstance(each, torch.device) else getattr(each, "device", None) for each in given]
    found = [each for each in devices if isinstance(each, torch.device) and each.type != "meta"]
    return next((each for each in found if each.type != "cpu"), found[0] if found else None)
