"""The machine that ranks compute with: a device's rates, measured before or published, and the cost of messages."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.ir.schedule_data import Pass
from tokenring.planner.machines.devices import DEVICES, DeviceFigures, device_figures
from tokenring.planner.machines.presets import PRESETS, find
from tokenring.tables.launching import Launching
from tokenring.tables.rates import Machine, Messages, Rates, Sample
from tokenring.topology.model.facts import PROCESS
from tokenring.topology.ranks import Topology

# How a flash kernel's rate grows with the length of its tile: shares of the rate at 16k tokens on A100, forward,
# head dim 128 (FlashAttention-2, arXiv:2307.08691, figure 4: 16k tokens in batches of sequences of this length).
RAMP = ((128, 0.4), (512, 0.75), (1024, 0.87), (2048, 0.94), (4096, 0.97), (16384, 1.0))
NPU_KERNEL = "npu-fusion"
ASSUMED_OPERATION_US = 10.0  # of a message, where nothing is known
COPY_SHARE = 0.8  # of the memory's published rate, assumed
CPU_FORWARD = ((32, 0.045), (64, 0.058), (128, 0.068), (1024, 0.075))  # one core of the machine of docs/measurements.md
CPU_BACKWARD = ((32, 0.03), (64, 0.04), (128, 0.05), (1024, 0.055))
CPU = Rates(
    "one core of an AMD EPYC, torch's CPU kernel in fp32 (taken for any CPU)", CPU_FORWARD, CPU_BACKWARD,
    call_seconds=25e-6, copy_gbs=8.0, op_seconds=10e-6,
)  # fmt: skip
CPU_MESSAGES = Messages(
    latency_seconds=30e-6, post_seconds=15e-6, pipelined=True, source="30 µs a message, of Gloo on one machine"
)  # fmt: skip
MODELS_OF = {  # what probes call a device's model → its figures; the first that the name contains
    "V100": "v100-sxm2", "A100": "a100-sxm", "A800": "a100-sxm", "H100": "h100-sxm", "H800": "h100-sxm",
    "H200": "h100-sxm", "L40S": "l40s", "L20": "l20", "RTX 4090": "rtx4090", "A10": "a10", "910B2": "910b2",
    "910B": "910b3", "910C": "910c-die", "910_93": "910c-die", "910A": "910a", "MI300X": "mi300x",
}  # fmt: skip


def device_rates(device: DeviceFigures, dtype: torch.dtype) -> Rates:
    """Return rates from published figures: peak × the share that a published measurement reaches × RAMP."""

    def samples(direction: Pass) -> tuple[Sample, ...]:
        whole = device.attention_tflops(dtype, direction)
        return tuple((side, whole * share) for side, share in RAMP)

    return Rates(
        f"published figures of {device.title}: peak × {device.forward.known():g} forward, "
        f"× {device.backward.known():g} backward, less for tiles below 16k tokens{_launches_text(device)}",
        samples("forward"),
        samples("backward"),
        device.kernel_us.known() * 1e-6,
        COPY_SHARE * device.memory_gbs.known(),
        device.operator_us.known() * 1e-6,
        launching=_launching(device),
    )


def _launching(device: DeviceFigures) -> Launching | None:
    """Return how such a device's host launches; None where launches are not counted."""
    if device.launch_us.value is None:
        return None
    return Launching(device.launch_us.known() * 1e-6, NPU_KERNEL)


def _launches_text(device: DeviceFigures) -> str:
    """Return what is said of launches where they are counted."""
    if device.launch_us.value is None:
        return ""
    known = "assumed" if device.launch_us.grade == "assumed" else "published"
    return f"; each launch {device.launch_us.value:g} µs of the host, {known}"


def messages_of(operation_us: float | None) -> Messages:
    """Return the cost of messages.

    operation_us: of a message beside its bytes, as published; None: what is assumed where nothing is known.
    """
    if operation_us is None:
        return replace(messages_of(ASSUMED_OPERATION_US), source=f"{ASSUMED_OPERATION_US:g} µs a message, assumed")
    return Messages(operation_us * 1e-6, 2e-6, source=f"{operation_us:g} µs a message, published")


def machine_of_preset(name: str, dtype: torch.dtype, or_half: bool = False) -> Machine:
    """Return the machine that a preset's ranks compute with.

    or_half: in fp16, whose blocks are as large as bf16's, where the device does not have the dtype. Raises
    UnsupportedError where it has neither, ConfigurationError for an unknown name.
    """
    found, _ = find(name)
    device, messages = device_figures(found.device), messages_of(found.operation_us.known())
    try:
        rates = device_rates(device, dtype)
    except UnsupportedError:
        if not or_half:
            raise
        rates = device_rates(device, torch.float16)
    return _accelerator(device, rates, messages)


def machine_of_device(name: str, dtype: torch.dtype) -> Machine:
    """Return the machine that ranks on such accelerators compute with, by their figures' name.

    A message costs what it does on a preset of these, or what is assumed.
    Raises ConfigurationError for an unknown name, UnsupportedError where there is no figure in this dtype.
    """
    device = device_figures(name)
    same = next((each for each in PRESETS.values() if each.device == device.name), None)
    operation_us = None if same is None else same.operation_us.known()
    return _accelerator(device, device_rates(device, dtype), messages_of(operation_us))


def machine_of_topology(topology: Topology, dtype: torch.dtype) -> Machine:
    """Return the machine by the model of the topology's accelerators; a CPU's where there are none.

    Raises ConfigurationError where there are no figures of the model.
    """
    models = models_of(topology)
    named = [model for model in models if model]
    if all(model == PROCESS for model in models):
        return Machine(CPU, CPU_MESSAGES, kernel="cpu-flash")
    model = named[0] if named else "accelerators of an unknown model"
    name = next((figures for word, figures in MODELS_OF.items() if word in model.upper()), None)
    if name is None:
        raise ConfigurationError(
            f"no compute figures of {model!r}: name the device, as in --device {next(iter(DEVICES))}, "
            f"--rates FILE (of `tokenring rates`) or --tflops N"
        )
    return machine_of_device(name, dtype)


def models_of(topology: Topology) -> list[str | None]:
    """Return of each accelerator the model by which its figures are found; PROCESS for what CPU processes measured."""
    return [] if topology.graph is None else [each.model or each.arch for each in topology.graph.accelerators]


def _accelerator(device: DeviceFigures, rates: Rates, messages: Messages) -> Machine:
    """Return the machine with the transport and the kernel of such devices, where they have one for them alone."""
    ascend = device.name.startswith(("910", "950"))
    transport, kernel = ("hccl", NPU_KERNEL) if ascend else (None, None)
    return Machine(rates, messages, transport=transport, kernel=kernel)
