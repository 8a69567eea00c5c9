"""Names of HCCL's communicators, by which fused operators find them: ProcessGroupHCCL.get_hccl_comm_name.

Ascend/pytorch 9e73e708: the method in torch_npu/csrc/distributed/Init.cpp:382-389, which makes the communicator unless
it is told not to (init_comm=False gives ""), and ProcessGroupHCCL::getHcclCommName in ProcessGroupHCCL.cpp:3675-3725.
That compares the rank with the current device, modulo the number of devices, and warns: here it is refused. The
communicator is that of the current device: the group has one for each (devHCCLCommMap_, by getKeyFromDevices).
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from ascend import module
from ascend.hccl_ledger import HcclError

named: WeakValueDictionary[str, Any] = WeakValueDictionary()  # groups by the names of their communicators


class Named:
    """The part of an emulated group that says what its communicator is called."""

    def _get_backend(self: Any, device: torch.device) -> Any:
        """Torch's way to the group for a kind of device."""
        if torch.device(device).type != "npu":
            raise RuntimeError(f"No backend type associated with device type {device}")
        return self

    def get_hccl_comm_name(self: Any, rank: int, init_comm: bool = True) -> str:
        """The name on every rank, once all have met to make the communicator. rank: in the world."""
        if rank < 0:
            raise HcclError(f"Invalid rank {rank}")
        if rank % module.device_count() != module.current_device():
            raise HcclError(f"The indexFromRank {rank} is not equal indexFromCurDevice {module.current_device()}")
        if not self._met and not init_comm:
            return ""
        self._meet("get_hccl_comm_name")
        self.named_on = module.current_device()
        name = f"emulated%{self.group_id}"
        named[name] = self
        return name
