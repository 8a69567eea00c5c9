"""What tests of Megatron's column and row linears by our schedules run on ranks that have Megatron-core loaded."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from ranks import Here

from mcore import runs
from mcore.gpt import Job, build, data_of, local_data, loss_of, part_of, sum_gradients, take_weights, whole_gradients
from mcore.world import parallel
from tokenring.errors import TokenRingError
from tokenring.integrations.megatron import linears, release_contexts, use_tokenring_linears
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.sequence.workload import Workload

NAMES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
Sent = dict[str, dict[Pass, dict[int, int]]]


def layers_of(model: Any) -> dict[str, Any]:
    """Our layers of the model's first layer, by their names there."""
    first = model.decoder.layers[0]
    parts = (first.self_attention, first.mlp)
    return {name: getattr(part, name) for part in parts for name in NAMES if hasattr(part, name)}


def worst_error(here: Here, job: Job, alone: bool = False) -> float:
    """The largest relative error of a parameter's gradient on this rank, against float64.

    alone: a mutant whose ranks keep their own part of a column layer's dx.
    """
    mutant = staticmethod(lambda ctx, dx: (dx, None))
    with mock.patch.object(linears._Copied, "backward", mutant) if alone else nullcontext():
        return runs.worst_errors(here, job, ["ring"])["ring"]


def bytes_and_plans(here: Here, job: Job) -> tuple[Sent, Sent]:
    """What this rank sends in each pass of the first layer's linears, counted by the transport, and what plans say."""
    model = build(here, job, **runs.unshared(here))
    layers, counted = layers_of(model), {name: dict[Pass, dict[int, int]]() for name in NAMES}
    last: dict[str, Any] = {}

    def sent(layer: Any) -> dict[int, int]:
        transport = layer._parallels.parallel._base.transport_for(torch.device("cpu"))
        return dict(transport.sent_bytes)

    def before(name: str) -> Any:
        def hook(module: Any, *_: Any) -> None:
            last[name] = sent(module)

        return hook

    def after(name: str, direction: Pass) -> Any:
        def hook(module: Any, *_: Any) -> None:
            now = sent(module)
            counted[name][direction] = {to: now[to] - last[name].get(to, 0) for to in now if now[to]}

        return hook

    for name, layer in layers.items():
        assert isinstance(layer, linears.SplitLinear) and isinstance(layer, torch.nn.Module), name
        layer.register_forward_pre_hook(before(name))
        layer.register_forward_hook(after(name, "forward"))
        layer.register_full_backward_pre_hook(before(name))
        layer.register_full_backward_hook(after(name, "backward"))
    torch.autograd.backward(loss_of(job, model, local_data(job, data_of(job))))
    return counted, {name: planned(job, name, layer) for name, layer in layers.items()}


def planned(job: Job, name: str, layer: Any) -> dict[Pass, dict[int, int]]:
    tp = layer._parallels.parallel
    operator = "row" if name in ("linear_proj", "linear_fc2") else "column"
    n, h = layer.weight.shape if operator == "column" else reversed(layer.weight.shape)
    tokens = job.batch * job.length // job.cp
    schedule = tp.plan(operator, tokens, n * tp.world_size, h, job.dtype)
    size = Workload(1, tokens, n * tp.world_size, 1, 1, h, job.dtype)
    links: dict[Pass, dict[tuple[int, int], int]] = {each: schedule.link_bytes(size, each) for each in PASSES}
    return {
        each: {to: count for (rank, to), count in found.items() if rank == tp.rank and count}
        for each, found in links.items()
    }


def fused(here: Here, job: Job) -> dict[str, tuple[float, bool, bool]]:
    """Of each linear of the first layer with gradient_accumulation_fusion, after two backward passes of one batch.

    The error of main_grad against twice the whole gradient in float64, whether it says that it was added to, and
    whether what autograd got is zeros.
    """
    _, weights, wanted = whole_gradients(here, job)
    model = build(here, job)
    take_weights(model, weights)
    layers = layers_of(model)
    for layer in layers.values():
        layer.gradient_accumulation_fusion = True
        layer.weight.main_grad = torch.zeros(layer.weight.shape, dtype=torch.float32)
        layer.weight.grad_added_to_main_grad = False
    for _ in range(2):
        torch.autograd.backward(loss_of(job, model, local_data(job, data_of(job))))
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for name, layer in layers.items():
        weight = layer.weight
        added, zeros = weight.grad_added_to_main_grad, not weight.grad.any()
        weight.grad = weight.main_grad
        sum_gradients([weight])
        want = 2 * part_of(model, named[id(weight)], weight, wanted)
        found[name] = (float((weight.grad.double() - want).norm() / want.norm()), added, bool(zeros))
    return found


def refusals(here: Here) -> dict[str, str]:
    """What specs and layers refuse, by what was wrong."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    parallel(here, tp=2)
    spec = get_gpt_layer_local_spec()
    theirs = get_gpt_layer_local_spec()
    theirs.submodules.mlp.submodules.linear_fc1 = type("TELayerNormColumnParallelLinear", (), {})
    ours = use_tokenring_linears(spec).submodules.mlp.submodules
    whole = use_tokenring_linears(spec, kernel="mc2").submodules.mlp.submodules
    config = Job(tp=2).config()
    column = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True}
    row = column | {"input_is_parallel": True}
    half, graphs, gathered = (Job(tp=2).config() for _ in range(3))
    half.fp16, graphs.enable_cuda_graph, gathered.sequence_parallel = True, True, False
    calls: dict[str, Any] = {
        "no linears": lambda: use_tokenring_linears(ModuleSpec(module=MLP)),
        "TransformerEngine": lambda: use_tokenring_linears(theirs),
        "schedule": lambda: use_tokenring_linears(spec, "ring"),
        "several": lambda: use_tokenring_linears(spec, "auto:direct-q"),
        "option": lambda: use_tokenring_linears(spec, stays="tokens"),
        "kernel": lambda: whole.linear_fc1(64, 64, **column | {"config": gathered}),
        "gather_output": lambda: ours.linear_fc1(64, 64, **column, gather_output=True),
        "disable_grad_reduce": lambda: ours.linear_fc1(64, 64, **column, disable_grad_reduce=True),
        "input_is_parallel": lambda: ours.linear_fc2(64, 64, **row | {"input_is_parallel": False}),
        "fp16": lambda: ours.linear_fc1(64, 64, **column | {"config": half}),
        "graphs": lambda: ours.linear_fc1(64, 64, **column | {"config": graphs}),
        "nothing": lambda: ours.linear_fc1(64, 64, **column),
    }
    return {name: refusal_of(call) for name, call in calls.items()}


def refusal_of(call: Any) -> str:
    try:
        call()
    except TokenRingError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def one_refuses(here: Here, job: Job) -> dict[str, str]:
    """What each rank hears where rank 1 alone gives something wrong to a layer."""
    model = build(here, job)
    layers, wrong = layers_of(model), here.rank == 1
    x = torch.randn(job.length // job.cp // 2, 1, job.heads * job.head_dim)
    odd = torch.randn(3 if wrong else 4, 1, layers["linear_proj"].weight.shape[1])
    fsdp = layers["linear_fc1"]
    calls: dict[str, Any] = {
        "width": lambda: layers["linear_qkv"](x[..., :-1] if wrong else x),
        "length": lambda: layers["linear_proj"](odd),
        "gather": lambda: layers["linear_qkv"](x, runtime_gather_output=wrong),
        "dtype": lambda: fsdp(x.double() if wrong else x),
        "right": lambda: layers["linear_qkv"](x),
    }
    found = {name: refusal_of(call) for name, call in calls.items()}
    heard = "Disagreement"
    return {name: heard if text.startswith(heard) and "rank 1" in text else text for name, text in found.items()}


def shared(here: Here, job: Job) -> tuple[int, bool, float]:
    """How many TensorParallels the layers of a model have, whether releasing closes it, and the error after that."""
    model = build(here, job)
    made = [layer._parallels.parallel for layer in model.modules() if isinstance(layer, linears.SplitLinear)]
    release_contexts(made[0].group)
    return len(set(map(id, made))), made[0]._closed, worst_error(here, job)
