"""What of diffusers its integration touches, for tests where diffusers is not installed.

The registry of attention backends and the dispatch by it are as in diffusers 0.37 to 0.42
(models/attention_dispatch.py); the two models have the modules, arguments and order of streams of their namesakes, and
little else. tests/integrations/test_diffusers_models.py runs the real ones, where they are installed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH, HEADS = 16, 2


class AttentionBackendName(str, Enum):
    NATIVE = "native"
    FLASH = "flash"


class _AttentionBackendRegistry:
    _backends: ClassVar[dict[Any, Callable[..., Tensor]]] = {}
    _constraints: ClassVar[dict[Any, list[Any]]] = {}
    _supported_arg_names: ClassVar[dict[Any, set[str]]] = {}
    _supports_context_parallel: ClassVar[set[str]] = set()
    _active_backend = AttentionBackendName.NATIVE

    @classmethod
    def register(cls, backend: Any, constraints: Any = None, supports_context_parallel: bool = False) -> Any:
        def decorator(function: Any) -> Any:
            cls._backends[backend], cls._constraints[backend] = function, constraints or []
            cls._supported_arg_names[backend] = set(inspect.signature(function).parameters)
            if supports_context_parallel:
                cls._supports_context_parallel.add(backend.value)
            return function

        return decorator

    @classmethod
    def get_active_backend(cls) -> Any:
        return cls._active_backend, cls._backends.get(cls._active_backend)


def _native_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False, return_lse: bool = False, _parallel_config: Any = None,
) -> Tensor:  # fmt: skip
    assert _parallel_config is None, "a split model reached diffusers' own attention"
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale).transpose(1, 2)


def dispatch_attention_fn(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
    backend = AttentionBackendName(more.pop("backend", None) or _AttentionBackendRegistry._active_backend)
    given = {"query": query, "key": key, "value": value, **more, "_parallel_config": more.pop("parallel_config", None)}
    known = _AttentionBackendRegistry._supported_arg_names[backend]
    return _AttentionBackendRegistry._backends[backend](**{name: x for name, x in given.items() if name in known})


@contextmanager
def installed(version: str = "0.42.1") -> Iterator[None]:
    """Put this in the place of diffusers while inside."""
    _AttentionBackendRegistry.register(AttentionBackendName.NATIVE, [], True)(_native_attention)
    names = ("diffusers", "diffusers.models", "diffusers.models.attention_dispatch")
    before = {name: sys.modules.get(name) for name in names}
    made = {name: ModuleType(name) for name in names}
    made["diffusers"].__version__ = version  # type: ignore[attr-defined]
    for each in (AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn):
        setattr(made[names[2]], each.__name__, each)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


# ---------- models


class Processor:
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __call__(self, attn: Attention, x: Tensor, seen: Tensor | None = None, mask: Any = None) -> Tensor:
        keys = x if seen is None else seen
        q, k, v = (each(y).unflatten(-1, (HEADS, -1)) for each, y in ((attn.q, x), (attn.k, keys), (attn.v, keys)))
        config = self._parallel_config if seen is None else None  # cross-attention: text is whole on every rank
        out = dispatch_attention_fn(
            q, k, v, attn_mask=mask, backend=self._attention_backend, parallel_config=config, **attn.more
        )
        return out.flatten(2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.processor: Any = Processor()
        self.more: dict[str, Any] = {}

    def forward(self, x: Tensor, seen: Tensor | None = None, mask: Any = None) -> Tensor:
        return self.processor(self, x, seen, mask)  # type: ignore[no-any-return]


class FluxTransformer2DModel(nn.Module):
    """Text and image, joined by one attention; places are added to both."""

    _parallel_config: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.place, self.attn, self.proj_out = nn.Linear(1, WIDTH), Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, img_ids: Tensor, txt_ids: Tensor,
        joint_attention_kwargs: Any = None, controlnet_block_samples: Any = None, mask: Any = None,
    ) -> Tensor:  # fmt: skip
        text = encoder_hidden_states.shape[1]
        places = self.place(torch.cat((txt_ids, img_ids)))
        x = torch.cat((encoder_hidden_states, hidden_states), 1) + places
        return self.proj_out((x + self.attn(x, None, mask))[:, text:])  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn1, self.attn2 = Attention(), Attention()

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = hidden_states * rotary[0].flatten(2) + rotary[1].flatten(2)
        x = x + self.attn1(x)
        return x + self.attn2(x, encoder_hidden_states)  # type: ignore[no-any-return]


class Rope(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.arange(x.shape[1])[None, :, None, None] * torch.ones(WIDTH) / 10
        return angles.cos().to(x), angles.sin().to(x)


class WanTransformer3DModel(nn.Module):
    """Blocks of self-attention over the video and cross-attention to the text."""

    _parallel_config: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.rope, self.proj_out = Rope(), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        rotary, x = self.rope(hidden_states), hidden_states
        for block in self.blocks:
            x = block(x, encoder_hidden_states, rotary)
        return self.proj_out(x * (1 + (timestep[..., None] if timestep.dim() == 2 else timestep)))  # type: ignore[no-any-return]
