"""The sizes of one attention call, as the planner and the byte counts need them; and its request.

By requests plans, programs and descriptions are kept.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.sequence.layout import Layout, as_integer
from tokenring.sequence.mask import Mask

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Workload:
    """q [batch, q_length, q_heads, head_dim] over all ranks; k likewise with kv_length and kv_heads.

    value_dim: the last axis of v and of the output, where it is not head_dim (multi-latent attention). None: head_dim.
    """

    batch: int
    q_length: int
    kv_length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    value_dim: int = None  # type: ignore[assignment]  # None where it is made: whoever reads it finds a number

    def __post_init__(self) -> None:
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        for name in ("batch", "q_length", "kv_length", "q_heads", "kv_heads", "head_dim", "value_dim"):
            if (as_integer(getattr(self, name)) or 0) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: every size must be an integer from 1 on")
        if self.q_heads % self.kv_heads:
            raise ConfigurationError(
                f"{self.q_heads} query heads are not a multiple of {self.kv_heads} kv heads: "
                f"repeat or drop kv heads so that each serves equally many query heads"
            )
        if self.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise UnsupportedError(f"attention in {self.dtype} is not supported; use one of {known}")

    def __repr__(self) -> str:
        said = [each.name for each in fields(self) if each.name != "value_dim" or self.value_dim != self.head_dim]
        return f"Workload({', '.join(f'{name}={getattr(self, name)!r}' for name in said)})"

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes by name, the dtype as "bfloat16"; value_dim only where it is not head_dim."""
        found = asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}
        if self.value_dim == self.head_dim:
            del found["value_dim"]
        return found

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def kv_dim(self) -> int:
        """Elements of k and v together, of a token and kv head; as many are q and out of a query head."""
        return self.head_dim + self.value_dim

    def ring_bytes(self, ranks: int) -> int:
        """Return the bytes of k and v of one of so many ranks: a ring sends so much in a step, others about that."""
        return self.batch * self.kv_length * self.kv_heads * self.kv_dim * self.itemsize // ranks

    def q_head_range(self, group: int, groups: int) -> tuple[int, int]:
        """Return the query heads [low, high) of the group-th of `groups` head groups."""
        self._check_groups(groups)
        return group * self.q_heads // groups, (group + 1) * self.q_heads // groups

    def kv_head_range(self, group: int, groups: int) -> tuple[int, int]:
        """Return the kv heads [low, high) of those query heads; several groups share one where groups > kv_heads."""
        self._check_groups(groups)
        return group * self.kv_heads // groups, -(-(group + 1) * self.kv_heads // groups)

    def _check_groups(self, groups: int) -> None:
        uneven = groups % self.kv_heads if groups > self.kv_heads else self.kv_heads % groups
        if self.q_heads % groups or uneven:
            raise ConfigurationError(
                f"{self.q_heads} query heads over {self.kv_heads} kv heads do not split into {groups} equal head groups"
            )


@dataclass(frozen=True)
class Request:
    """One kind of attention call, as this rank sees it.

    training: gradients are enabled. differentiable: an input wants some, also where they are not enabled now, as in a
    reentrant checkpoint; ranks may differ in that. softcap: of scores; 0: none. layout: by which the tensors are
    cut; None: the context's. backward: a plan is for both passes.
    """

    workload: Workload
    mask: Mask
    scale: float
    training: bool
    device: torch.device
    differentiable: bool = field(default=False, compare=False)
    softcap: float = 0.0
    layout: Layout | None = None
    backward: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "backward", self.training or self.differentiable)
