"""torch's symmetric memory over NVSHMEM: puts with a signal to any GPU that NVSHMEM reaches, on other machines, too.

torch's put writes to the peer's copy of the very bytes that it reads, so that messages go by way of boxes
(lowering/mailboxes.py). Read in torch's c10d/symm_mem (nvshmem_extension, NVSHMEMSymmetricMemory) and in NVSHMEM's
manual. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from tokenring.backends.devices import DeviceRuntime, device_of
from tokenring.backends.transports.onesided import signaller
from tokenring.backends.transports.symm import SymmTransport
from tokenring.lowering.target import Target

BACKEND = "NVSHMEM"  # what torch calls it
OPERATORS = ("nvshmem_put_with_signal", "nvshmem_wait_for_signal", "stream_write_value32_")
WORLD = "0"  # torch's name of the group of all ranks, which NVSHMEM is started on
SET, CLEAR = 1, 0
WORD_BYTES = 8  # of a signal of NVSHMEM's
BLANK_BYTES = 16  # what a put carries that is only to signal


def unavailable() -> str | None:
    """Return None, or why this process has no symmetric memory over NVSHMEM. Nothing is started."""
    return missing() or _other_backend(torch.device("cuda", torch.cuda.current_device()))


def missing() -> str | None:
    """Return None, or what is not there for it, however a process is set up."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here"
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    if without := [name for name in OPERATORS if not _has_code(name)]:
        return f"this torch has no code behind symm_mem::{without[0]}"
    if not _is_found():
        return "torch finds no NVSHMEM (libnvshmem_host.so.3) here"
    return None


def _has_code(name: str) -> bool:
    """Return True if there is code to run on CUDA behind an operator: the schemas are in every build."""
    if not hasattr(torch.ops.symm_mem, name):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "CUDA")


def _is_found() -> bool:
    try:
        from torch._C._distributed_c10d import _is_nvshmem_available
    except ImportError:  # built without
        return False
    return bool(_is_nvshmem_available())


def _other_backend(device: torch.device) -> str | None:
    """Say why the symmetric memory of this process is not NVSHMEM's; None: it is.

    A process has one kind, from the first on.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    if (backend := _SymmetricMemory.get_backend(device)) == BACKEND:
        return None
    return f"torch's symmetric memory is that of {backend or 'nobody'} in this process: set TORCH_SYMMMEM={BACKEND}"


class NvshmemTransport(SymmTransport):
    """A transport over NVSHMEM, between all ranks of the job. Its memory stays until the process ends (`_kept`)."""

    name = "nvshmem"
    target = Target(early_receives=False, one_sided=True, placing=True, mailboxes=True)

    def _find_device(self) -> DeviceRuntime:
        """Return the current CUDA device. Raises RuntimeError where NVSHMEM cannot serve.

        This includes a group that leaves ranks out: each allocation waits for all ranks of the job.
        """
        if reason := unavailable():
            raise RuntimeError(reason)
        if (self.rank, self.world_size) != (dist.get_rank(), dist.get_world_size()):
            raise RuntimeError(
                f"NVSHMEM allocates on all ranks of the job at once, in their order, and this group has "
                f"{self.world_size} of {dist.get_world_size()}, this rank {dist.get_rank()} as its {self.rank}"
            )
        self._where = torch.device("cuda", torch.cuda.current_device())
        return device_of(self._where)

    def _meeting_place(self, group: Any) -> Any:
        """Return None: NVSHMEM meets at the store of the group of all ranks."""

    def _make_memory(self, store: Any) -> NvshmemMemory:
        assert self._where is not None
        return NvshmemMemory(self.world_size, self._where)


class NvshmemMemory:
    """A rank's words and boxes, at the same offsets on all ranks, and its own pool. `meet` and `lay` are collective.

    Words have 64 bits, as NVSHMEM's signals do; the order of bytes is that of CUDA's hosts, lowest first.
    """

    def __init__(self, world_size: int, device: torch.device) -> None:
        self._world_size, self._device = world_size, device
        self._pool: torch.Tensor | None = None
        self._boxes: torch.Tensor | None = None

    def meet(self, words: int, room_bytes: int = 0) -> torch.Tensor:
        """Set up words and room for puts, on all ranks together; see OwnMemory.meet."""
        made = self._symmetric(WORD_BYTES * words + BLANK_BYTES + room_bytes)
        made.zero_()
        self._aside = device_of(self._device).new_stream(high_priority=True)
        self._words = made[: WORD_BYTES * words].view(torch.int64)
        self._halves = self._words.view(torch.uint32)
        blank = made[WORD_BYTES * words :]
        self._blank, self._boxes = blank[:BLANK_BYTES], blank[BLANK_BYTES:]
        device_of(self._device).synchronize()  # before anyone is told that all are there, and signals
        return self._boxes

    def are_set(self, words: Sequence[int]) -> list[bool]:
        """Read words on a stream of its own; see OwnMemory.are_set."""
        with device_of(self._device).on(self._aside):
            found = self._words.cpu()
        return [int(found[word]) == SET for word in words]

    def grow(self, nbytes: int) -> torch.Tensor:
        """Make a new pool, uint8. No peer reaches it: it may be of another size on each rank."""
        self._pool = None
        self._pool = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._pool

    def lay(self, nbytes: int) -> None:
        """Make boxes of so many bytes in all, instead of those before; nothing may be under way."""
        if self._boxes is not None:
            _kept().pop(self._boxes.data_ptr(), None)
            self._boxes = None
        self._boxes = self._symmetric(nbytes)

    def _symmetric(self, nbytes: int) -> torch.Tensor:
        """Make nbytes, uint8, at the same place in the symmetric memory of all ranks, which call it together."""
        from torch._C._distributed_c10d import _SymmetricMemory

        with torch.cuda.device(self._device):
            made: torch.Tensor = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, self._device)
            _kept()[made.data_ptr()] = made
            _SymmetricMemory.rendezvous(made, WORLD)
        return made

    # ---------- the three verbs, and the copy out of a box

    def put(self, data: torch.Tensor, peer: int, place: int, word: int) -> None:
        """Copy the bytes into the own box at the place, and put that at the peer; see OneSidedMemory.put."""
        box = self._box(data, place)
        box.copy_(_bytes(data))
        self._put(box, peer, word)

    def signal(self, peer: int, word: int) -> None:
        """Set a word at a peer by a put of bytes that nobody reads.

        torch has no signal alone, nor does it promise one for a put of none.
        """
        self._put(self._blank, peer, word)

    def wait(self, word: int) -> None:
        """Queue a wait for one's own word, and then its clearing; see OneSidedMemory.wait."""
        own = self._words[word : word + 1]
        torch.ops.symm_mem.nvshmem_wait_for_signal(own, SET, signaller(word, self._world_size))
        torch.ops.symm_mem.stream_write_value32_(self._halves, 2 * word, CLEAR)

    def take(self, data: torch.Tensor, place: int) -> None:
        """Copy a message out of the own box at this place, to where it belongs."""
        _bytes(data).copy_(self._box(data, place))

    def release(self) -> None:
        """Let all waits go on, and fill boxes and pool with NaN, so that nobody takes them for a result."""
        with device_of(self._device).on(self._aside):
            for each in (self._boxes, self._pool):
                if each is not None:
                    each.fill_(255)
            self._words.fill_(SET)

    def _put(self, box: torch.Tensor, peer: int, word: int) -> None:
        torch.ops.symm_mem.nvshmem_put_with_signal(box, self._words[word : word + 1], SET, peer)

    def _box(self, data: torch.Tensor, place: int) -> torch.Tensor:
        assert self._boxes is not None
        return self._boxes[place : place + data.numel() * data.element_size()]


def _bytes(data: torch.Tensor) -> torch.Tensor:
    return data.view(-1).view(torch.uint8)


@cache
def _kept() -> dict[int, torch.Tensor]:
    """Return symmetric memory by its address. NVSHMEM frees it when all ranks of the job do; some may never come.

    So what a transport leaves is not freed: only boxes that all ranks exchange for larger ones, together.
    """
    return {}
