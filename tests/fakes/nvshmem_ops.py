"""The operators of torch that NVSHMEM serves, without it: what they promise, and nothing more.

The real operators are called, so that the schemas of this torch bind their arguments; a mode stands in for the code
behind them. A put reads on its stream; the bytes come to the same place in the peer's symmetric memory at any later
time, in two halves and in no order among puts, and the signal comes behind the bytes of its own put. A wait goes on
when the word equals the value. Nothing else is ordered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from stream_world import POISON, FakeDevice, Operation, Queue, Refused
from torch.utils._python_dispatch import TorchDispatchMode

from tokenring.backends.transports.nvshmem import NvshmemMemory

Act = Callable[[], object]
Ready = Callable[[], bool]


class Place(Protocol):
    """Where one rank runs, and its symmetric memory: what it and the others allocated, in order."""

    own: list[torch.Tensor]

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8. All ranks call it together."""

    def there(self, peer: int, number: int) -> torch.Tensor:
        """A peer's part of this allocation."""

    def queue(self, name: str, act: Act, ready: Ready) -> None:
        """On the current stream."""

    def fly(self, acts: list[tuple[str, Act]]) -> None:
        """One after another, at any time from now on, on no stream."""


class Streams:
    """A rank of stream_world. symmetric: of each rank, what it allocated."""

    def __init__(self, device: FakeDevice, symmetric: list[list[torch.Tensor]]) -> None:
        self._device, self._symmetric = device, symmetric
        self.own = symmetric[device.rank]

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.own.append(torch.full((nbytes,), POISON, dtype=torch.uint8))
        return self.own[-1]

    def there(self, peer: int, number: int) -> torch.Tensor:
        return self._symmetric[peer][number]

    def queue(self, name: str, act: Act, ready: Ready) -> None:
        self._device.current_stream().add(f"rank {self._device.rank} {name}", act, ready)  # type: ignore[arg-type]

    def fly(self, acts: list[tuple[str, Act]]) -> None:
        self._device.world.network.append(Queue(deque(Operation(*each) for each in acts)))  # type: ignore[arg-type]


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What one rank calls is queued where it runs."""

    def __init__(self, place: Place) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = place

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to say so at each call torch imports its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        stands_in = getattr(self, name, None)
        if stands_in is not None and not kwargs:
            return stands_in(*args)
        if not func.is_view:
            raise Refused(f"{func} is called, with {kwargs}")
        return func(*args, **kwargs or {})

    def copy_(self, into: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        for name, act in halves("copies", into, data):
            self.place.queue(name, act, always)
        return into

    def nvshmem_put_with_signal(self, tensor: torch.Tensor, sigpad: torch.Tensor, signal: int, peer: int) -> None:
        check_signal(sigpad)
        (number, start, stop), (words, low, high) = self.find(tensor), self.find(sigpad)

        def read() -> None:
            there = self.place.there(peer, number)[start:stop]
            word = self.place.there(peer, words)[low:high].view(torch.int64)
            self.place.fly(self.delivered(there, tensor.view(torch.uint8).clone(), lambda: word.fill_(signal)))

        self.place.queue(f"puts to {peer}", read, always)

    def delivered(self, there: torch.Tensor, data: torch.Tensor, signal: Act) -> list[tuple[str, Act]]:
        return [*halves("put", there, data), ("signal", signal)]

    def nvshmem_wait_for_signal(self, sigpad: torch.Tensor, signal: int, peer: int) -> None:
        check_signal(sigpad)
        _, low, _ = self.find(sigpad)
        self.place.queue(f"waits for word {low // 8}", lambda: None, lambda: int(sigpad) == signal)

    def stream_write_value32_(self, tensor: torch.Tensor, offset: int, value: int) -> torch.Tensor:
        if tensor.dtype != torch.uint32 or tensor.dim() != 1:  # as torch's own check has it
            raise Refused(f"a stream writes to {tensor.dtype}")
        self.place.queue("writes", lambda: tensor.view(torch.int32)[offset].fill_(value), always)
        return tensor

    def find(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """In which symmetric allocation it lies, and from where to where."""
        for number, each in enumerate(self.place.own):
            start = tensor.data_ptr() - each.data_ptr()
            if tensor.is_contiguous() and 0 <= start <= each.numel() - tensor.nbytes:
                return number, start, start + tensor.nbytes
        raise Refused("not in symmetric memory, or not contiguous")


def always() -> bool:
    return True


def check_signal(sigpad: torch.Tensor) -> None:
    """NVSHMEM's signals are words of 64 bits."""
    if sigpad.numel() != 1 or sigpad.element_size() != 8 or sigpad.data_ptr() % 8:
        raise Refused(f"a signal of {sigpad.numel()} × {sigpad.dtype}")


def halves(name: str, into: torch.Tensor, data: torch.Tensor) -> list[tuple[str, Act]]:
    """A copy that can be seen half done."""
    if into.shape != data.shape or into.dtype != data.dtype:
        raise Refused(f"{data.shape} of {data.dtype} into {into.shape} of {into.dtype}")
    middle = data.numel() // 2
    pairs = [(into[:middle], data[:middle]), (into[middle:], data[middle:])]
    return [(name, lambda a=a, b=b: a.copy_(b)) for a, b in pairs]  # type: ignore[misc]


class Emulated(NvshmemMemory):
    """Transport `nvshmem`'s memory on such operators."""

    def __init__(self, world_size: int, place: Place, operators: type[Operators] = Operators) -> None:
        super().__init__(world_size, torch.device("cpu"))
        self.place, self.operators = place, operators(place)

    def _symmetric(self, nbytes: int) -> torch.Tensor:
        return self.place.allocate(nbytes)

    def put(self, data: torch.Tensor, peer: int, place: int, word: int) -> None:
        with self.operators:
            super().put(data, peer, place, word)

    def signal(self, peer: int, word: int) -> None:
        with self.operators:
            super().signal(peer, word)

    def wait(self, word: int) -> None:
        with self.operators:
            super().wait(word)

    def take(self, data: torch.Tensor, place: int) -> None:
        with self.operators:
            super().take(data, place)
