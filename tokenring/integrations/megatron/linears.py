"""Megatron-core's column and row linears, whose exchanges over the tensor-parallel group are schedules of ours.

Weights, biases, their initialisation, attributes and checkpoints are those of Megatron's classes. Megatron's words:
s tokens of a context-parallel rank, b batch, h hidden size, n features, p tensor-parallel ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from tokenring.api.collectives import all_reduce
from tokenring.api.linear import column_linear, row_linear
from tokenring.api.tensor_parallel import TensorParallel
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.megatron.arguments import check_linear, check_linear_kernel
from tokenring.integrations.megatron.contexts import shared_by
from tokenring.integrations.megatron.groups import SELF, kept, tensor_group_of_layer
from tokenring.integrations.megatron.options import framework_seconds
from tokenring.integrations.megatron.version import check_version, warn_if_not_run

if TYPE_CHECKING:
    from tokenring.integrations.megatron.groups import KeptGroup

Result = tuple[torch.Tensor, torch.Tensor | None]


class Parallels:
    """The TensorParallel of a group, made at its first use: all layers with the same options share it."""

    def __init__(self, group: KeptGroup, options: Mapping[str, Any]) -> None:
        self.group, self.options = group, dict(options)
        self._made: TensorParallel | None = None

    def __deepcopy__(self, memo: object) -> Parallels:
        """Return the object itself: copies of a layer share what layers share."""
        return self

    @property
    def parallel(self) -> TensorParallel:
        """The TensorParallel. All ranks of the group get here together."""
        if self._made is None:
            self._made = TensorParallel(self.group, **self.options)
        return self._made

    def close(self) -> None:
        """Give back buffers and connections."""
        if self._made is not None:
            self._made.close()

    def release(self) -> None:
        """Give back buffers and connections; the next call makes them anew. All ranks of the group call it together."""
        self.close()
        self._made = None


class _Theirs(Protocol):
    """The attributes of Megatron's layers that are read here."""

    config: Any
    weight: torch.Tensor
    bias: torch.Tensor | None
    skip_bias_add: bool
    sequence_parallel: bool
    explicit_expert_comm: bool
    gradient_accumulation_fusion: bool


class SplitLinear:
    """The part that both layers have alike. `linears` puts a class of Megatron's behind it."""

    options: Mapping[str, Any] = {}
    any_version = False

    def __init__(self, input_size: int, output_size: int, *, config: Any, **more: Any) -> None:
        if not self.any_version:
            warn_if_not_run(check_version())
        check_linear(config, more)
        check_linear_kernel(config, self.options.get("kernel", "auto"))
        fused = config.gradient_accumulation_fusion
        # Megatron's classes want Apex for it, and ours do not.
        theirs = _with(config, gradient_accumulation_fusion=False) if fused else config
        super().__init__(input_size, output_size, config=theirs, **more)  # type: ignore[call-arg]
        self.config, self.gradient_accumulation_fusion = config, fused
        group = SELF if self._theirs.explicit_expert_comm else tensor_group_of_layer(config, more.get("tp_group"))
        options = dict(self.options)
        if "timeout_seconds" not in options and (seconds := framework_seconds(config, group)) is not None:
            options["timeout_seconds"] = seconds
        self._split = group is not SELF
        self._parallels = shared_by(Parallels, kept(group), options)
        self._alone = shared_by(Parallels, SELF, {})

    @property
    def _theirs(self) -> _Theirs:
        return cast("_Theirs", self)

    @property
    def _ours(self) -> bool:
        """True if ranks exchange something here. Megatron says of shared experts after they are made that they do."""
        return self._split and not self._theirs.explicit_expert_comm

    def _kept(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight, of which main_grad is not seen where Megatron wants the gradient from autograd."""
        return weight if self.gradient_accumulation_fusion else weight.view_as(weight)

    def _product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return [1, s b, n] of rows [1, s b, h] and a weight [n, h], on this rank alone."""
        if self.gradient_accumulation_fusion:
            return column_linear(rows, weight, self._alone.parallel)
        return torch.nn.functional.linear(rows, weight)

    def _checked(self, tp: TensorParallel, x: torch.Tensor, weight: torch.Tensor, width: int, cut: int) -> torch.Tensor:
        """Return x [s, ..., width] as rows [1, s ..., width]; all ranks hear what this one refuses.

        cut: among how many ranks s has to divide.
        """
        with tp.refusing("forward", x):
            if x.dim() < 2 or x.shape[-1] != width:
                raise ConfigurationError(
                    f"{type(self).__name__} was given {list(x.shape)}: give [s, b, {width}], what its weight of "
                    f"{list(weight.shape)} multiplies"
                )
            if x.shape[0] % cut:
                raise ConfigurationError(
                    f"{type(self).__name__} was given {x.shape[0]} tokens, which {cut} tensor-parallel ranks do not "
                    f"divide under sequence_parallel: pad the sequence"
                )
            if self.gradient_accumulation_fusion and hasattr(weight, "__fsdp_param__"):
                raise UnsupportedError(
                    "gradient_accumulation_fusion of Megatron-FSDP's parameters is not supported: set "
                    "config.gradient_accumulation_fusion=False"
                )
        return x.reshape(1, -1, width)


class ColumnLayer(SplitLinear):
    """Megatron's ColumnParallelLinear by a schedule: gather tokens, and multiply those that are there meanwhile."""

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Result:
        """Return out [s, b, n/p] and the bias that is left to add, of tokens [s/p, b, h] under sequence_parallel.

        Without it tokens are [s, b, h], the same on all ranks; backward reduces their gradient.
        Raises ConfigurationError and UnsupportedError, on all ranks; PeerLost.
        """
        if not self._ours:
            theirs: Result = super().forward(input_, weight, runtime_gather_output)  # type: ignore[misc]
            return theirs
        of, tp = self._theirs, self._parallels.parallel
        with tp.refusing("forward", input_):
            if runtime_gather_output:
                raise UnsupportedError("runtime_gather_output is not supported: keep Megatron's own layer for it")
            weight = of.weight if weight is None else weight
            if weight is None:
                raise ConfigurationError("the layer has no weight of its own: give it one in the call")
        rows = self._checked(tp, input_, weight, weight.shape[1], 1)
        if of.sequence_parallel:
            c = column_linear(rows, self._kept(weight), tp)
        else:
            c = self._product(_Copied.apply(rows, tp), weight)  # type: ignore[no-untyped-call]
        c = c.view(-1, *input_.shape[1:-1], c.shape[-1])
        if of.skip_bias_add or of.bias is None:
            return c, of.bias
        return c + of.bias, None


class RowLayer(SplitLinear):
    """Megatron's RowParallelLinear by a schedule: multiply, and reduce what is done meanwhile."""

    def forward(self, input_: torch.Tensor) -> Result:
        """Return out [s/p, b, h] under sequence_parallel, else [s, b, h], and the bias that is left to add.

        input_: [s, b, n/p], this rank's features.
        Raises ConfigurationError and UnsupportedError, on all ranks; PeerLost.
        """
        if not self._ours:
            theirs: Result = super().forward(input_)  # type: ignore[misc]
            return theirs
        of, tp = self._theirs, self._parallels.parallel
        cut = tp.world_size if of.sequence_parallel else 1
        rows = self._checked(tp, input_, of.weight, of.weight.shape[1], cut)
        if of.sequence_parallel:
            y = row_linear(rows, self._kept(of.weight), tp)
        else:
            y = _Summed.apply(self._product(rows, of.weight), tp)  # type: ignore[no-untyped-call]
        y = y.view(-1, *input_.shape[1:-1], y.shape[-1])
        if of.skip_bias_add or of.bias is None:
            return y, of.bias
        return y + of.bias, None


def linears(options: Mapping[str, Any], any_version: bool) -> tuple[type, type]:
    """Return the classes of column and row linears, for a layer spec. options: of TensorParallel."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    own = {"options": dict(options), "any_version": any_version, "__module__": __name__}
    return (
        type("TokenRingColumnParallelLinear", (ColumnLayer, ColumnParallelLinear), dict(own)),
        type("TokenRingRowParallelLinear", (RowLayer, RowParallelLinear), dict(own)),
    )


class _Copied(torch.autograd.Function):
    """A tensor that all ranks have alike: forward does nothing, backward adds up the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(dx, ctx.tp), None


class _Summed(torch.autograd.Function):
    """The sum over the ranks, in forward; in backward all have its gradient alike."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        return all_reduce(y, tp)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


def _with(config: Any, **changes: Any) -> Any:
    """Return a copy of Megatron's config, without its checks, which were done."""
    made = copy.copy(config)
    for name, value in changes.items():
        setattr(made, name, value)
    return made
