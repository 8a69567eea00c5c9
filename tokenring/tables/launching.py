"""The launches of a device's operators: seconds of each on the host, and how many a kernel call asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tokenring.errors import ConfigurationError


@dataclass(frozen=True)
class KernelLaunches:
    """The launches of a kernel call on operands that lie as it wants them.

    forward, backward: of the call, with what is around it. stand_in: more in backward, where delta has come and the
    output has not. Once in a backward pass: own_lse, own_delta, of what the owner prepares of its rows; each_shape, of
    the first call on so many rows.
    """

    forward: int
    backward: int
    stand_in: int
    own_lse: int
    own_delta: int
    each_shape: int


# Counted on the emulated NPU (tests/planner/test_launches.py). npu-fusion: log and add for lse; in backward eight
# copies of lse, and a product for an output with the right delta (`backends/kernels/npu_call.py`).
KERNELS: Mapping[str, KernelLaunches] = MappingProxyType({"npu-fusion": KernelLaunches(3, 2, 1, 2, 10, 1)})


@dataclass(frozen=True)
class Launching:
    """A host that launches operators one after another, while the device works off what was launched before.

    seconds: of the host for each launch, and for each message that it posts. kernel: by name, what computes.
    """

    seconds: float
    kernel: str

    def __post_init__(self) -> None:
        if not self.seconds >= 0 or self.kernel not in KERNELS:
            raise ConfigurationError(
                f"launches of {self.kernel!r}, {self.seconds} s each: give seconds that are not negative, and a kernel "
                f"whose launches are counted: {', '.join(KERNELS)}"
            )

    @property
    def of_kernel(self) -> KernelLaunches:
        """The launches of a kernel call."""
        return KERNELS[self.kernel]
