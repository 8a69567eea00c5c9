"""Probes, which run in a process of their own: `main(NAME)` prints one line for each part, as soon as it knows.

If a part fails, only the later parts that need it are left out; each failure is printed with its error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tokenring.cli.doctor.ask import MARK
from tokenring.errors import one_line

OPERATORS = (
    "npu_fusion_attention", "npu_fusion_attention_grad", "npu_fusion_attention_v2", "npu_fusion_attention_grad_v2",
    "npu_attention_update", "npu_ring_attention_update", "npu_fused_infer_attention_score",
    "npu_all_gather_base_mm", "npu_mm_reduce_scatter_base",
)  # fmt: skip
HEAD_DIM, SIDE = 128, 4096  # of the call that kernels are asked about


def main(probe: str) -> None:
    """Run one of PROBES. Output of the imported packages goes elsewhere than our lines, which are whole."""
    for part, function in PROBES[probe]:
        try:
            _say(part, True, function())
        except BaseException as error:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            _say(part, False, text[-8000:])
            if part.startswith("import"):
                break
    # A vendor's package may end badly: what was said is said.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _say(part: str, well: bool, value: Any) -> None:
    sys.stdout.flush()
    os.write(1, f"\n{MARK}{json.dumps([part, well, value])}\n".encode())


# ---------- parts


def _torch() -> str:
    import torch

    return str(torch.__version__)


def _torch_npu() -> str | None:
    import torch_npu  # type: ignore[import-not-found,unused-ignore]

    return getattr(torch_npu, "__version__", None)


def _accelerators(kinds: tuple[str, ...]) -> Callable[[], list[dict[str, Any]]]:
    def found() -> list[dict[str, Any]]:
        from tokenring.backends.devices import has_device

        return [_devices(kind) for kind in kinds if has_device(kind)]

    return found


def _devices(kind: str) -> dict[str, Any]:
    import torch

    module = getattr(torch, kind)
    count = int(module.device_count()) if hasattr(module, "device_count") else 1
    named = [_attempt(lambda i=i: str(module.get_device_name(i))) or kind for i in range(count)]  # type: ignore[misc]
    memory = [_attempt(lambda i=i: int(module.get_device_properties(i).total_memory)) for i in range(count)]  # type: ignore[misc]
    return {"type": kind, "names": named, "memory_bytes": memory}


def _attempt(function: Callable[[], Any]) -> Any:
    """Return what the function returns; None if the device cannot answer."""
    try:
        return function()
    except Exception:
        return None


def _transfer() -> bool:
    """Tell whether torch.cuda stands for torch.npu: a tensor made "on cuda" has the device that it is really on."""
    import torch

    if "torch_npu.contrib.transfer_to_npu" in sys.modules:
        return True
    made = _attempt(lambda: torch.empty(0, device="cuda").device.type)
    return made not in (None, "cuda")


def _operators() -> list[dict[str, Any]]:
    """Return each operator with its arguments, from its schema; None where there is none."""
    import torch

    found = []
    for name in OPERATORS:
        packet = getattr(torch.ops.npu, name, None)
        overload = getattr(packet, "default", None)
        arguments = None if overload is None else [each.name for each in overload._schema.arguments]
        found.append({"name": name, "arguments": arguments})
    return found


def _choices(kinds: tuple[str, ...]) -> Callable[[], list[dict[str, Any]]]:
    def found() -> list[dict[str, Any]]:
        from tokenring.backends.devices import has_device

        return [_choice(kind) for kind in kinds if has_device(kind)]

    return found


def _choice(kind: str) -> dict[str, Any]:
    """Return what the registry takes for tensors of a kind, and why not the others."""
    import torch

    from tokenring.backends import registry

    name, why = registry.transport_for(kind)
    device = torch.device(kind)
    kernel, others = _kernels(device)
    others += [{"name": each, "why": text} for each, text in registry.other_transports(kind).items()]
    transport = None if name is None else {"name": name, "why": why}
    if name is None:
        others.insert(0, {"name": "transport", "why": why})
    measured = [{"name": each, "why": text} for each, text in registry.measured_transports(kind)]
    found = {"device": kind, "transport": transport, "kernel": kernel, "others": others, "merge": _merge(device)}
    return {**found, "measured": measured}


def _elsewhere() -> list[dict[str, str]]:
    """Return each transport for CUDA tensors where there are no CUDA devices, with all that it lacks."""
    from tokenring.backends.devices import has_device
    from tokenring.backends.transports.auto_cuda import unavailable

    if has_device("cuda"):  # then they are among its choices
        return []
    found = []
    for name, why in unavailable().items():
        lacks = dict.fromkeys(each for each in (why, NO_CUDA) if each)
        found.append({"name": name, "why": f"moves CUDA tensors; {'; '.join(lacks)}"})
    return found


def _merge(device: Any) -> dict[str, str]:
    """Return the merger of partial results there, and why none that is faster serves."""
    from tokenring.backends.merging.choice import choose_merger

    try:
        made = choose_merger(device, HEAD_DIM)
    except Exception as error:
        return {"name": "none", "why": one_line(error)}
    return {"name": made.merger.name, "why": "; ".join([made.why, *(f"no {name}: {why}" for name, why in made.others)])}


def _kernels(device: Any) -> tuple[dict[str, str] | None, list[dict[str, str]]]:
    """Return the kernel that "auto" takes, and a reason for each other one."""
    from tokenring.backends import registry
    from tokenring.lowering.backend_names import KERNELS

    others, places, faults = [], dict[str, str](), dict[str, str]()
    try:
        auto = registry.make_kernel("auto", device)
        places, faults = _places(auto, device.type), getattr(auto, "faults", dict)()
    except Exception as error:
        others.append({"name": "auto", "why": one_line(error)})
    taken = next(iter(places), None)
    for each in KERNELS:
        if each == taken:
            continue
        if (home := registry.HOMES.get(each, device.type)) != device.type:
            others.append({"name": each, "why": f"for {home.upper()} tensors"})
            continue
        try:
            registry.make_kernel(each, device)
            place = f"{places[each]}; " if each in places else ""
            why = faults.get(each) or f"{place}available by name: ContextParallel(kernel={each!r})"
            others.append({"name": each, "why": why})
        except Exception as error:
            others.append({"name": each, "why": one_line(error)})
    if taken is None:
        return None, others
    why = "; ".join(each for each in (places[taken], faults.get(taken)) if each)  # it may be right in one pass only
    return {"name": taken, "why": why}, others


def _places(made: Any, kind: str) -> dict[str, str]:
    """Return kernels in the order in which a bf16 tile goes to them, each with the reason for its place."""
    import torch

    picks = getattr(made, "tried_picks", None)
    if picks is None:
        reason = made.supports(HEAD_DIM, torch.bfloat16)
        return {made.name: reason or f"the fastest here for {kind} tensors"}
    picks("backward", SIDE, HEAD_DIM, torch.bfloat16)  # what it finds out is told of others
    found = picks("forward", SIDE, HEAD_DIM, torch.bfloat16)
    tile = f"for a bf16 tile of {SIDE} × {SIDE}, head dim {HEAD_DIM}"
    return {pick.name: f"{pick.why}, {tile}" if at == 0 else pick.why for at, pick in enumerate(found)}


NO_CUDA = "torch sees no CUDA device here"  # as the transports say it
OTHERS = ("cuda", "xpu", "mps")
PROBES: dict[str, tuple[tuple[str, Callable[[], Any]], ...]] = {
    # without torch_npu, unless somebody else imports it
    "torch": (
        ("import torch", _torch),
        ("transfer", _transfer),
        ("accelerators", _accelerators(OTHERS)),
        ("choices", _choices(("cpu", *OTHERS))),
        ("elsewhere", _elsewhere),
    ),
    # as a user's program begins
    "autoload": (("import torch", _torch),),
    "torch_npu": (
        ("import torch", _torch),
        ("import torch_npu", _torch_npu),
        ("operators", _operators),
        ("transfer", _transfer),
        ("accelerators", _accelerators(("npu",))),
        ("choices", _choices(("npu",))),
    ),
}
