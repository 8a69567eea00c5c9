"""torch's symmetric memory on CUDA: puts and signals by copy engines, waits by stream memory operations.

No kernel of ours runs, so that attention keeps every SM. Streams write and wait for words of their own device alone:
drivers of CUDA 13.1 and newer do not write a peer's memory that way (NVIDIA/nccl issue 2052), and NCCL has copied
its signals since. Read in torch 2.6 to 2.13: torch.distributed._symmetric_memory and c10d/symm_mem; the driver's calls
in the CUDA driver API, "Stream Memory Operations". Not yet run on a GPU.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tokenring.backends.transports import driver

SET, CLEAR = 1, 0
OVERLAPS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # as torch's allow_overlapping_devices reads it
GROUPS = (2, 11)  # from this torch on a rendezvous looks up a process group by its name, and no group info


def unavailable() -> str | None:
    """Return None, or why this process has no symmetric memory on CUDA. Nothing is started."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here"
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    try:
        from torch._C._distributed_c10d import _SymmetricMemory  # noqa: F401
    except ImportError:
        return "this torch has no torch.distributed._symmetric_memory"
    try:
        driver.check_waits()
    except (OSError, AttributeError) as error:
        return f"the driver's library has no cuStreamBatchMemOp: {error}"
    return None


def may_overlap(environment: Mapping[str, str]) -> bool:
    """Return True if torch's rendezvous takes ranks of one host whose devices have equal numbers in their processes."""
    return environment.get(OVERLAPS, "0") == "1"


class SymmetricMemory:
    """A rank's words and heap, and its peers', mapped; of one device. `meet` and `grow` are collective."""

    def __init__(self, name: str, rank: int, world_size: int, store: Any, device: torch.device) -> None:
        """Make the memory of a rank on a device.

        name: unique to this transport, the same on all ranks; store: of these ranks alone, over which they meet.
        """
        from torch._C._distributed_c10d import _SymmetricMemory

        self._symmetric, self._name, self._device = _SymmetricMemory, name, device
        self._rank, self._world_size = rank, world_size
        if (backend := self._symmetric.get_backend(device)) not in (None, "CUDA"):
            raise RuntimeError(f"torch's symmetric memory is that of {backend} in this process: unset TORCH_SYMMMEM")
        register(self, name, rank, world_size, store)
        self._heap: torch.Tensor | None = None
        self._heap_handle: Any = None
        self._heap_at = 0  # where the heap begins in what was rendezvoused
        self._targets: dict[tuple[int, int, int], torch.Tensor] = {}  # peer, place, size → the memory there

    def meet(self, words: int, room_bytes: int = 0) -> torch.Tensor:
        """Set up words and room for puts, on all ranks together; see OwnMemory.meet."""
        made, handle = self._rendezvous(4 * words + room_bytes)
        made.zero_()
        self._words = made[: 4 * words].view(torch.int32)
        self._heap, self._heap_handle, self._heap_at = made[4 * words :], handle, 4 * words
        self._one = torch.full((1,), SET, dtype=torch.int32, device=made.device)
        self._wait_flags = driver.wait_flags(self._device.index)
        self._aside = own_stream(self, self._device)
        torch.cuda.synchronize(self._device)  # before anyone is told that all are there, and signals
        self._at = [handle.get_buffer(rank, (words,), torch.int32, 0) for rank in range(self._world_size)]
        return self._heap

    def grow(self, nbytes: int) -> torch.Tensor:
        """Make a new heap, on all ranks together; see OwnMemory.grow."""
        self._targets.clear()
        self._heap = self._heap_handle = None
        self._heap, self._heap_handle = self._rendezvous(nbytes)
        self._heap_at = 0
        return self._heap

    def _rendezvous(self, nbytes: int) -> tuple[torch.Tensor, Any]:
        with torch.cuda.device(self._device):
            made = self._symmetric.empty_strided_p2p((nbytes,), (1,), torch.uint8, self._device, self._name)
            return made, self._symmetric.rendezvous(made, self._name)

    def are_set(self, words: Sequence[int]) -> list[bool]:
        """Read words on a stream that nothing else stands on; see OwnMemory.are_set.

        A stream that waits for these words does not hold up the caller.
        """
        with torch.cuda.stream(self._aside):
            found = self._words.cpu()
        return [int(found[word]) == SET for word in words]

    # ---------- the three verbs

    def put(self, data: torch.Tensor, peer: int, place: int, word: int) -> None:
        """Copy the bytes to the place in the peer's heap, and signal its word; see OneSidedMemory.put."""
        key = peer, place, data.numel() * data.element_size()
        target = self._targets.get(key)
        if target is None:
            target = self._heap_handle.get_buffer(peer, (key[2],), torch.uint8, self._heap_at + place)
            self._targets[key] = target
        target.copy_(data.view(-1).view(torch.uint8))  # of contiguous bytes: a copy engine does it
        self.signal(peer, word)

    def signal(self, peer: int, word: int) -> None:
        """Set a word at a peer by a copy of its own, behind the put.

        What a stream has copied before is there before.
        """
        self._at[peer][word : word + 1].copy_(self._one)

    def wait(self, word: int) -> None:
        """Queue a wait for one's own word, and then its clearing; see OneSidedMemory.wait."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        address = self._words.data_ptr() + 4 * word
        driver.wait_and_clear(stream, address, SET, self._wait_flags, CLEAR)

    def release(self) -> None:
        """Let all waits go on, and fill the heap with NaN, so that nobody takes it for a result."""
        with torch.cuda.stream(self._aside):
            if self._heap is not None:
                self._heap.fill_(255)
            self._words.fill_(SET)


def register(owner: object, name: str, rank: int, world_size: int, store: Any) -> None:
    """Make the ranks known to torch's rendezvous under a name, for as long as the owner lives.

    Newer torch finds a process group by its name and takes rank, size and store from it; a bare one serves, which has
    no communicator. There nothing else is said under that name: torch 2.14 compares what ranks have allocated where
    group info is registered, and the ranks of ours may have allocated differently before.
    """
    c10d = _c10d()
    if release_of(torch.__version__) < GROUPS:
        c10d._SymmetricMemory.set_group_info(name, rank, world_size, store)
        return
    group = c10d.ProcessGroup(store, rank, world_size)
    c10d._register_process_group(name, group)
    weakref.finalize(owner, _unregister, name, group).atexit = False


def _unregister(name: str, group: Any) -> None:
    """Remove the group from torch's registry. It is held until here: the registry does not hold it."""
    _c10d()._unregister_process_group(name)


def _c10d() -> Any:
    """Import torch's module of process groups.

    Its names of groups are texts, and a type of their own in the stubs of newer torch.
    """
    from torch._C import _distributed_c10d

    return _distributed_c10d


def own_stream(owner: object, device: torch.device) -> Any:
    """Make a stream for as long as the owner lives; torch's pool gives each of its streams to many."""
    with torch.cuda.device(device):
        return torch.cuda.ExternalStream(driver.new_stream(owner), device)  # type: ignore[no-untyped-call]


def release_of(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version of torch."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)
