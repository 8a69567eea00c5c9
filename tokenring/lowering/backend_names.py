"""Transports and kernels by name, and what their classes say of themselves; imported only when asked for.

Only names are here: what they stand for is loaded, never started, when a schedule is to be lowered or measured for it.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, cast

from tokenring.errors import ConfigurationError
from tokenring.lowering.target import Target

TRANSPORTS = {
    "gloo": "tokenring.backends.transports.gloo:GlooTransport",
    "shm": "tokenring.backends.transports.shm:ShmTransport",
    "hccl": "tokenring.backends.transports.hccl:HcclTransport",
    "hccl/channel": "tokenring.backends.transports.hccl:HcclChannelTransport",
    "hccl/pair": "tokenring.backends.transports.hccl:HcclPairTransport",
    "hccl/batch": "tokenring.backends.transports.hccl_batches:HcclBatchTransport",
    "hccl/collectives": "tokenring.backends.transports.hccl_collectives:HcclCollectivesTransport",
    "cuda": "tokenring.backends.transports.auto_cuda:CudaTransport",
    "symm": "tokenring.backends.transports.symm:SymmTransport",
    "nccl": "tokenring.backends.transports.nccl:NcclTransport",
    "nvshmem": "tokenring.backends.transports.nvshmem:NvshmemTransport",
}
# Modes of a transport with fewer connections, most of them first.
BOUNDED = {"hccl": ("hccl/channel", "hccl/pair", "hccl/batch")}
KERNELS = {
    "cpu-flash": "tokenring.backends.kernels.cpu_flash:CpuFlash",
    "reference": "tokenring.backends.kernels.reference:Reference",
    "npu-fusion": "tokenring.backends.kernels.npu_fusion:NpuFusion",
    "torch-flash": "tokenring.backends.kernels.torch_cuda:TorchFlash",
    "torch-cudnn": "tokenring.backends.kernels.torch_cuda:TorchCudnn",
    "torch-efficient": "tokenring.backends.kernels.torch_cuda:TorchEfficient",
    "flash-attn": "tokenring.backends.kernels.flash_attn:FlashAttn2",
    "flash-attn-3": "tokenring.backends.kernels.flash_attn:FlashAttn3",
    "flash-attn-4": "tokenring.backends.kernels.flash_attn:FlashAttn4",
    "flex": "tokenring.backends.kernels.flex:Flex",
}
LINEAR_KERNELS = {"mc2": "tokenring.backends.fused.mc2:Mc2"}  # that take whole linear layers
PLANNED_WITH = "cpu-flash"  # the kernel whose cuts count where a schedule is measured without tensors at hand


def load(kind: str, name: str, known: dict[str, str]) -> Any:
    """Import the class that a transport or kernel name stands for. Raises ConfigurationError for an unknown name."""
    if name not in known:
        from tokenring.nearest import hint

        raise ConfigurationError(f"unknown {kind} {name!r}; choose one of auto, {', '.join(known)}{hint(name, known)}")
    module, _, attribute = known[name].partition(":")
    return getattr(import_module(module), attribute)


def transport_class(name: str) -> Any:
    """Return the class that makes the transport called `name`, from a group and a time limit."""
    return load("transport", name, TRANSPORTS)


def transport_target(name: str) -> Target:
    """Return what the transport called `name` can do, not starting it; with buffers as this environment asks for."""
    made = transport_class("gloo" if name == "auto" else name)
    return cast(Target, made.target_in(os.environ))


def bounded(name: str) -> dict[str, Target]:
    """Return the modes of a transport with fewer connections, most of them first, and what each can do."""
    return {mode: transport_target(mode) for mode in BOUNDED.get(name, ())}


def kernel_class(name: str) -> Any:
    """Return the class of the kernel called `name`; it need not work here to be asked which patches it takes."""
    return load("kernel", name, KERNELS)
