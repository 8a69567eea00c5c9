"""Stand in for what the integration of MindSpeed-LLM's and -MM's FSDP2 trainers touches, in tests without them.

Signatures and behaviour are those of MindSpeed-LLM c77308a1 and MindSpeed-MM 57069cd5, cited by file and line.
tests/integrations/test_mindspeed_fsdp2_sources.py compares the signatures with the sources where these are at hand;
benchmarks/mindspeed_fsdp2 runs the sources themselves. Their attention functions give 7 everywhere here: whoever gets
that was not replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

LLM_CP = "mindspeed_llm.fsdp2.distributed.context_parallel"
QWEN3 = "transformers.models.qwen3.modeling_qwen3"
MM = "mindspeed_mm.fsdp"


def context_parallel_attention_forward(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, scaling: Any = None,
    sliding_window: Any = None, ring_fa_layout: str = "BNSD", is_causal: bool = True, **kwargs: Any,
) -> Any:  # fmt: skip
    """context_parallel_functions.py:16."""
    return torch.full_like(query.transpose(1, 2), 7.0), None


class ContextParallelMappingManager:
    """context_parallel_manager.py:26; of its table (context_parallel_mappings.py:69) one model of each kind."""

    MODELS = {  # noqa: RUF012
        "qwen3": [
            (f"{QWEN3}.eager_attention_forward", "context_parallel_functions.context_parallel_attention_forward")
        ],
        "qwen3_next": [
            ("Qwen3NextGatedDeltaNet.forward", "gdn_context_parallel.gdn_forward_with_cp"),
            (f"{QWEN3}.flash_attention_forward", "context_parallel_functions.context_parallel_attention_forward"),
        ],
        "glm_moe_dsa": [("dsa", "ulysses_context_parallel.dsa_attention.flash_attention_forward_fa_dsa")],
        "deepseek_v4": [
            ("v4", "kvallgather_context_parallel.deepseek_v4_cp_attention.deepseek_v4_cp_attention_forward")
        ],
    }

    def get_model_cp_mappings(self, model_id: str, cp_type_config: Any) -> list[tuple[str, str]]:
        """:79."""
        return [(target, f"{LLM_CP}.{patch}") for target, patch in self.MODELS[model_id]]

    def apply_transformers_modules(self, modules: Any, cp_type_config: Any) -> None:
        """:127, of functions alone: a target's module gets what the patch's module has under that name now."""
        for target, patch in self.get_model_cp_mappings(modules.config.model_type, cp_type_config):
            (module, name), (home, patched) = target.rsplit(".", 1), patch.rsplit(".", 1)
            sys.modules[module].__dict__[name] = sys.modules[home].__dict__[patched]


def ulysses_part(x: torch.Tensor, rank: int, ranks: int, dim: int = 1) -> torch.Tensor:
    """A rank's tokens under ulysses and kvallgather: train/trainer.py:547-561."""
    size, rest = divmod(x.shape[dim], ranks)
    start = rank * (size + 1) if rank < rest else rest * (size + 1) + (rank - rest) * size
    return x.narrow(dim, start, size + (rank < rest))


def ring_part(x: torch.Tensor, rank: int, ranks: int, dim: int = 1) -> torch.Tensor:
    """A rank's tokens under ring: train/trainer.py:594-606, and communication.py:616 of MindSpeed-MM."""
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim)


def _modules(patched: pytest.MonkeyPatch, **made: dict[str, Any]) -> dict[str, ModuleType]:
    """Put modules by their dotted names, with parents, into sys.modules; keys write dots as "__"."""
    found = {}
    for key, values in made.items():
        name = key.replace("__", ".")
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            each = ".".join(parts[:end])
            if each not in sys.modules:
                patched.setitem(sys.modules, each, ModuleType(each))
        vars(sys.modules[name]).update(values)
        found[name] = sys.modules[name]
    return found


@contextmanager
def like_llm(group: Any = None, cp_type: str = "ulysses") -> Iterator[ModuleType]:
    """MindSpeed-LLM is imported; yields the module of a model, whose attention its manager may replace.

    Its ParallelState and get_args are names of the module with the function (context_parallel_functions.py:8, :9).
    """
    with pytest.MonkeyPatch.context() as patched:
        for name in [each for each in sys.modules if each.partition(".")[0] in ("mindspeed_llm", "transformers")]:
            patched.delitem(sys.modules, name)
        state = SimpleNamespace(get_group=lambda name: {"cp": group}[name])
        own = {"context_parallel_attention_forward": _fresh(context_parallel_attention_forward)}
        own |= {"ParallelState": lambda: state, "get_args": lambda: SimpleNamespace(cp_type=cp_type)}
        folder = LLM_CP.replace(".", "__")
        method = _fresh(ContextParallelMappingManager.get_model_cp_mappings)
        manager = type("Manager", (ContextParallelMappingManager,), {"get_model_cp_mappings": method})
        found = _modules(
            patched,
            **{
                f"{folder}__context_parallel_functions": own,
                f"{folder}__context_parallel_manager": {"ContextParallelMappingManager": manager},
                QWEN3.replace(".", "__"): {"eager_attention_forward": None, "flash_attention_forward": None},
            },
        )
        yield found[QWEN3]


def _fresh(function: Any) -> Any:
    """The same function, as another object."""
    made = type(function)(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    made.__annotations__ = function.__annotations__
    return made


def build(model_type: str) -> None:
    """A model of this type is built (mindspeed_parallel_engine.py:73)."""
    manager = sys.modules[f"{LLM_CP}.context_parallel_manager"].ContextParallelMappingManager
    manager().apply_transformers_modules(SimpleNamespace(config=SimpleNamespace(model_type=model_type)), None)


# ---------- MindSpeed-MM


def flash_attention_forward(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, scaling: Any = None,
    sliding_window: Any = None, softcap: Any = None, cu_seq_lens_q: Any = None, cu_seq_lens_k: Any = None,
    input_layout: str = "1NTD", ring_in_bnsd: bool = False, skip_ulysses: bool = False, total_seq_len: Any = None,
    seq_split_lens: Any = None, skip_flash_attn_recompute: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """ops/flash_attn/flash_attn.py:171."""
    return torch.full_like(query.transpose(1, 2), 7.0), None


class AttentionInterface(dict[str, Any]):
    """transformers' ALL_ATTENTION_FUNCTIONS, by which layers find their attention."""

    def register(self, name: str, function: Any) -> None:
        self[name] = function


class State:
    """distributed/parallel_state.py:28: a mesh (ulysses, ring), flattened as "cp" (:66): the ring runs fastest."""

    def __init__(self, group: Any, ring: int, ulysses: int) -> None:
        self.group, self.ring, self.ulysses = group, ring, ulysses

    def is_cp_enable(self) -> bool:
        return self.ring * self.ulysses > 1

    def is_ring_enable(self) -> bool:
        return self.ring > 1

    def is_ulysses_enable(self) -> bool:
        return self.ulysses > 1

    def get_cp_group(self) -> Any:
        return self.group

    def get_ring_group_size(self) -> int:
        return self.ring

    def get_ulysses_group_size(self) -> int:
        return self.ulysses


def part_with_cp(x: torch.Tensor, rank: int, ring: int, ulysses: int, dim: int = 1) -> torch.Tensor:
    """communication.py:708: zigzag over the ring, then in parts over Ulysses."""
    if ring > 1:
        x = ring_part(x, rank % ring, ring, dim)
    return ulysses_part(x, rank // ring, ulysses, dim)


def packed_part_with_cp(
    x: torch.Tensor, rank: int, ring: int, ulysses: int, lengths: list[int], dim: int = 1
) -> torch.Tensor:
    """communication.py:874: each document in parts over the ring, then what that gives in parts over Ulysses."""
    if ring > 1:
        x = torch.cat([ulysses_part(each, rank % ring, ring, dim) for each in torch.split(x, lengths, dim)], dim)
    return ulysses_part(x, rank // ring, ulysses, dim)


def split_lengths(lengths: list[int], ranks: int) -> torch.Tensor:
    """context_parallel/utils.py:17 (cal_split_sizes_multi): [ranks, documents]."""
    return torch.tensor([[length // ranks + (rank < length % ranks) for length in lengths] for rank in range(ranks)])


class _Split(torch.autograd.Function):
    """communication.py:503; grad_scale "down"."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.given = group, dim, sizes
        return torch.split(x, sizes, dim)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        group, dim, sizes = ctx.given
        return _gathered(grads[0] / len(sizes), group, dim, sizes), None, None, None


class _Gather(torch.autograd.Function):
    """communication.py:447; grad_scale "up"."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.given = group, dim, sizes
        return _gathered(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        group, dim, sizes = ctx.given
        return torch.split(grads[0] * len(sizes), sizes, dim)[dist.get_rank(group)], None, None, None


def _gathered(x: torch.Tensor, group: Any, dim: int, sizes: list[int]) -> torch.Tensor:
    parts: list[Any] = [None] * len(sizes)
    dist.all_gather_object(parts, x.detach().cpu(), group=group)
    whole: torch.Tensor = torch.cat(parts, dim).to(x.device)
    return whole


def split_forward_gather_backward(
    input_: Any, process_group: Any, dim: int, split_sizes: Any = None, grad_scale: str = "down"
) -> Any:
    """communication.py:559."""
    return _Split.apply(input_, process_group, dim, split_sizes)  # type: ignore[no-untyped-call]


def gather_forward_split_backward(
    input_: Any, process_group: Any, dim: int, gather_sizes: Any = None, grad_scale: str = "up"
) -> Any:
    """communication.py:585."""
    return _Gather.apply(input_, process_group, dim, gather_sizes)  # type: ignore[no-untyped-call]


def rope_apply(x: torch.Tensor, grid_sizes: Any, freqs: torch.Tensor) -> torch.Tensor:
    """models/wan2_2/modeling_wan2_2.py:142, with real factors."""
    return x * freqs[:, : x.shape[1]]


class WanSelfAttention(torch.nn.Module):
    """models/wan2_2/modeling_wan2_2.py:340; without context parallelism, as theirs attends then."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.q, self.k, self.v, self.o = (torch.nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = torch.nn.LayerNorm(dim), torch.nn.LayerNorm(dim)

    def forward(self, x: Any, seq_lens: Any, grid_sizes: Any, freqs: Any) -> Any:
        """:365."""
        shape, real = (*x.shape[:2], self.num_heads, self.head_dim), int(seq_lens[0])
        q, k = self.norm_q(self.q(x)).view(shape), self.norm_k(self.k(x)).view(shape)
        q, k = rope_apply(q, grid_sizes, freqs), rope_apply(k, grid_sizes, freqs)
        q, k, v = (each.transpose(1, 2) for each in (q, k[:, :real], self.v(x).view(shape)[:, :real]))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.o(out.flatten(2))


@contextmanager
def like_mm(group: Any = None, ring: int = 1, ulysses: int = 1, on_npus: bool = True) -> Iterator[AttentionInterface]:
    """MindSpeed-MM is imported; yields where its layers find their attention."""
    with pytest.MonkeyPatch.context() as patched:
        for name in [each for each in sys.modules if each.partition(".")[0] == "mindspeed_mm"]:
            patched.delitem(sys.modules, name)
        registry, own = AttentionInterface(), _fresh(flash_attention_forward)
        registry["flash_attention_2"] = registry["flash_attention_3"] = own
        state = State(group, ring, ulysses)
        layer = type("WanSelfAttention", (WanSelfAttention,), {"forward": _fresh(WanSelfAttention.forward)})
        given: dict[str, Callable[..., Any]] = {"get_parallel_state": lambda: state}
        prefix = MM.replace(".", "__")
        moves = {each.__name__: each for each in (split_forward_gather_backward, gather_forward_split_backward)}
        _modules(
            patched,
            **{
                f"{prefix}__ops__flash_attn__flash_attn": {
                    **given, "flash_attention_forward": own, "ALL_ATTENTION_FUNCTIONS": registry,
                    "IS_NPU_AVAILABLE": on_npus,
                },
                f"{prefix}__models__wan2_2__modeling_wan2_2": {
                    **given, "WanSelfAttention": layer, "rope_apply": rope_apply,
                },
                f"{prefix}__distributed__context_parallel__communication": moves,
            },
        )  # fmt: skip
        yield registry
