"""The CUDA driver's own calls that torch has none for, by ctypes: no package is needed for them.

Names, numbers and meanings are those of the CUDA driver API (cuda.h; "Stream Memory Operations", "Stream Management").
Not yet run on a GPU.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any

DRIVER = "libcuda.so.1"
WAIT_VALUE_32, WRITE_VALUE_32 = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
WAIT_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
WAIT_FLUSH = 1 << 30  # CU_STREAM_WAIT_VALUE_FLUSH
CAN_FLUSH = 98  # CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class Operation(ctypes.Structure):
    """A part of a batch: CUstreamBatchMemOpParams, a union of 48 bytes whose parts for waits and writes lie alike."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),  # of 32 bits it is the first half, on hosts that put the lowest byte first
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


@cache
def library() -> Any:
    """Load the driver's library. Raises OSError where there is none."""
    return ctypes.CDLL(DRIVER)


def check_waits() -> None:
    """Raise OSError without the library, AttributeError if it cannot let streams wait."""
    _batch()


def wait_and_clear(stream: int, address: int, value: int, flags: int, cleared: int) -> None:
    """Queue a wait until the 32-bit word of this device has the value, and then a write of another one there.

    Both in one call, which is what NCCL captures into graphs, too. Raises RuntimeError.
    """
    operations = (Operation * 2)(
        Operation(WAIT_VALUE_32, address, value, flags), Operation(WRITE_VALUE_32, address, cleared, 0)
    )
    _check("cuStreamBatchMemOp", _batch()(stream, len(operations), operations, 0))


def wait_flags(device: int) -> int:
    """Return the flags of a stream's wait for a word that a peer sets behind what it has put on this device.

    A device may reorder writes that come from outside: by the driver's text, work behind the wait is sure to see what
    came before the word if the wait flushes. Where a device cannot flush there is nothing else to ask for.

    Raises RuntimeError.
    """
    made, found = ctypes.c_int(), ctypes.c_int()
    _check("cuDeviceGet", library().cuDeviceGet(ctypes.byref(made), device))
    _check("cuDeviceGetAttribute", library().cuDeviceGetAttribute(ctypes.byref(found), CAN_FLUSH, made))
    return WAIT_EQUAL | (WAIT_FLUSH if found.value else 0)


def stay_out_of_captures() -> None:
    """Let nothing that this thread asks the driver end a capture that goes on in another thread.

    torch captures so that any thread's question after an event makes the capture fail, unless that thread says this.
    Raises RuntimeError, OSError, AttributeError.
    """
    mode = ctypes.c_int(RELAXED)
    name = "cuThreadExchangeStreamCaptureMode"
    _check(name, getattr(library(), name)(ctypes.byref(mode)))


def new_stream(owner: object) -> int:
    """Make a stream of the current context, of the highest priority, that no pool gives to anybody else.

    It is given back when the owner goes. Raises RuntimeError, OSError, AttributeError.
    """
    lowest, highest, made = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    _check("cuCtxGetStreamPriorityRange", library().cuCtxGetStreamPriorityRange(*map(ctypes.byref, (lowest, highest))))
    create, end = library().cuStreamCreateWithPriority, library().cuStreamDestroy_v2
    _check("cuStreamCreateWithPriority", create(ctypes.byref(made), NON_BLOCKING, highest.value))
    weakref.finalize(owner, end, made).atexit = False  # at the end of the process the driver goes, too
    return made.value or 0


@cache
def _batch() -> Any:
    """Return the driver's call for batches, of CUDA 11.7 or newer.

    The one before it serves only where the kernel module was told to allow it.
    """
    function = library().cuStreamBatchMemOp_v2
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER(Operation), ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


def _check(name: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{name} failed with CUresult {code}")
