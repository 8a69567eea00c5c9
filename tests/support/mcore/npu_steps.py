"""Steps of Megatron-core under a stand-in for MindSpeed, on emulated NPUs, with all of Megatron's groups over HCCL.

The whole model's gradients come from another process, on a CPU and in float64 (`gpt.whole_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ascend import device, operators
from ascend.hccl_ledger import ledger
from ascend.hccl_ranks import fresh
from ascend.schemas import OFFERS
from mindspeed_like import BATCH, OURS, TE, LikeMindSpeed, put
from oracle import relative_error
from ranks import Here

from mcore.gpt import Data, Job, Whole, build, data_of, local_data, part_of, take_weights
from tokenring.integrations.megatron import TokenRingAttention

FLAGS = ("--context-parallel-attention", "tokenring", "--context-parallel-size", "2", "--tokenring-schedule", "ring")


class OnNpu:
    """torch, where zeros and numbers that are to lie on a GPU lie on the NPU."""

    def __init__(self, **more: Any) -> None:
        vars(self).update(more)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *sizes: Any, device: Any = None, **more: Any) -> torch.Tensor:
        return torch.zeros(*sizes, **more).to("npu" if device is not None else "cpu")

    def tensor(self, data: Any, device: Any = None, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return torch.tensor(data, **more)


class OverHccl(OnNpu):
    """torch.distributed, whose world is of HCCL."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def start(here: Here) -> None:
    """In a rank with Megatron loaded, once: NPUs, HCCL in all groups, and MindSpeed's patches with ours among them."""
    if "started" not in here.memory:
        here.memory["started"] = True
        _on_npus(here)
        _patch()


def _on_npus(here: Here) -> None:
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.pipeline_parallel import p2p_communication, schedules

    device.install(1)
    fresh(60.0)
    operators.register(next(iter(OFFERS)))
    torch.cuda.current_device = lambda: torch.device("npu", 0)  # type: ignore[assignment, return-value]
    npu = torch.get_device_module("npu")
    for name in ("Stream", "Event", "stream", "current_stream", "synchronize"):
        setattr(torch.cuda, name, getattr(npu, name))
    torch.Tensor.cuda = lambda self, *rest, **more: self.to("npu")  # type: ignore[method-assign]
    make: Any = dist.new_group

    def over_hccl(*given: Any, backend: str | None = None, **more: Any) -> Any:
        return make(*given, backend=backend or "hccl", **more)

    dist.new_group = over_hccl
    world = OverHccl(group=SimpleNamespace(WORLD=dist.new_group(list(range(here.world_size)))))
    utils.torch = rope_utils.torch = schedules.torch = OnNpu()
    p2p_communication.torch = OnNpu(distributed=world)
    utils._kernel_make_viewless_tensor = lambda x, requires_grad: x.clone()  # the device does not follow .data


def _patch() -> None:
    """MindSpeed's modules, as its stand-in has them, and those of Megatron-LM that Megatron-core lacks."""
    stands, patched = LikeMindSpeed("whole"), pytest.MonkeyPatch()
    for name, content in stands.modules().items():
        if name.startswith("mindspeed") or name in (BATCH, TE):
            put(patched, name, content)
    import_module(OURS)
    stands.import_adaptor(*FLAGS)


def errors_of_step(here: Here, job: Job, whole: Whole, schedules: list[str]) -> dict[str, tuple[float, list[str]]]:
    """Return the largest relative error of a gradient of this rank by schedule, and the classes of its attentions."""
    start(here)
    _, weights, wanted = whole
    chunks = _chunks(here, job)
    for each in chunks:
        take_weights(each, weights)
    attentions = [x for each in chunks for x in each.modules() if isinstance(x, TokenRingAttention)]
    found = {}
    for schedule in schedules:
        for x in attentions:
            x.schedule = schedule
        for each in chunks:
            each.zero_grad()
        _step(job, chunks)
        ledger.check_all_waited()
        errors = [max(_errors(each, wanted).values()) for each in chunks]
        found[schedule] = max(errors), [type(x).__name__ for x in attentions]
    return found


def _chunks(here: Here, job: Job) -> list[Any]:
    """The parts of the model that this rank has: one for each virtual pipeline stage."""
    return [moved(build(here, replace(job, stage=stage), job.layer_spec())) for stage in range(job.vpp)]


def moved(model: Any) -> Any:
    """The model on the NPU, whose parameters are other objects there: with what Megatron noted at those."""
    noted = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    for name, parameter in model.to("npu").named_parameters():
        vars(parameter).update(noted[name])
    return model


def _step(job: Job, chunks: list[Any]) -> None:
    """Megatron's own schedule of microbatches, one sequence each."""
    data = local_data(job, Data(*(x.to("npu") for x in data_of(job))))

    def parts() -> Iterator[Data]:
        return iter([Data(*(x[n : n + 1] for x in data)) for n in range(data.tokens.shape[0])])

    def forward_step(some: Iterator[Data], model: Any) -> tuple[torch.Tensor, Any]:
        part = next(some)
        positions = torch.arange(part.tokens.shape[1])[None].to("npu")

        def share(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            made = (losses * part.weights).sum()
            return made, torch.tensor(1, dtype=torch.int).to("npu"), made.detach()

        return model(part.tokens, positions, None, labels=part.targets), share

    run_schedule(forward_step, chunks, parts, data.tokens.shape[0], job.length)


def run_schedule(
    forward_step: Callable[[Any, Any], Any], chunks: list[Any], parts: Callable[[], Iterator[Any]], count: int,
    length: int,
) -> None:  # fmt: skip
    """Run Megatron's own schedule of so many microbatches. chunks: of the model; each takes all parts."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    many = len(chunks) > 1
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[parts() for _ in chunks] if many else parts(),
        model=chunks if many else chunks[0], num_microbatches=count, seq_length=length, micro_batch_size=1,
    )  # fmt: skip


def _errors(model: Any, wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the relative error of each parameter's gradient, once it is added up over the ranks that share it."""
    return {
        name: relative_error(added_up(name, parameter).cpu(), part_of(model, name, parameter, wanted))
        for name, parameter in model.named_parameters()
    }


def added_up(name: str, parameter: Any) -> torch.Tensor:
    """Return a gradient, added up over the ranks that have other tokens, or other heads of a norm that they share."""
    from megatron.core import parallel_state as state

    found: torch.Tensor = parameter.grad
    if getattr(parameter, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name:
        dist.all_reduce(found, group=state.get_tensor_model_parallel_group())
    apart = "local_experts" in name
    others = state.get_expert_data_parallel_group() if apart else state.get_data_parallel_group(True)
    dist.all_reduce(found, group=others)
    return found
