"""A trial of a kernel's numbers on a device: small tiles, compared with plain attention in float64.

Kernels call vendors' operators, which may be broken for a chip, a driver or a release in ways that no error tells
(torch keeps a list of such cases for its own choice, sdp_utils.cpp, and whoever calls an operator by its name is not
asked). So each pass of a kernel is tried before it is taken first: on a causal square and on a tile that is no
multiple of anything, with grouped heads, as a part of longer rows. What was found is kept (`tables.trial_verdicts`) for
this model, driver and these versions, so that a later process does not try again. What raised is tried again by the
next process: it may have had a reason that is none of these, such as a compiler that was not found, or another stream
on which the device failed. A tile that may do harm to a kernel (`unsafe`) is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from traceback import walk_tb
from typing import NamedTuple

import torch

from tokenring.backends.devices import device_of, has_device
from tokenring.backends.interfaces import AttentionKernel, CappingKernel
from tokenring.backends.kernels.delta import row_dot
from tokenring.backends.kernels.reference import Reference
from tokenring.backends.kernels.torch_cuda import cudnn_version
from tokenring.errors import MOST_SAID, one_line
from tokenring.ir.schedule_data import Pass
from tokenring.sequence.region import Patch
from tokenring.tables.trial_verdicts import Verdicts, verdicts

VERSION = 1  # of what is tried: verdicts of another one do not count
HEADS = (4, 2)  # of q, and of k and v
REST = 40  # columns before the tile, which all rows see
LIMIT = 0.06  # of a row's numbers, beside the larger of theirs and the usual; half precision gives 1%, a mistake 20%
LSE_LIMIT = 0.02  # absolute: a factor of 1.02 in what rows weigh
SOFTCAP = 1.0  # of kernels with a cap: one that shows in scores of ordinary size
HEAD_DIM_MULTIPLE = 8  # head dims that operators tell apart
EXEMPT = ("reference", "auto")  # what others are compared with; and who tries those that it chooses among
DEVICE_FAILED = ("cuda error", "illegal memory access", "device-side assert", "unspecified launch failure")
NO_MEMORY = "out of memory"
DEVICES = ("cuda",)  # types of devices whose kernels are tried
NOWHERE: Mapping[str, str] = {}  # an environment without a cache: what is recorded there this process alone knows
DRIVER = Path("/proc/driver/nvidia/version")
PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4", "triton", "nvidia-cutlass-dsl")


class TrialTile(NamedTuple):
    """A patch, and how it is called."""

    name: str
    patch: Patch

    def __str__(self) -> str:
        return f"{self.name} tile of {self.patch.rows} × {self.patch.cols}"


TILES = (
    TrialTile("a causal", Patch(0, 128, 0, 128, None, 0)),
    TrialTile("an irregular", Patch(0, 70, 0, 105, None, 35)),
)


class Kind(NamedTuple):
    """A pass of calls of one head dim (value_dim: of v and out, if another) and dtype on a device, which is tried."""

    direction: Pass
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    value_dim: int | None = None

    @property
    def of_values(self) -> int:
        """The head dim of v and out."""
        return self.head_dim if self.value_dim is None else self.value_dim


def tries(device: torch.device) -> bool:
    """Return True if kernels are tried on a device."""
    return device.type in DEVICES and has_device(device.type)


def fault(
    kernel: AttentionKernel, kind: Kind, tiles: tuple[TrialTile, ...] = TILES, kept: Verdicts | None = None
) -> str | None:
    """Say why a kernel is not to be trusted with such calls; "": it is. Tries what was never tried, else asks nothing.

    Within a capture nothing is tried: None, where that is wanted. Raises what is no verdict on the kernel, such as
    memory that ran out; and what broke the device.
    """
    kept = verdicts() if kept is None else kept
    if isinstance(kernel, CappingKernel) and kernel.softcap:
        kernel = kernel.capped(SOFTCAP)
    for tile in tiles if kernel.name not in EXEMPT else ():
        if _unsafe(kernel, tile.patch):
            continue
        key = _key(kernel, kind, tile)
        reason = kept.known(key)
        reason = verdicts(NOWHERE).known(key) if reason is None else reason
        if reason is None:
            if _capturing(kind.device):
                return None
            reason = _recorded(kernel, kind, tile, key, kept)
        if reason:
            return reason
    return ""


def _unsafe(kernel: AttentionKernel, patch: Patch) -> str | None:
    asked: Callable[[Patch], str | None] | None = getattr(kernel, "unsafe", None)
    return None if asked is None else asked(patch)


def _recorded(kernel: AttentionKernel, kind: Kind, tile: TrialTile, key: str, kept: Verdicts) -> str:
    """Return what the trial finds, once it is kept."""
    device_of(kind.device).stream_clock()  # raises what went wrong before, for which this kernel is not to blame
    try:
        reason = _tried(kernel, kind, tile)
    except Exception as error:
        if ran_out(error) or asserted_here(error):
            raise
        text = str(error).lower()
        reason = f"tried on {tile} {kind.direction}, it raised {type(error).__name__}: {one_line(error, MOST_SAID)}"
        verdicts(NOWHERE).record(key, reason)
        if "no kernel image" not in text and any(each in text for each in DEVICE_FAILED):
            raise  # nothing else runs on this device in this process; another stream may be to blame
        return reason
    kept.record(key, reason)
    return reason


def ran_out(error: Exception) -> bool:
    """Return True if an error means that a device had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or NO_MEMORY in str(error).lower()


def asserted_here(error: Exception) -> bool:
    """Return True for an assertion that is a mistake of ours: raised in this package, or nobody can say where.

    Packages check their arguments so: theirs mean that they do not take them.
    """
    if not isinstance(error, AssertionError):
        return False
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    return module.partition(".")[0] in ("", "tokenring")


def _key(kernel: AttentionKernel, kind: Kind, tile: TrialTile) -> str:
    head_dim, value_dim = (
        -(-dim // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE for dim in (kind.head_dim, kind.of_values)
    )
    dims = f"head dim {head_dim}" if kind.of_values == kind.head_dim else f"head dims {head_dim} and {value_dim}"
    capped = " soft-capped" if getattr(kernel, "softcap", 0.0) else ""
    return (
        f"attention {VERSION}: {kernel.name}{capped} {kind.direction}, {tile}, {kind.dtype}, {dims}, on "
        f"{_place(kind.device)}"
    )


@lru_cache(maxsize=64)
def _place(device: torch.device) -> str:
    """Return all that an outcome may depend on, but not which of several equal devices it is."""
    parts = [device_of(device).name, f"torch {torch.__version__}"]
    if device.type == "cuda":
        with suppress(OSError):
            parts.append(DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0])
        capability = torch.cuda.get_device_capability(device)
        parts += [f"capability {capability}", f"CUDA {torch.version.cuda}", f"cuDNN {cudnn_version()}"]
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            parts.append(f"{name} {version(name)}")
    return ", ".join(parts)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# ---------- trying


class _Given(NamedTuple):
    """A kernel's operands, rounded to its dtype, as float64 on the CPU: [1, H, tokens, D], [1, H, tokens]."""

    q: torch.Tensor
    dout: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    whole_out: torch.Tensor
    whole_lse: torch.Tensor


def _tried(kernel: AttentionKernel, kind: Kind, tile: TrialTile) -> str:
    """Return what is wrong with what it computes; "": nothing."""
    given, scale = _operands(tile, kind, _plain(kernel)), 1 / math.sqrt(kind.head_dim)
    found = _forward if kind.direction == "forward" else _backward
    with torch.inference_mode(False), torch.no_grad():
        for name, made, right in found(kernel, given, kind, tile.patch, scale):
            error = _error(made.to("cpu", torch.float64), right, name == "lse")
            if not error <= (LSE_LIMIT if name == "lse" else LIMIT):  # NaN too
                text = f"is off by {error:.2g}" if math.isfinite(error) else "has numbers that are not finite"
                return f"tried on {tile} {kind.direction}, its {name} {text}"
    return ""


def _plain(kernel: AttentionKernel) -> AttentionKernel:
    """Return what computes the same in plain torch."""
    softcap = getattr(kernel, "softcap", 0.0)
    return Reference().capped(softcap) if softcap else Reference()


def _operands(tile: TrialTile, kind: Kind, plain: AttentionKernel) -> _Given:
    random = torch.Generator(device="cpu").manual_seed(1)

    def block(tokens: int, heads: int, dim: int) -> torch.Tensor:
        made = torch.randn(1, tokens, heads, dim, generator=random, dtype=torch.float64, device="cpu")
        return made.to(kind.dtype).double().transpose(1, 2)

    patch, (q_heads, kv_heads) = tile.patch, HEADS
    dims = kind.head_dim, kind.of_values
    q, dout = (block(patch.rows, q_heads, dim) for dim in dims)
    k, v = (block(REST + patch.cols, kv_heads, dim) for dim in dims)
    assert patch.high is not None  # so that columns before are seen by all
    whole = Patch(0, patch.rows, 0, REST + patch.cols, None, patch.high + REST)
    out, lse = plain.forward(q, k, v, patch=whole, scale=1 / math.sqrt(kind.head_dim))
    return _Given(q, dout, k[:, :, REST:], v[:, :, REST:], out, lse)


Compared = tuple[tuple[str, torch.Tensor, torch.Tensor], ...]  # name, what was made, what is right


def _forward(kernel: AttentionKernel, given: _Given, kind: Kind, patch: Patch, scale: float) -> Compared:
    operands = given.q, given.k, given.v
    made = kernel.forward(*(_moved(x, kind) for x in operands), patch=patch, scale=scale)
    right = _plain(kernel).forward(*operands, patch=patch, scale=scale)
    return _compared(("out", "lse"), made, right)


def _backward(kernel: AttentionKernel, given: _Given, kind: Kind, patch: Patch, scale: float) -> Compared:
    """Compute by the output, and by delta, as schedules give them."""
    operands = given.dout, given.q, given.k, given.v
    lse, delta = given.whole_lse, row_dot(given.dout, given.whole_out)
    right = _plain(kernel).backward(*operands, lse, delta, patch=patch, scale=scale)
    dout, q, k, v, out = (_moved(x, kind) for x in (*operands, given.whole_out))
    lse, delta = (x.to(kind.device, torch.float32) for x in (lse, delta))
    by_out = kernel.backward(dout, q, k, v, lse, None, out=out, patch=patch, scale=scale)
    by_delta = kernel.backward(dout, q, k, v, lse, delta, patch=patch, scale=scale)
    names = ("dq", "dk", "dv")
    return _compared(names, by_out, right) + _compared(names, by_delta, right)


def _moved(x: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return [1, H, tokens, D] as it lies in a slot: all heads of a token together."""
    return x.transpose(1, 2).to(kind.device, kind.dtype).contiguous().transpose(1, 2)


def _compared(
    names: tuple[str, ...], made: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]
) -> Compared:  # fmt: skip
    return tuple(zip(names, made, right, strict=True))


def _error(made: torch.Tensor, right: torch.Tensor, absolute: bool) -> float:
    """Return the largest error of a row, relative to its size or, where that is less, to the usual size of rows."""
    if absolute:
        return float((made - right).abs().max())
    sizes = right.norm(dim=-1)
    usual = sizes.square().mean().sqrt()
    return float(((made - right).norm(dim=-1) / torch.maximum(sizes, usual)).max())
