"""GPT models of Megatron-core, split and whole, with the same weights; and where their gradients differ."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from oracle import relative_error
from ranks import Here

from mcore.world import contiguous_rows, packed_rows, parallel
from tokenring.integrations.megatron import per_layer, use_tokenring, use_tokenring_linears

VOCABULARY = 96
# Keys of 16 + 8, values of 16; rotary embeddings without YaRN.
LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 24, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16,
    "rope_type": "rope", "normalization": "LayerNorm",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A model, its data and how both are split. rows: how the sequence is cut; "contiguous" is wrong."""

    heads: int = 4
    groups: int = 2
    head_dim: int = 16
    layers: int = 2
    length: int = 64
    batch: int = 2
    tp: int = 1
    cp: int = 1
    pp: int = 1
    recompute: str = ""  # "selective" or "full"
    cp_comm_type: str | tuple[str, ...] | None = None  # several: one for each layer
    rows: str = "zigzag"
    documents: tuple[tuple[int, int], ...] = ()  # of packed ones: (real, padded) tokens
    dtype: torch.dtype = torch.float32
    seed: int = 1
    softmax: str = "vanilla"
    latent: bool = False  # multi-latent attention, whose values are narrower than its keys: LATENT
    travels: bool = False  # its latents travel
    recompute_modules: tuple[str, ...] | None = None
    sequence_parallel: bool = False
    linears: str = ""  # the schedule of our linear layers; "": Megatron's own
    vpp: int = 1  # virtual pipeline stages, and which of them a model is
    stage: int = 0
    experts: int = 0
    ep: int = 1

    @property
    def whole(self) -> Job:
        """The same on one rank, in float64."""
        plain = replace(self.whole_in(torch.float64), travels=False, recompute_modules=None)
        return replace(plain, recompute="", cp_comm_type=None, rows="zigzag")

    def whole_in(self, dtype: torch.dtype) -> Job:
        """The same on one rank, in this dtype."""
        return replace(self, tp=1, cp=1, pp=1, vpp=1, ep=1, sequence_parallel=False, linears="", dtype=dtype)

    def config(self) -> Any:
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

        recompute: dict[str, Any] = {"recompute_granularity": self.recompute or None}
        if self.recompute == "full":
            recompute |= {"recompute_method": "uniform", "recompute_num_layers": 1}
        return (MLATransformerConfig if self.latent else TransformerConfig)(
            num_layers=self.layers,
            hidden_size=self.heads * self.head_dim,
            num_attention_heads=self.heads,
            num_query_groups=self.groups,
            use_cpu_initialization=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            tensor_model_parallel_size=self.tp,
            context_parallel_size=self.cp,
            pipeline_model_parallel_size=self.pp,
            pipeline_dtype=self.dtype,
            calculate_per_token_loss=True,  # so that Megatron's loop takes our losses as they are
            cp_comm_type=per_layer(self.cp_comm_type) if isinstance(self.cp_comm_type, tuple) else self.cp_comm_type,
            **({} if self.softmax == "vanilla" else {"softmax_type": self.softmax}),
            **({"recompute_modules": list(self.recompute_modules)} if self.recompute_modules else {}),
            sequence_parallel=self.sequence_parallel,
            **recompute,
            **self._of_experts_and_stages(),
            **(LATENT if self.latent else {}),
        )

    def _of_experts_and_stages(self) -> dict[str, Any]:
        """Return what the config says of experts, and of virtual pipeline stages, whose messages go two by two."""
        found: dict[str, Any] = {}
        if self.experts:
            how = "alltoall" if self.ep > 1 else "allgather"  # the former wants streams, of a CPU too
            found |= {
                "num_moe_experts": self.experts, "moe_router_topk": 2, "moe_token_dispatcher_type": how,
                "moe_router_load_balancing_type": "none", "expert_model_parallel_size": self.ep,
                "add_bias_linear": False,
            }  # fmt: skip
        if self.vpp > 1:
            stages = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
            found |= {"virtual_pipeline_model_parallel_size": self.vpp, **stages}
        return found

    def layer_spec(self) -> Any:
        """Megatron's own spec of a layer, with our linears where the job says so."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        if self.latent:
            from megatron.core.transformer import multi_latent_attention as module

            if not isinstance(getattr(module, "TELinear", object), type):  # 0.16, without TransformerEngine: a mock
                module.TELinear = type("TELinear", (), {})
        experts = {"num_experts": self.experts, "moe_grouped_gemm": False} if self.experts else {}
        spec = get_gpt_layer_local_spec(multi_latent_attention=self.latent, **experts)
        return use_tokenring_linears(spec, self.linears) if self.linears else spec


class WholeAttention(torch.nn.Module):
    """core_attention written apart from everything else: all scores at once, of a whole sequence or of documents."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **rest: Any) -> None:
        super().__init__()
        kind, sinks = getattr(config, "softmax_type", "vanilla"), torch.zeros(config.num_attention_heads)
        self.softmax_offset: torch.Tensor | None = sinks if kind == "off-by-one" else None
        if kind == "learnable":
            self.softmax_offset = torch.nn.Parameter(config.init_method(sinks) * 50)
        self.scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: Any, packed_seq_params: Any = None,
        **rest: Any,
    ) -> torch.Tensor:  # fmt: skip
        packed = q.dim() == 3
        q, k, v = (x[:, None] if packed else x for x in (q, k, v))
        repeats = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
        hidden = ~visible(q.shape[0], packed_seq_params)
        scores = torch.einsum("sbhd,tbhd->bhst", q, k) * self.scale
        scores = scores.masked_fill(hidden, -1e30)
        if self.softmax_offset is not None:
            sinks = self.softmax_offset.to(scores)[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        shares = torch.softmax(scores, dim=-1)[..., : k.shape[0]].masked_fill(hidden, 0.0)
        out = torch.einsum("bhst,tbhd->sbhd", shares, v).flatten(2)
        return out[:, 0] if packed else out


def visible(length: int, params: Any) -> torch.Tensor:
    """Causal, inside each document without its padding: booleans [length, length]."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    if params is None:
        return causal
    seen = torch.zeros_like(causal)
    real = params.cu_seqlens_q.diff().tolist()
    for (start, _), tokens in zip(pairwise(params.cu_seqlens_q_padded.tolist()), real, strict=True):
        seen[start : start + tokens, start : start + tokens] = True
    return seen & causal


def build(here: Here, job: Job, spec: Any = None, **options: Any) -> Any:
    """The model of this rank, with the world split as the job says. spec: the layers'; options: of use_tokenring."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    parallel(here, job.tp, job.cp, job.pp, job.vpp, job.ep)
    if job.vpp > 1:
        parallel_state.set_virtual_pipeline_model_parallel_rank(job.stage)
    torch.manual_seed(job.seed)
    options |= {"latents": True} if job.travels else {}
    model = GPTModel(
        config=job.config(),
        transformer_layer_spec=use_tokenring(job.layer_spec(), **options) if spec is None else spec,
        vocab_size=VOCABULARY,
        max_sequence_length=job.length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    return model.to(job.dtype).train()


def build_whole(here: Here, job: Job) -> Any:
    """The model on one rank, in the job's dtype, with the attention above."""
    spec = job.layer_spec()
    spec.submodules.self_attention.submodules.core_attention = WholeAttention
    return build(here, job, spec)


class Data(NamedTuple):
    """tokens, targets [B, T]; weights [B, T] of the tokens' losses, which add up to 1 over the whole."""

    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def data_of(job: Job, step: int = 0) -> Data:
    generator = torch.Generator().manual_seed(100 * job.seed + step)
    text = torch.randint(VOCABULARY, (job.batch, job.length + 1), generator=generator)
    weights = torch.ones(job.batch, job.length)
    start = 0
    for real, padded in job.documents:
        weights[:, start + real : start + padded] = 0
        start += padded
    if job.documents:
        weights[:, start:] = 0
    return Data(text[:, :-1], text[:, 1:], weights / weights.sum())


def local_data(job: Job, data: Data) -> Data:
    """What this rank has of it: its part of the batch, and of the sequence what Megatron itself cuts for it."""
    from megatron.core import parallel_state as state
    from megatron.core.utils import get_batch_on_this_cp_rank

    replica, replicas = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    if job.batch % replicas:  # every replica has all of it
        data = data._replace(weights=data.weights / replicas)
    else:
        mine = slice(replica * job.batch // replicas, (replica + 1) * job.batch // replicas)
        data = Data(*(x[mine] for x in data))
    if job.rows == "zigzag" and not job.documents:
        return Data(**get_batch_on_this_cp_rank(data._asdict()))
    rank, ranks = state.get_context_parallel_rank(), state.get_context_parallel_world_size()
    if job.rows == "contiguous":
        rows = contiguous_rows(job.length, rank, ranks)
    else:  # Megatron has nothing for documents; TransformerEngine has
        rows = packed_rows([padded for _, padded in job.documents], rank, ranks)
    return Data(*(x[:, rows.to(x.device)] for x in data))


def packing(job: Job) -> Any:
    """packed_seq_params, of documents with padding at their ends; None without documents."""
    from megatron.core.packed_seq_params import PackedSeqParams

    if not job.documents:
        return None
    real, padded = (
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for lengths in zip(*job.documents, strict=True)
    )
    longest = max(length for _, length in job.documents)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded, max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip


def loss_of(job: Job, model: Any, data: Data) -> torch.Tensor:
    """This rank's share of the mean loss, by Megatron's own cross-entropy; without a pipeline."""
    positions = torch.arange(data.tokens.shape[1]).expand_as(data.tokens)
    losses = model(data.tokens, positions, None, labels=data.targets, packed_seq_params=packing(job))
    share: torch.Tensor = (losses.to(torch.float64) * data.weights).sum()
    return share


Whole = tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]


def whole_gradients(here: Here, job: Job) -> Whole:
    """Loss, weights and gradients by name, of the whole model in float64; kept, as many splits have one whole."""
    kept: dict[Job, Whole] = here.memory.setdefault("whole gradients", {})
    if job.whole not in kept:
        kept[job.whole] = _whole_gradients(here, job.whole)
    return kept[job.whole]


def _whole_gradients(here: Here, whole: Job) -> Whole:
    model, data = build_whole(here, whole), data_of(whole)
    positions = torch.arange(whole.length).expand_as(data.tokens)
    logits = model(data.tokens, positions, None, packed_seq_params=packing(whole))
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data.targets.flatten(), reduction="none")
    loss = (losses * data.weights.flatten()).sum()
    torch.autograd.backward(loss)
    named = dict(model.named_parameters())
    return loss.item(), {n: p.detach() for n, p in named.items()}, {n: p.grad for n, p in named.items()}


def part_of(model: Any, name: str, parameter: Any, whole: dict[str, torch.Tensor]) -> torch.Tensor:
    """What this rank has of a parameter of the whole model, or of its gradient."""
    from megatron.core import parallel_state as state

    words = name.split(".")
    if words[:2] == ["decoder", "layers"]:
        words[2] = str(model.decoder.layers[int(words[2])].layer_number - 1)
    if "local_experts" in words:
        at = words.index("local_experts") + 1
        here = len(model.decoder.layers[0].mlp.experts.local_experts)
        words[at] = str(int(words[at]) + here * state.get_expert_model_parallel_rank())
    found = whole[".".join(words)]
    if not getattr(parameter, "tensor_model_parallel", False):
        return found
    ranks, rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
    gated = "linear_fc1" in words and model.config.gated_linear_unit  # gates and values lie one after the other
    parts = [each.chunk(ranks, dim=parameter.partition_dim)[rank] for each in found.chunk(2 if gated else 1)]
    return torch.cat(parts)


def take_weights(model: Any, whole: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(part_of(model, name, parameter, whole))


def sum_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Over ranks that have other tokens: data and context parallel ones. In one message, as each wakes all ranks.

    Parameters that tensor-parallel ranks have alike, and apply to other tokens each, are added up over these before.
    """
    from megatron.core import parallel_state as state

    parameters = list(parameters)
    for parameter in parameters:
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=state.get_tensor_model_parallel_group())
    found = [parameter.grad for parameter in parameters]
    grads = [grad for grad in found if grad is not None]
    assert len(grads) == len(found)
    together = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(together, group=state.get_data_parallel_group(with_context_parallel=True))
    for grad, total in zip(grads, torch.split(together, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def gradient_errors(model: Any, wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """‖got - want‖ / ‖want‖ of each parameter that this rank has."""
    return {
        name: relative_error(parameter.grad, part_of(model, name, parameter, wanted))
        for name, parameter in model.named_parameters()
    }
