"""torch's symmetric memory on CUDA: puts by copy engines, signals and waits by stream memory operations.

No kernel of ours runs, so that attention keeps every SM. Read in torch 2.13: torch.distributed._symmetric_memory and
c10d/symm_mem; the driver's calls in the CUDA driver API, "Stream Memory Operations". Not yet run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from tokenring.backends import driver
from tokenring.backends.devices import device_of

SET, CLEAR = 1, 0


def unavailable() -> str | None:
    """None, or why this process has no symmetric memory on CUDA. Nothing is started."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here"
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    try:
        from torch._C._distributed_c10d import _SymmetricMemory  # noqa: F401
    except ImportError:
        return "this torch has no torch.distributed._symmetric_memory"
    if not hasattr(torch.ops.symm_mem, "stream_write_value32_"):
        return "this torch has no symm_mem::stream_write_value32_ (torch 2.6 brought it)"
    try:
        driver.check_waits()
    except (OSError, AttributeError) as error:
        return f"the driver's library has no cuStreamWaitValue32: {error}"
    return None


class SymmetricMemory:
    """One rank's words and heap, and those of its peers, mapped. Of one device; `meet` and `grow` are collective."""

    def __init__(self, name: str, rank: int, world_size: int, store: Any, device: torch.device) -> None:
        """name: unique to this transport, the same on all ranks; store: of these ranks alone, over which they meet."""
        from torch._C._distributed_c10d import _SymmetricMemory

        self._symmetric, self._name, self._device = _SymmetricMemory, name, device
        self._rank, self._world_size = rank, world_size
        if (backend := self._symmetric.get_backend(device)) not in (None, "CUDA"):
            raise RuntimeError(f"torch's symmetric memory is that of {backend} in this process: unset TORCH_SYMMMEM")
        self._symmetric.set_group_info(name, rank, world_size, store)
        self._heap: torch.Tensor | None = None
        self._heap_handle: Any = None
        self._targets: dict[tuple[int, int, int], torch.Tensor] = {}  # peer, place, size → the memory there

    def meet(self, words: int) -> None:
        self._words, handle = self._rendezvous(4 * words)
        self._words.zero_()
        self._wait_flags = driver.wait_flags(self._device.index)
        torch.cuda.synchronize(self._device)  # before anyone is told that all are there, and signals
        others = range(self._world_size)
        self._at = [handle.get_buffer(rank, (words,), torch.uint32, 0) for rank in others]
        self._handle = handle

    def grow(self, nbytes: int) -> torch.Tensor:
        self._targets.clear()
        self._heap = self._heap_handle = None
        self._heap, self._heap_handle = self._rendezvous(nbytes)
        return self._heap

    def _rendezvous(self, nbytes: int) -> tuple[torch.Tensor, Any]:
        with torch.cuda.device(self._device):
            made = self._symmetric.empty_strided_p2p((nbytes,), (1,), torch.uint8, self._device, self._name)
            return made, self._symmetric.rendezvous(made, self._name)

    # ---------- the three verbs

    def put(self, data: torch.Tensor, peer: int, place: int, word: int) -> None:
        key = peer, place, data.numel() * data.element_size()
        target = self._targets.get(key)
        if target is None:
            target = self._heap_handle.get_buffer(peer, (key[2],), torch.uint8, place)
            self._targets[key] = target
        target.copy_(data.view(-1).view(torch.uint8))  # of contiguous bytes: a copy engine does it
        self.signal(peer, word)

    def signal(self, peer: int, word: int) -> None:
        """By the driver's default it is written behind a barrier: what this stream wrote before is seen before."""
        torch.ops.symm_mem.stream_write_value32_(self._at[peer], word, SET)

    def wait(self, word: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        driver.wait_value(stream, self._at[self._rank].data_ptr() + 4 * word, SET, self._wait_flags)
        torch.ops.symm_mem.stream_write_value32_(self._at[self._rank], word, CLEAR)

    def release(self) -> None:
        """What messages would have brought becomes NaN, so that nobody takes it for a result."""
        device = device_of(self._device)
        with torch.cuda.device(self._device), device.on(device.new_stream(high_priority=True)):
            if self._heap is not None:
                self._heap.fill_(255)
            self._words.view(torch.int32).fill_(SET)
