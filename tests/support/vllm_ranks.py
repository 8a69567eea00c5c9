"""Be one rank of vLLM on CPUs, with decode context parallelism over tokenring: python vllm_ranks.py MODEL RANKS

MODEL is a folder, into which a tiny random one is written if RANKS is 0. Prints a line of JSON: the tokens that it
generates, by request, and their logarithms of probability.
vLLM's backend for CPUs knows no decode context parallelism, so the one here is of plain torch: each rank keeps its part
of the tokens in vLLM's own pages, and attends to them from the queries of all heads. `gather_queries` and `combine` are
all that attention sends from rank to rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import tokenring as tr

PROMPTS = [[3 + 7 * at % 250 for at in range(length)] for length in (57, 3, 130, 1)]
SHARED = f"vllm-cpu-{os.environ.get('MASTER_PORT')}"  # vLLM's own name is the same for all who start ranks this way
NEW_TOKENS, CACHE_BYTES = 24, 1 << 26


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 256,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip


def make_tiny_model(folder: Path) -> None:
    """Write the config and the random weights of a model of 8 query heads and one kv head."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(CONFIG))
    hidden, inner, heads, words = 256, 128, 8, 256
    shapes = {
        "self_attn.q_proj": (heads * 32, hidden), "self_attn.k_proj": (32, hidden), "self_attn.v_proj": (32, hidden),
        "self_attn.o_proj": (hidden, heads * 32), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    torch.manual_seed(0)
    weights = {"model.embed_tokens.weight": torch.randn(words, hidden), "model.norm.weight": torch.ones(hidden)}
    weights["lm_head.weight"] = 0.2 * torch.randn(words, hidden)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": 0.1 * torch.randn(shape) for name, shape in shapes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        weights |= {f"{prefix}.{name}.weight": torch.ones(hidden) for name in norms}
    save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})


def slots(self: Any, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor) -> None:
    """Say where each token is cached at this rank, -1 for nowhere, as vLLM's kernel for GPUs does."""
    page, ranks, each = self.block_size, self.dcp_world_size, self.cp_kv_cache_interleave_size
    table, found = self.block_table.gpu, self.slot_mapping.gpu
    found.fill_(-1)
    for request in range(num_reqs):
        first, end = int(query_start_loc[request]), int(query_start_loc[request + 1])
        at = positions[first:end]
        block, inside = at // (page * ranks), at % (page * ranks)
        slot = table[request, block].long() * page + inside // (ranks * each) * each + inside % each
        found[first:end] = slot.where(inside // each % ranks == self.dcp_rank, -1)


def make_backend() -> type:
    """Return the attention backend, a class of vLLM's."""
    from vllm.distributed.parallel_state import get_dcp_group
    from vllm.v1.attention.backends import cpu_attn

    class Impl(cpu_attn.CPUAttentionBackendImpl):  # type: ignore[misc]
        supports_dcp = can_return_lse_for_decode = True
        context: tr.ContextParallel | None = None

        def do_kv_cache_update(
            self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
        ) -> None:
            """Put keys and values, side by side, where this rank has tokens."""
            page, here = kv_cache.shape[2], slot_mapping >= 0
            block, inside = slot_mapping[here] // page, slot_mapping[here] % page
            kv_cache[block, :, inside] = torch.cat([key, value], -1)[: len(here)][here]

        def forward(
            self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
            attn_metadata: Any, output: torch.Tensor, *_: Any, **__: Any,
        ) -> torch.Tensor:  # fmt: skip
            """Attend from queries [T, H/P, D] to all tokens of their requests."""
            if attn_metadata is None:
                return output
            if Impl.context is None:
                Impl.context = tr.ContextParallel(get_dcp_group().cpu_group, transport="gloo")
            cp, count = Impl.context, attn_metadata.num_actual_tokens
            q = tr.gather_queries(query[:count].view(count, self.num_heads, self.head_size), cp)
            out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
            starts, page = attn_metadata.query_start_loc.tolist(), kv_cache.shape[2]
            local = tr.local_lengths(attn_metadata.seq_lens, cp).tolist()
            for request, length in enumerate(attn_metadata.seq_lens.tolist()):
                first, end = starts[request], starts[request + 1]
                blocks = attn_metadata.block_table[request, : -(-local[request] // page)].long()
                if not len(blocks) or first == end:
                    continue
                cached = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[: local[request]]
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in cached.chunk(2, -1))
                scores = torch.einsum("thd,shd->hts", q[first:end], k) * self.scale
                at = torch.arange(length - (end - first), length)[:, None]
                scores = scores.masked_fill(torch.arange(local[request]) * cp.world_size + cp.rank > at, -torch.inf)
                lse[first:end] = scores.logsumexp(-1).T
                out[first:end] = torch.einsum("hts,shd->thd", scores.softmax(-1).nan_to_num(), v)
            output[:count] = tr.combine(out, lse, cp, q_home="heads").view_as(output[:count])
            return output

    class Backend(cpu_attn.CPUAttentionBackend):  # type: ignore[misc]
        @staticmethod
        def get_impl_cls() -> type:
            """Return the class of a layer's attention."""
            return Impl

    return Backend


def main() -> None:
    model, ranks = sys.argv[1], int(sys.argv[2])
    if ranks == 0:
        return make_tiny_model(Path(model))
    from vllm import LLM, SamplingParams
    from vllm.distributed.device_communicators import cpu_communicator
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.worker import block_table

    options: dict[str, Any] = {}
    if ranks > 1:
        cpu_attn.CPUAttentionBackend = make_backend()
        block_table.BlockTable.compute_slot_mapping = slots
        cpu_communicator._CPUSHMDistributed.make_group_name = staticmethod(lambda _: SHARED)
        options = {
            "tensor_parallel_size": ranks, "decode_context_parallel_size": ranks,
            "distributed_executor_backend": "external_launcher",
        }  # fmt: skip
    engine = LLM(
        model, kv_cache_memory_bytes=CACHE_BYTES, skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256, enable_prefix_caching=False, seed=0, **options,
    )  # fmt: skip
    wanted = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    found = [each.outputs[0] for each in engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], wanted)]
    logs = [[next(iter(step.values())).logprob for step in each.logprobs] for each in found]
    print(json.dumps({"tokens": [list(each.token_ids) for each in found], "logprobs": logs}), flush=True)
    for left in Path("/dev/shm").glob(f"{SHARED}*"):
        left.unlink(missing_ok=True)
    os._exit(0)  # threads of Gloo may outlive the group


if __name__ == "__main__":
    main()
