"""One training step of MindSpeed-LLM's model in a rank with an emulated NPU: its weights and gradients."""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import mindspeed_npu
import torch
import torch.distributed as dist
from mindspeed_npu import Finder
from oracle import relative_error
from ranks import Here

from tokenring.integrations.megatron.latents import SendsLatents

# Packages that MindSpeed-LLM imports for other things than a step, where they are not installed.
ELSEWHERE = (
    "transformers", "peft", "datasets", "apex", "safetensors", "acl", "fsdp_turbo", "mindio_ttp", "mindio_acp", "nltk",
    "cann_ops_transformer", "tensorboard", "wandb", "accelerate", "sentencepiece", "tiktoken", "huggingface_hub",
    "jieba", "tqdm", "modelscope", "diffusers", "torchvision", "bitsandbytes", "ml_dtypes", "custom_ops", "mindspore",
)  # fmt: skip
EOD = 3
Whole = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


class _AnyClass(type):
    """The class of classes in which everything is found."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{cls.__name__}.{name}")


class _Classes(ModuleType):
    """A module in which everything is found: classes, that others derive from, and functions."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = name[:1].isupper()
        made = _AnyClass(name, (), {"__module__": self.__name__}) if is_class else MagicMock(name=name)
        setattr(self, name, made)
        return made


class _Elsewhere(Finder):
    """Finds modules of ELSEWHERE."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Classes(spec.name)


ENDS = (9, 30, 32, 77, 128)  # of documents, in a sequence of 128 tokens


def start(here: Here, sources: list[str], flags: list[str], asked: bool) -> dict[str, Any]:
    """Import all with a script's flags, and read them: which attentions are there."""
    warnings.simplefilter("ignore")  # theirs
    os.environ |= {"RANK": str(here.rank), "WORLD_SIZE": str(here.world_size), "LOCAL_RANK": str(here.rank)}
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    sys.argv[1:] = flags + (["--context-parallel-attention", "tokenring"] if asked else [])
    sys.path[:0] = sources
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (its prints, as long as the process lives)
    mindspeed_npu.install(here)
    sys.meta_path.append(_Elsewhere(*ELSEWHERE))
    if asked:
        import_module("tokenring.integrations.mindspeed")
    else:  # the emulated one has no gradient of its own
        for name in ("npu_fusion_attention", "npu_fusion_attention_v2"):
            setattr(import_module("torch_npu"), name, plain_attention)
    import_module("mindspeed_llm.tasks.megatron_adaptor_v2")
    import_module("mcore.world").without_generators(import_module("megatron.core.tensor_parallel.random"))
    # It assigns to .data, which the emulated device does not follow.
    utils: Any = import_module("megatron.core.utils")
    utils._kernel_make_viewless_tensor = lambda x, requires_grad: x.clone()
    dist.broadcast, dist.all_reduce = _alone(dist.broadcast), _alone(dist.all_reduce)
    arguments = import_module("megatron.training.arguments")
    args = arguments.validate_args(arguments.parse_args())
    import_module("megatron.training.global_vars").set_args(args)
    state = import_module("megatron.core.parallel_state")
    make = dist.new_group
    dist.new_group = partial(_of_npus, make)  # the pool's world is of Gloo, where on NPUs it is of HCCL
    try:
        _stages_over_hccl(here)
        state.initialize_model_parallel(
            args.tensor_model_parallel_size, args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size, context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
        )  # fmt: skip
    finally:
        dist.new_group = make
    held = {
        "local": import_module("megatron.core.transformer.dot_product_attention").DotProductAttention,
        "engine": import_module("megatron.core.extensions.transformer_engine").TEDotProductAttention,
    }
    return {place: [each.__name__ for each in made.__mro__] for place, made in held.items()}


def _alone(call: Any) -> Any:
    """A collective that does nothing in a group of one rank, where HCCL's would change nothing either."""

    def wrapper(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        return None if group is not None and dist.get_world_size(group) == 1 else call(*args, group=group, **kwargs)

    return wrapper


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, *rest: Any,
    scale: float = 1.0, actual_seq_qlen: Any = None, sparse_mode: int = 0, atten_mask: Any = None,
    query_rope: Any = None, key_rope: Any = None, **more: Any,
) -> tuple[torch.Tensor, None, None]:  # fmt: skip
    """As npu_fusion_attention, differentiable: for one rank without context parallelism, causal or by a mask."""
    if query_rope is not None:
        query, key = torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1)
    given = [query, key, value]
    if input_layout == "SBH":
        dim = query.shape[2] // head_num
        given = [x.view(*x.shape[:2], -1, dim).permute(1, 2, 0, 3) for x in given]
    elif input_layout == "TND":
        given = [x.transpose(0, 1)[None] for x in given]
    q, k, v = (x.double() for x in given)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    at = torch.arange(q.shape[2])
    hidden = at[:, None] < at if sparse_mode else torch.zeros(len(at), len(at), dtype=torch.bool)
    if not sparse_mode and atten_mask is not None:
        hidden = atten_mask.cpu().bool()
    if actual_seq_qlen is not None:
        of = torch.bucketize(at, torch.as_tensor(actual_seq_qlen, dtype=torch.int64), right=True)
        hidden = hidden | (of[:, None] != of)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden.to(q.device), -torch.inf)
    out = (scores.softmax(-1) @ v).to(query.dtype)
    if input_layout == "SBH":
        return out.permute(2, 0, 1, 3).flatten(2), None, None
    return (out[0].transpose(0, 1) if input_layout == "TND" else out), None, None


def _of_npus(make: Any, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
    return make(*args, backend=backend or "hccl", **kwargs)


def _stages_over_hccl(here: Here) -> None:
    """Let stages of a pipeline send to each other over HCCL: two of them do so in the whole world's group, too."""
    dist.group = SimpleNamespace(WORLD=dist.new_group(list(range(here.world_size))))  # type: ignore[assignment, misc]
    schedules: Any = import_module("megatron.core.pipeline_parallel.schedules")
    schedules.torch = import_module("mcore.npu_steps").OnNpu()  # it counts tokens on the device


def batches(args: Any) -> list[dict[str, torch.Tensor]]:
    """Batches of whole sequences, one for each stage, as a data loader makes them."""
    random = torch.Generator().manual_seed(5)
    length, made = args.seq_length, []
    positions = torch.arange(length)[None]
    if args.reset_attention_mask and args.reset_position_ids:
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise((0, *ENDS))])[None]
    for _ in range(args.global_batch_size):
        tokens, labels = (
            torch.randint(EOD + 1, args.padded_vocab_size, (1, length), generator=random) for _ in range(2)
        )
        found = {"tokens": tokens, "labels": labels, "loss_mask": torch.ones(1, length), "position_ids": positions}
        made.append({**found, "actual_seq_len": torch.tensor(ENDS)} if args.reset_attention_mask else found)
    return made


def latent_layers(here: Here) -> int:
    """Return how many layers the model of the last step had whose latents travel."""
    found: int = here.memory["latent layers"]
    return found


def whole(here: Here) -> Whole:
    """Return the weights of the model of one rank, and their gradients in one step."""
    (model,) = _chunks()
    _step([model])
    named = dict(model.named_parameters())
    return {n: p.detach().cpu() for n, p in named.items()}, {n: p.grad.float().cpu() for n, p in named.items()}


def errors(here: Here, wanted: Whole) -> dict[str, float]:
    """Return the relative error of each gradient that this rank has, in a step from these weights."""
    gpt: Any = import_module("mcore.gpt")
    added_up = import_module("mcore.npu_steps").added_up
    weights, gradients = wanted
    chunks, found = _chunks(), {}
    here.memory["latent layers"] = sum(isinstance(each, SendsLatents) for model in chunks for each in model.modules())
    for model in chunks:
        gpt.take_weights(model, weights)
    _step(chunks)
    for model in chunks:
        for name, parameter in model.named_parameters():
            right = gpt.part_of(model, name, parameter, gradients)
            error = relative_error(added_up(name, parameter).float().cpu(), right)
            found[f"{name} of {model.decoder.layers[0].layer_number}"] = error
    return found


def _chunks() -> list[Any]:
    """Return the parts of the model that this rank has: one for each virtual stage of its pipeline."""
    args = import_module("megatron.training.global_vars").get_args()
    state: Any = import_module("megatron.core.parallel_state")
    pretrain: Any = import_module("pretrain_gpt")
    torch.manual_seed(1)
    moved, found = import_module("mcore.npu_steps").moved, []
    for stage in range(args.virtual_pipeline_model_parallel_size or 1):
        if args.virtual_pipeline_model_parallel_size:
            state.set_virtual_pipeline_model_parallel_rank(stage)
        first, last = state.is_pipeline_first_stage(), state.is_pipeline_last_stage()
        found.append(moved(pretrain.model_provider(first, last)))
    return found


def _step(chunks: list[Any]) -> None:
    """Make one step by Megatron's own schedule of microbatches."""
    args = import_module("megatron.training.global_vars").get_args()
    pretrain: Any = import_module("pretrain_gpt")

    def forward(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
        tokens, labels, loss_mask, attention_mask, positions = pretrain.get_batch(data)

        def share(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            # The schedule multiplies by the ranks of context parallelism, as if gradients were averaged over them.
            made = (losses.float() * loss_mask).sum().div(args.seq_length * args.context_parallel_size)
            return made, torch.tensor(1, dtype=torch.int).to("npu"), {}

        return model(tokens, positions, attention_mask, labels=labels), share

    run_schedule = import_module("mcore.npu_steps").run_schedule
    run_schedule(forward, chunks, lambda: iter(batches(args)), args.global_batch_size, args.seq_length)
