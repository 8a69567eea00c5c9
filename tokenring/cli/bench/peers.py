"""Other libraries' context parallelism, made ready to run beside ours on CPU and Gloo.

Each is imported when it is asked for; none is needed. What had to be changed for them to run, or to be
right, is a note in the report.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import torch

from tokenring.cli.bench.candidates import BHTD, THD, NotInstalled, NotRun, RacedSchedule, RaceNote, RaceSetting, Runner
from tokenring.cli.bench.others import flash_attn_cpu, torch_ring
from tokenring.cli.bench.results import PEER
from tokenring.cli.bench.sleeping import Sleeping
from tokenring.sequence.layout import make_layout

# The versions that were tried.
INSTALL = {
    "ring-flash-attn": "pip install --no-deps ring-flash-attn==0.1.8",
    "yunchang": "pip install --no-deps yunchang==0.6.4",
}
PACKAGES = {"ring-flash-attn": "ring_flash_attn", "yunchang": "yunchang", "torch": "torch"}
PEERS = tuple(PACKAGES)

USP_DEGREES = (2, 4)  # of yunchang's Ulysses, inside its ring
STAND_IN = "a stand-in for flash_attn computes with the kernel that our schedules use"
CPU_RING = "torch's context_parallel() dispatches no CPU kernel: the ring below it is called with one"
PATCHES = {  # text in a backward: (what it becomes, why)
    "_buffer.to(torch.float32)": (
        "_buffer.to(torch.float32, copy=True)",
        "patched: gradients are copied out of a buffer before it is overwritten (without this, wrong in float32)",
    ),
    "dq.to(torch.bfloat16)": ("dq.to(q.dtype)", "patched: dq is returned in the inputs' dtype, not always in bfloat16"),
}


@contextlib.contextmanager
def sleeping_instead(tflops: float | None) -> Iterator[None]:
    """Let peers' kernels sleep inside the block, as those of our schedules do; None: they compute."""
    if tflops is None:
        yield
        return
    with flash_attn_cpu.computing_with(Sleeping(tflops)), torch_ring.computing_with(Sleeping(tflops)):
        yield


def peer_candidates(names: list[str]) -> list[RacedSchedule]:
    """Return the candidates of these libraries; one that is not installed has a single candidate, which says so."""
    found: list[RacedSchedule] = []
    for name in names:
        if find_spec(PACKAGES[name]) is None:
            found.append(RacedSchedule(name, PEER, partial(_missing, name)))
            continue
        version = torch.__version__ if name == "torch" else _version(name)
        made = {"ring-flash-attn": _ring_flash_attn, "yunchang": _yunchang, "torch": _torch}[name]
        found += [RacedSchedule(f"{name} {kind}", PEER, prepare, version) for kind, prepare in made().items()]
    return found


def _version(name: str) -> str | None:
    """Return a package's version; None if it can be imported but was not installed as a package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


Prepare = Callable[[RaceSetting, Any], Runner]


def _missing(name: str, setting: RaceSetting, group: Any) -> Runner:
    raise NotInstalled(INSTALL[name])


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep out of our output what a peer prints or warns of while it is imported."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _causal(setting: RaceSetting) -> bool:
    """Return True for the causal mask. Raises NotRun for a case that no peer computes."""
    if setting.case.of_values != setting.case.head_dim:
        raise NotRun("for values that are as wide as keys only")
    causal = setting.is_plain()
    if causal is None:
        raise NotRun("for full and causal masks only")
    return causal


def _what(layout: str) -> str:
    return f"peer, {layout}"


# ---------- ring-flash-attn


def _ring_flash_attn() -> dict[str, Prepare]:
    return {
        "ring": partial(_ring_flash, "ring_flash_attn", "contiguous"),
        "zigzag": partial(_ring_flash, "zigzag_ring_flash_attn", "zigzag"),
        "stripe": partial(_ring_flash, "stripe_flash_attn", "striped"),
        "llama3": _llama3,
    }


def _ring_flash_module(name: str) -> tuple[ModuleType, list[RaceNote]]:
    """Import ring_flash_attn.<name> without the package's __init__, which needs transformers for its adapters."""
    notes = [RaceNote(STAND_IN, "ring_flash_attn")] if flash_attn_cpu.install() else []
    if "ring_flash_attn" not in sys.modules:
        spec = find_spec("ring_flash_attn")
        assert spec is not None  # looked for before
        sys.modules["ring_flash_attn"] = module_from_spec(spec)
    with _quietly():
        return import_module(f"ring_flash_attn.{name}"), notes


def _patch(module: ModuleType, function: str) -> list[RaceNote]:
    """Mend a backward function; return notes of what was mended, by this call or an earlier one."""
    if not hasattr(module, "_tokenring_notes"):
        found = flash_attn_cpu.patch_function(module, function, {old: new for old, (new, _) in PATCHES.items()})
        module.__dict__["_tokenring_notes"] = [RaceNote(PATCHES[old][1], module.__name__) for old in found]
    notes: list[RaceNote] = module.__dict__["_tokenring_notes"]
    return notes


def _ring_flash(name: str, layout: str, setting: RaceSetting, group: Any) -> Runner:
    causal = _causal(setting)
    if not causal and name != "ring_flash_attn":
        raise NotRun("for the causal mask only")
    if setting.ranks == 1:
        raise NotRun("one rank cannot send to itself")
    call, notes = ring_flash_function(name)
    return Runner(
        _what(layout), setting.positions(layout), lambda q, k, v: call(q, k, v, causal=causal, group=group), notes=notes
    )


def ring_flash_function(name: str) -> tuple[Callable[..., Any], tuple[RaceNote, ...]]:
    """Return a function of ring-flash-attn by its module, made ready for CPUs, and notes of what was changed for it."""
    module, notes = _ring_flash_module(name)
    return getattr(module, f"{name}_func"), tuple(notes + _patch(module, f"{name}_backward"))


def _llama3(setting: RaceSetting, group: Any) -> Runner:
    causal, case = _causal(setting), setting.case
    if case.batch > 1:
        raise NotRun("for one packed sequence, not for a batch")
    module, notes = _ring_flash_module("llama3_flash_attn_varlen")
    whole = torch.tensor([0, case.seq_len], dtype=torch.int32)
    lengths = module.llama3_flash_attn_prepare_cu_seqlens(whole, causal, setting.rank, setting.ranks)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        *lengths_of, k_slice = lengths
        out: torch.Tensor = module.llama3_flash_attn_varlen_func(
            q, k, v, *lengths_of, heads_k_stride=case.kv_heads, local_k_slice=k_slice, causal=causal, group=group
        )
        return out

    return Runner(_what("contiguous"), setting.positions("contiguous"), attend, THD, notes=tuple(notes))


# ---------- yunchang


def _yunchang() -> dict[str, Prepare]:
    return {"ulysses": _ulysses, **{f"usp {degree}": partial(_usp, degree) for degree in USP_DEGREES}}


def _ulysses(setting: RaceSetting, group: Any) -> Runner:
    causal, case = _causal(setting), setting.case
    if case.kv_heads % setting.ranks:
        raise NotRun(f"{case.kv_heads} kv heads are not a multiple of {setting.ranks} ranks")
    notes = (RaceNote(STAND_IN, "yunchang"),) if flash_attn_cpu.install() else ()
    with _quietly():
        layer = import_module("yunchang").UlyssesAttention(
            sequence_process_group=group, attn_type=import_module("yunchang.kernels").AttnType.FA
        )
    return Runner(
        _what("contiguous"),
        setting.positions("contiguous"),
        lambda q, k, v: layer(q, k, v, causal=causal),
        notes=notes,
    )


def _usp(degree: int, setting: RaceSetting, group: Any) -> Runner:
    """Prepare Ulysses among `degree` neighbours and a ring across: zigzag if causal, as in yunchang's own examples."""
    causal, case, ranks = _causal(setting), setting.case, setting.ranks
    if ranks % degree or ranks == degree:
        raise NotRun(f"{ranks} ranks are not several groups of {degree}")
    if case.kv_heads % degree:
        raise NotRun(f"{case.kv_heads} kv heads are not a multiple of {degree}")
    notes = [RaceNote(STAND_IN, "yunchang")] if flash_attn_cpu.install() else []
    kind = "zigzag" if causal else "basic"
    ring = "zigzag_ring_flash_attn" if causal else "ring_flash_attn"
    with _quietly():
        yunchang = import_module("yunchang")
        yunchang.set_seq_parallel_pg(degree, ranks // degree, setting.rank, ranks)
        layer = yunchang.LongContextAttention(
            ring_impl_type=kind, attn_type=import_module("yunchang.kernels").AttnType.FA
        )
        notes += _patch(import_module(f"yunchang.ring.{ring}"), f"{ring}_backward")
    return Runner(
        _what(f"{kind} of {ranks // degree} × {degree}"),
        _usp_positions(setting, degree, kind),
        lambda q, k, v: layer(q, k, v, causal=causal),
        notes=tuple(notes),
    )


def _usp_positions(setting: RaceSetting, degree: int, kind: str) -> torch.Tensor:
    """Return this rank's positions: neighbours have those of one rank of the ring, each a part of them, in order."""
    groups, length = setting.ranks // degree, setting.case.seq_len
    layout = make_layout("zigzag" if kind == "zigzag" else "contiguous", groups, length)
    group, place = divmod(setting.rank, degree)
    whole = torch.tensor(layout.positions(group), dtype=torch.int64)
    return whole.chunk(degree)[place]


# ---------- torch


def _torch() -> dict[str, Prepare]:
    return {f"ring {rotate}": partial(_torch_ring, rotate) for rotate in ("allgather", "alltoall")}


def _torch_ring(rotate: str, setting: RaceSetting, group: Any) -> Runner:
    causal, case = _causal(setting), setting.case
    if case.heads != case.kv_heads:
        raise NotRun("for as many kv heads as query heads only")
    layout = "zigzag" if causal else "contiguous"
    return Runner(
        _what(layout),
        setting.positions(layout),
        lambda q, k, v: torch_ring.attend(q, k, v, group, causal, rotate),
        BHTD,
        notes=(RaceNote(CPU_RING, "torch"),),
    )
