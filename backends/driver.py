"""The CUDA driver's own calls that torch has none for, by ctypes: no package is needed for them.

Names, numbers and meanings are those of the CUDA driver API (cuda.h; "Stream Memory Operations", "Stream Management").
Not yet run on a GPU.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

DRIVER = "libcuda.so.1"
WAIT_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
WAIT_FLUSH = 1 << 30  # CU_STREAM_WAIT_VALUE_FLUSH
CAN_FLUSH = 98  # CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@cache
def library() -> Any:
    """Raises OSError where there is none."""
    return ctypes.CDLL(DRIVER)


def check_waits() -> None:
    """Raises OSError without the library, AttributeError if it cannot let streams wait."""
    _wait_value()


def wait_value(stream: int, address: int, value: int, flags: int) -> None:
    """The stream goes on once the 32-bit word is this value. Raises RuntimeError."""
    _check("cuStreamWaitValue32", _wait_value()(stream, address, value, flags))


def wait_flags(device: int) -> int:
    """How a stream of this device waits for a word that a peer sets behind what it has put there.

    A device may reorder writes that come from outside: by the driver's text, work behind the wait is sure to see what
    came before the word if the wait flushes. Where a device cannot flush there is nothing else to ask for.

    Raises RuntimeError.
    """
    made, found = ctypes.c_int(), ctypes.c_int()
    _check("cuDeviceGet", library().cuDeviceGet(ctypes.byref(made), device))
    _check("cuDeviceGetAttribute", library().cuDeviceGetAttribute(ctypes.byref(found), CAN_FLUSH, made))
    return WAIT_EQUAL | (WAIT_FLUSH if found.value else 0)


def stay_out_of_captures() -> None:
    """From now on nothing that this thread asks the driver ends a capture that goes on in another thread.

    torch captures so that any thread's question after an event makes the capture fail, unless that thread says this.
    Raises RuntimeError, OSError, AttributeError.
    """
    mode = ctypes.c_int(RELAXED)
    name = "cuThreadExchangeStreamCaptureMode"
    _check(name, getattr(library(), name)(ctypes.byref(mode)))


@cache
def _wait_value() -> Any:
    function = getattr(library(), "cuStreamWaitValue32_v2", None) or library().cuStreamWaitValue32
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


def _check(name: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{name} failed with CUresult {code}")
