"""A rank's process with one version of Megatron-core in it, on a CPU: what is put in its place where it wants a GPU."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ranks import Here


class OnCpu:
    """torch, where zeros that are to lie on a GPU lie here, and nothing is pinned for its way there."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *sizes: Any, device: Any = None, **more: Any) -> torch.Tensor:
        return torch.zeros(*sizes, **more)

    def tensor(self, data: Any, device: Any = None, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return torch.tensor(data, **more)


def _norm_of(theirs: Any) -> Any:
    """torch's norm, marked under sequence parallelism as Apex's is: Megatron itself wants Apex for that."""

    def new(cls: Any, config: Any, *rest: Any, **more: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        made: torch.nn.Module = theirs(cls, plain, *rest, **more)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return made

    return new


def _as_it_is(function: Any = None, *rest: Any, **options: Any) -> Any:
    return _as_it_is if function is None else function


def _without_compiler() -> None:
    """Nothing is compiled, nor is the compiler imported: torch's optimizers do, and it takes each rank seconds."""
    torch.compile = _as_it_is  # type: ignore[assignment]
    compiler: Any = ModuleType("torch._dynamo")
    compiler.disable, compiler.graph_break = _as_it_is, lambda: None
    compiler.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # init_process_group asks for it
    torch._dynamo = sys.modules["torch._dynamo"] = compiler


def load(folder: str) -> str:
    """Import Megatron-core from this folder; its version. Called once in a process, before anything else here."""
    sys.path.insert(0, folder)
    _without_compiler()
    warnings.simplefilter("ignore")  # Megatron's own, of missing GPU packages; ours are errors again below
    import megatron.core
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random as rng
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    assert megatron.core.__file__.startswith(folder), megatron.core.__file__
    assert gpt_layer_specs and gpt_model
    without_generators(rng)
    # The loop over microbatches counts tokens on the GPU, and hands activations from stage to stage there. What cuts
    # batches and rotary embeddings sends the numbers of the parts there. All else of both is Megatron's own.
    schedules.torch = utils.torch = rope_utils.torch = OnCpu()
    clip_grads.torch = optimizer.torch = OnCpu()  # norms and scales
    WrappedTorchNorm.__new__ = _norm_of(WrappedTorchNorm.__new__)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = lambda self, *rest, **more: self  # type: ignore[method-assign]
    warnings.filterwarnings("error", module="tokenring")
    version: str = megatron.core.__version__
    return version


def without_generators(rng: Any) -> None:
    """Let recomputation keep no states of the GPU's generators: there are none, and nothing random is computed here.

    rng: the module megatron.core.tensor_parallel.random.
    """
    rng._get_all_rng_states = lambda: ()
    rng._set_all_rng_states = lambda *states: None
    rng.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()


def parallel(here: Here, tp: int = 1, cp: int = 1, pp: int = 1, vpp: int = 1, ep: int = 1) -> None:
    """Make this the split of the world in Megatron's parallel_state, of which the groups are made once and kept."""
    from megatron.core import parallel_state as state

    states: dict[tuple[int, ...], dict[str, Any]] = here.memory.setdefault("states", {})
    if (tp, cp, pp, vpp, ep) not in states:
        blank = states.setdefault((0,), _globals(state))
        vars(state).update(blank)
        with _each_group_once(here.memory.setdefault("groups", {})):
            state.initialize_model_parallel(
                tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None, expert_model_parallel_size=ep,
            )  # fmt: skip
        states[tp, cp, pp, vpp, ep] = _globals(state)
    vars(state).update(states[tp, cp, pp, vpp, ep])


@contextmanager
def _each_group_once(made: dict[tuple[int, ...], Any]) -> Iterator[None]:
    """Groups of the same ranks are one: Megatron makes dozens, and each has threads and connections of its own."""
    whole: Any = dist.new_group

    def new_group(ranks: Sequence[int], *rest: Any, **options: Any) -> Any:
        if tuple(ranks) not in made:
            made[tuple(ranks)] = whole(ranks, *rest, **options)
        return made[tuple(ranks)]

    dist.new_group = new_group  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.new_group = whole


def _globals(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name.startswith("_") and name[1:].isupper()}


def zigzag_rows(length: int, rank: int, ranks: int) -> torch.Tensor:
    """The positions that a rank has of a document: parts rank and 2 · ranks - 1 - rank."""
    parts = torch.arange(length).chunk(2 * ranks)
    return torch.cat([parts[rank], parts[2 * ranks - 1 - rank]])


def contiguous_rows(length: int, rank: int, ranks: int) -> torch.Tensor:
    """A wrong layout, for the tests to refuse."""
    return torch.arange(length).chunk(ranks)[rank]


def packed_rows(lengths: list[int], rank: int, ranks: int) -> torch.Tensor:
    """The positions that a rank has of packed documents, each cut zigzag by itself; Megatron leaves it to users."""
    rows, start = [], 0
    for length in lengths:
        rows.append(start + zigzag_rows(length, rank, ranks))
        start += length
    return torch.cat([each for each in rows if each.numel()])
