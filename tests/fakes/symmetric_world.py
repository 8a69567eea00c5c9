"""torch's symmetric memory and the CUDA driver for one process without a GPU: what `symm` calls of them.

They refuse what the real ones do: a rendezvous finds its group in torch's own registry, which is in every build, and
streams write and wait for words of their own device alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d

from tokenring.backends.transports import driver

c10d: Any = _distributed_c10d  # whose names of groups are a type of their own in the stubs
STREAM, ASIDE, DEVICE = 77, 88, 3
Calls = list[tuple[Any, ...]]


class Handle:
    """Buffers of two ranks, of which the tensor that was rendezvoused is the first's."""

    def __init__(self, own: torch.Tensor) -> None:
        self.buffers = [own, torch.zeros_like(own)]

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        (count,) = sizes
        return self.buffers[rank].view(dtype)[storage_offset : storage_offset + count]


class Symmetric:
    """As torch._C._distributed_c10d._SymmetricMemory, of what is used.

    `rendezvous` is as that of torch 2.11 and newer (make_peer_alloc_info in CUDASymmetricMemory.cu, pytorch PR 172163):
    rank, size and store come from the group that is registered under the name. Group info is stored, and read by none.
    """

    backend: str | None = "CUDA"

    def __init__(self, calls: Calls) -> None:
        self.calls, self.handles = calls, list[Handle]()

    def get_backend(self, device: torch.device) -> str | None:
        return self.backend

    def set_group_info(self, name: str, rank: int, world_size: int, store: Any) -> None:
        self.calls.append(("group info", name, rank, world_size, store))

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: Any, device: Any, group: str) -> torch.Tensor:
        assert stride == (1,) and dtype == torch.uint8
        return torch.full(size, 9, dtype=torch.uint8)

    def rendezvous(self, tensor: torch.Tensor, group: str) -> Handle:
        found = c10d._resolve_process_group(group)
        self.calls.append(("group", found.rank(), found.size()))
        self.handles.append(Handle(tensor))
        return self.handles[-1]


class WithInfo(Symmetric):
    """As before torch 2.11: the group info of that name (get_group_info in SymmetricMemory.cpp)."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self.infos: dict[str, tuple[int, int]] = {}

    def set_group_info(self, name: str, rank: int, world_size: int, store: Any) -> None:
        self.infos[name] = rank, world_size

    def rendezvous(self, tensor: torch.Tensor, group: str) -> Handle:
        if group not in self.infos:
            raise RuntimeError(f"get_group_info: no group info associated with the group name {group}")
        self.calls.append(("group", *self.infos[group]))
        self.handles.append(Handle(tensor))
        return self.handles[-1]


class Driver:
    """As libcuda.so.1, of what is called. can_flush: what the device says of itself; own: addresses of its memory.

    Stream memory operations on other addresses are refused: NVIDIA/nccl issue 2052 has it that since CUDA 13.1 these
    do not write a peer's memory. With which code the driver says so is not known; 801 is CUDA_ERROR_NOT_SUPPORTED.
    """

    can_flush, code = 0, 0

    def __init__(self, calls: Calls, fake: Symmetric) -> None:
        self.calls, self.fake = calls, fake

    def cuStreamBatchMemOp_v2(self, stream: int, count: int, operations: Any, flags: int) -> int:
        assert flags == 0
        for each in operations[:count]:
            if not self.is_own(each.address):
                return 801
            self.calls.append(({1: "wait", 2: "write"}[each.operation], stream, each.address, each.value, each.flags))
            if each.operation == 2:
                ctypes.c_uint32.from_address(each.address).value = each.value
        return self.code

    def is_own(self, address: int) -> bool:
        own = [each.buffers[0] for each in self.fake.handles]
        return any(0 <= address - each.data_ptr() <= each.nbytes - 4 for each in own)

    def cuDeviceGet(self, into: Any, ordinal: int) -> int:
        into._obj.value = 100 + ordinal
        return 0

    def cuDeviceGetAttribute(self, into: Any, attribute: int, device: Any) -> int:
        assert (attribute, device.value) == (98, 100 + DEVICE)  # CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
        into._obj.value = self.can_flush
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.calls.append(("mode", mode._obj.value))
        return self.code

    def cuCtxGetStreamPriorityRange(self, lowest: Any, highest: Any) -> int:
        lowest._obj.value, highest._obj.value = 0, -5
        return 0

    def cuStreamCreateWithPriority(self, into: Any, flags: int, priority: int) -> int:
        assert (flags, priority) == (1, -5)  # CU_STREAM_NON_BLOCKING
        into._obj.value = ASIDE
        self.calls.append(("new stream",))
        return self.code

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        self.calls.append(("end stream", stream.value))
        return 0


def install(patched: pytest.MonkeyPatch, calls: Calls, fake: Symmetric) -> Driver:
    """What a process with CUDA has of what is called."""
    made = Driver(calls, fake)

    def write(tensor: torch.Tensor, offset: int, value: int) -> None:
        if not made.is_own(tensor.data_ptr() + 4 * offset):  # torch calls the driver (DriverAPI) and raises its text
            raise RuntimeError("CUDA driver error: operation not supported")
        calls.append(("write", STREAM, tensor.data_ptr() + 4 * offset, value, 0))

    @contextmanager
    def stream(given: Any) -> Iterator[None]:
        calls.append(("on", given.cuda_stream))
        yield

    patched.setattr(_distributed_c10d, "_SymmetricMemory", fake)
    patched.setattr(driver, "library", lambda: made)
    patched.setattr(driver, "_batch", lambda: made.cuStreamBatchMemOp_v2)
    patched.setattr(torch.ops.symm_mem, "stream_write_value32_", write, raising=False)
    patched.setattr(torch.cuda, "device", lambda device: nullcontext())
    patched.setattr(torch.cuda, "synchronize", lambda device: calls.append(("synchronize",)))
    patched.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    patched.setattr(torch.cuda, "stream", stream)
    patched.setattr(torch.cuda, "ExternalStream", lambda made, device: SimpleNamespace(cuda_stream=made))
    return made
