"""What tests run on ranks that have Megatron-core loaded (`world.load`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from oracle import relative_error
from ranks import Here
from said import said

from mcore.gpt import (
    Data,
    Job,
    build,
    build_whole,
    data_of,
    gradient_errors,
    local_data,
    loss_of,
    sum_gradients,
    take_weights,
    whole_gradients,
)
from tokenring.errors import ConfigurationError
from tokenring.integrations.megatron import contexts, use_tokenring
from tokenring.integrations.megatron.contexts import contexts_of

LEARNING_RATE = 1e-3


def attentions(model: Any) -> list[Any]:
    return [layer.self_attention.core_attention for layer in model.decoder.layers]


def unshared(here: Here) -> dict[str, float]:
    """Options that nobody else has: layers with these share nothing with those of models made before."""
    here.memory["made"] = here.memory.get("made", 0) + 1
    return {"timeout_seconds": 20 + here.memory["made"] / 1000}


def cut_by_megatron(here: Here, job: Job) -> tuple[list[int], list[int], bool]:
    """The positions of the batch and of the rotary embedding that this rank gets, and whether that one is Megatron's.

    Positions are taken for tokens; the first angle of rotary embeddings is the position itself.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    embedding = build(here, job).rotary_pos_emb
    whole = torch.arange(job.length).expand(job.batch, -1)
    cut = local_data(job, Data(whole, whole, torch.ones(whole.shape)))
    assert torch.equal(cut.tokens, cut.targets) and cut.weights.shape == cut.tokens.shape
    return cut.tokens[0].tolist(), embedding(job.length)[:, 0, 0, 0].tolist(), type(embedding) is RotaryEmbedding


def worst_errors(here: Here, job: Job, schedules: list[str], layout: str | None = None) -> dict[str, float]:
    """Of each schedule the largest relative error of a parameter's gradient on this rank, against float64.

    layout: a wrong one for our attention to take.
    """
    data = data_of(job)
    loss, weights, wanted = whole_gradients(here, job)
    model = build(here, job, **({} if layout is None else unshared(here)))
    take_weights(model, weights)
    mine, found = local_data(job, data), {}
    for schedule in schedules:
        for each in attentions(model):
            each.schedule = schedule
            if layout is not None:
                contexts_of(each.group, each.options).context(schedule).layout = layout
        model.zero_grad()
        share = loss_of(job, model, mine)
        torch.autograd.backward(share)
        sum_gradients(model.parameters())
        total = _sum_of_shares(share)
        assert math.isclose(total, loss, rel_tol=1e-3), (total, loss)  # a coarse check: gradients tell the rest
        found[schedule] = max(gradient_errors(model, wanted).values())
    return found


def difference_of_latents(here: Here, job: Job, schedule: str) -> float:
    """The largest relative difference of a parameter's gradient between a model whose latents travel and one's not.

    Both on the same split: Megatron itself sums no gradient of what keys end with over tensor-parallel ranks.
    """
    _, weights, _ = whole_gradients(here, job)
    grads: list[dict[str, torch.Tensor]] = []
    with under_sequence_parallelism():
        for travels in (True, False):
            model = build(here, replace(job, travels=travels))
            take_weights(model, weights)
            for each in attentions(model):
                each.schedule = schedule
            torch.autograd.backward(loss_of(job, model, local_data(job, data_of(job))))
            sum_gradients(model.parameters())
            grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    return max(relative_error(grads[0][name].double(), grads[1][name].double()) for name in grads[1])


@contextmanager
def under_sequence_parallelism() -> Iterator[None]:
    """Megatron's torch norm in these models, which it refuses, as somebody must sum its gradients; no generators."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm as Norm

    tracker = tensor_parallel.get_cuda_rng_tracker
    tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)

    def made(cls: type[Any], config: Any, *rest: Any, **more: Any) -> Any:
        was, config.sequence_parallel = config.sequence_parallel, False
        try:
            return own(cls, config, *rest, **more)
        finally:
            config.sequence_parallel = was

    own: Any = Norm.__new__
    Norm.__new__ = made
    try:
        yield
    finally:
        Norm.__new__, tensor_parallel.get_cuda_rng_tracker = own, tracker


def travels_or_not(here: Here, job: Job, travels: bool) -> tuple[dict[str, float], list[str], int]:
    """Errors and words of a model under "auto" whose plans say that latents pay, or not; and forward's bytes."""
    with said() as messages:
        model = build(here, job, transport="gloo", **unshared(here))
        shared: Any = contexts
        before, shared.latents_pay = shared.latents_pay, lambda cp, request: travels
        try:
            _, weights, wanted = whole_gradients(here, job)
            take_weights(model, weights)
            share = loss_of(job, model, local_data(job, data_of(job)))
            sent = sum(_sent(attentions(model)[0]).values())
            torch.autograd.backward(share)
            sum_gradients(model.parameters())
        finally:
            shared.latents_pay = before
    return gradient_errors(model, wanted), messages, sent


def _sum_of_shares(share: torch.Tensor) -> float:
    from megatron.core import parallel_state as state

    total = share.detach().clone()
    dist.all_reduce(total, group=state.get_data_parallel_group(with_context_parallel=True))
    return total.item()


def kept_sinks(here: Here, job: Job) -> bool:
    """Tell whether plain and distributed checkpoints hold the sinks of every layer, these along their heads."""
    from megatron.core import parallel_state as state

    layers = attentions(build(here, job))
    groups = {"dp_cp_group": state.get_data_parallel_group(with_context_parallel=True)}
    made = [each.sharded_state_dict("it.", (), groups) for each in layers]
    with torch.no_grad():
        layers[0].load_state_dict({"softmax_offset": torch.arange(job.heads), "_extra_state": None})
    return (
        all(list(each) == ["it.softmax_offset"] for each in made)
        and all(each["it.softmax_offset"].global_shape == (job.heads,) for each in made)
        and torch.equal(layers[0].softmax_offset.detach(), torch.arange(job.heads).to(layers[0].softmax_offset))
        and bool(layers[1].softmax_offset.std() > 0)  # as the config initialises it
    )


def train(
    here: Here, job: Job, steps: int, whole_attention: bool = False, learning_rate: float = LEARNING_RATE
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each Adam step; NaN for the loss where this rank has no last pipeline stage."""
    from megatron.core import parallel_state as state

    _, weights, _ = whole_gradients(here, job)
    model = build_whole(here, job) if whole_attention else build(here, job)
    take_weights(model, weights)
    masters = [main_gradient(parameter) for parameter in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=learning_rate)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        shares = forward_backward(job, model, local_data(job, data_of(job, step)))
        loss = _sum_of_shares(sum(shares, torch.tensor(0.0))) if state.is_pipeline_last_stage() else math.nan
        sum_gradients(masters)
        history.append((loss, _gradient_norm(model, masters)))
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
    return history


def main_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """A copy in float32 that gets the parameter's gradients added up, as Megatron keeps one for half precision."""
    master = parameter.detach().float().clone().requires_grad_()

    def collect(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        found = parameter.grad.float()
        master.grad = found if master.grad is None else master.grad + found
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
    return master


LossOf = Callable[[torch.Tensor, Data], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def share_of_loss(losses: torch.Tensor, part: Data) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This microbatch's share of the mean loss, as tokens one, and what is handed back of it."""
    share = (losses.double() * part.weights).sum()
    return share, torch.tensor(1, dtype=torch.int), share.detach()


def forward_backward(job: Job, model: Any, data: Data, loss_of_part: LossOf = share_of_loss) -> list[torch.Tensor]:
    """A step by Megatron's own schedule of microbatches, of one sequence each; what the losses hand back."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(parts: Iterator[Data], model: Any) -> tuple[torch.Tensor, Any]:
        part = next(parts)
        positions = torch.arange(part.tokens.shape[1])[None]
        return model(part.tokens, positions, None, labels=part.targets), lambda losses: loss_of_part(losses, part)

    count = data.tokens.shape[0]
    handed: list[torch.Tensor] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([Data(*(x[[n]] for x in data)) for n in range(count)]),
        model=model,
        num_microbatches=count,
        seq_length=job.length,
        micro_batch_size=1,
    )
    return handed


def _gradient_norm(model: Any, masters: list[torch.Tensor]) -> float:
    """Over all tensor and pipeline parallel ranks; what tensor parallel ranks have alike counts once."""
    from megatron.core import parallel_state as state

    first = state.get_tensor_model_parallel_rank() == 0
    counted = zip(model.parameters(), masters, strict=True)
    grads = [master.grad for p, master in counted if first or getattr(p, "tensor_model_parallel", False)]
    total = torch.stack([grad.double().square().sum() for grad in grads if grad is not None]).sum()
    dist.all_reduce(total, group=state.get_model_parallel_group())
    return math.sqrt(total.item())


def bytes_of_layers(here: Here, job: Job) -> list[dict[int, int]]:
    """Of each layer's forward attention, the bytes that this rank sends to each other one."""
    model = build(here, job, transport="gloo")
    found: list[dict[int, int]] = []
    for each in attentions(model):
        each.register_forward_pre_hook(lambda module, args: found.append(_negative(_sent(module))))
        each.register_forward_hook(lambda module, args, out: found.append(_sent(module)))
    with torch.no_grad():
        loss_of(job, model, local_data(job, data_of(job)))
    pairs = zip(found[::2], found[1::2], strict=True)
    return [{to: after.get(to, 0) + before.get(to, 0) for to in after} for before, after in pairs]


def _sent(module: Any) -> dict[int, int]:
    contexts = contexts_of(module.group, module.options)
    transport: Any = contexts.context(module.schedule).transport_for(torch.device("cpu"))
    return dict(transport.sent_bytes)


def _negative(counts: dict[int, int]) -> dict[int, int]:
    return {to: -count for to, count in counts.items()}


def names_in_state(here: Here, job: Job) -> tuple[list[str], list[str]]:
    """Of a model with our attention, and of one with another that has none."""
    return list(build(here, job).state_dict()), list(build_whole(here, job).state_dict())


def loads_strictly(here: Here, job: Job) -> str:
    """With what TransformerEngine's attention leaves in a checkpoint."""
    model = build(here, job)
    state = model.state_dict() | {"decoder.layers.0.self_attention.core_attention._extra_state": torch.zeros(1)}
    return str(model.load_state_dict(state, strict=True))


def logged(here: Here, job: Job) -> list[str]:
    """What two steps say."""
    with said() as messages:
        model = build(here, job, schedule="auto:ring,ulysses", **unshared(here))
        for _ in range(2):
            loss_of(job, model, local_data(job, data_of(job)))
    return messages


def shared_contexts(here: Here, job: Job) -> tuple[int, int]:
    """How many ContextParallels and how many transports two models of one group have, after a step."""
    options = unshared(here)
    models = [build(here, job, **options), build(here, replace(job, layers=3), **options)]
    for model in models:
        loss_of(job, model, local_data(job, data_of(job)))
    shared = {id(contexts_of(each.group, each.options)): each for model in models for each in attentions(model)}
    made = [cp for each in shared.values() for cp in contexts_of(each.group, each.options)._by_schedule.values()]
    return len(made), len({id(cp.transport_for(torch.device("cpu"))) for cp in made})


def specs(here: Here) -> tuple[str, str, list[str], dict[str, Any]]:
    """core_attention of a layer spec after it was given, of what came back, of a block spec, and its params."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    def core(spec: Any) -> Any:
        return spec.submodules.self_attention.submodules.core_attention

    given = get_gpt_layer_local_spec()
    layer = use_tokenring(given, "usp/2", timeout_seconds=30)
    block = use_tokenring(TransformerBlockSubmodules(layer_specs=[given, given]))
    names = [core(each).module.__name__ for each in block.layer_specs]
    return core(given).__name__, core(layer).module.__name__, names, core(layer).params


def refused_spec(here: Here) -> str:
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    try:
        use_tokenring(ModuleSpec(module=MLP))
    except ConfigurationError as error:
        return str(error)
    return "not refused"


def latent_specs(here: Here) -> tuple[str, bool, str]:
    """The class of a layer whose latents travel; whether a second change keeps it; the refusal of one without any."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    def layer_of(spec: Any) -> Any:
        return spec.submodules.self_attention.module

    made = use_tokenring(Job(latent=True).layer_spec(), latents=True)
    try:
        use_tokenring(get_gpt_layer_local_spec(), latents=True)
    except ConfigurationError as error:
        return layer_of(made).__name__, layer_of(use_tokenring(made, latents=True)) is layer_of(made), str(error)
    return "", False, "not refused"


def plans_of_a_step(here: Here, job: Job) -> int:
    """How often ranks planned in forward and backward."""
    model = build(here, job, **unshared(here))
    loss_of(job, model, local_data(job, data_of(job))).backward()  # type: ignore[no-untyped-call]
    first = attentions(model)[0]
    return len(contexts_of(first.group, first.options).context(first.schedule)._agreed)
