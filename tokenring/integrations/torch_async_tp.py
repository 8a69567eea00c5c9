"""Async tensor parallelism of torch.compile by our schedules, on every device that has a transport.

    tp = tr.TensorParallel(mesh["tp"])
    with async_tensor_parallel(tp):                 # around whatever compiles, forward and backward
        train(torch.compile(model))

torch's pass finds an all-gather before a product and a reduce-scatter behind one in compiled graphs, and calls
`symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter` instead. torch has these for CUDA with NCCL; here
they are for CPU and PrivateUse1 (NPUs). A graph knows its group by name, and so do they: of a group without a
TensorParallel here they call torch's plain collectives.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from tokenring.api.fused import all_gather_matmul, matmul_reduce_scatter
from tokenring.api.tensor_parallel import DTYPES, TensorParallel, check_parallel
from tokenring.errors import ConfigurationError, UnsupportedError

if TYPE_CHECKING:
    from torch.fx import Graph, Node

KNOWN = ("2.13",)  # releases of torch whose pass was run with this
DEVICES = ("CPU", "PrivateUse1")
GATHERED, SCATTERED = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"

# State of the process: an operator knows a group by its name alone. It holds nobody alive.
_parallels: WeakValueDictionary[str, TensorParallel] = WeakValueDictionary()
_libraries: list[torch.library.Library] = []


@contextmanager
def async_tensor_parallel(*parallels: TensorParallel) -> Iterator[None]:
    """Compile inside with the layers of these groups by our schedules.

    parallels: one TensorParallel for each group, on all of its ranks, whose weights stay. Graphs that were compiled
    inside call plain collectives again outside. Another post_grad_custom_post_pass runs first.
    Raises UnsupportedError for a torch whose pass is not known, ConfigurationError for no or two TensorParallels of a
    group, and BackendUnavailable where torch.distributed is missing.
    """
    names = _names(parallels)
    found = _pass()
    _register()
    from torch._inductor import config

    before = config.post_grad_custom_post_pass
    others = before if isinstance(before, (list, tuple)) else () if before is None else (before,)
    passes = [*others, found(tuple(names))]
    _parallels.update(zip(names, parallels, strict=True))
    try:
        with config.patch(post_grad_custom_post_pass=passes if others else passes[0]):
            yield
    finally:
        for name in names:
            _parallels.pop(name, None)


def _names(parallels: Sequence[TensorParallel]) -> list[str]:
    """Return the groups' names. Raises ConfigurationError."""
    if not parallels:
        raise ConfigurationError("async_tensor_parallel was given nothing: give the TensorParallel of each group")
    names: list[str] = []
    for each in parallels:
        check_parallel(each)
        if each.stays != "weights":
            raise ConfigurationError(f"{each} lets {each.stays} stay: torch's layers have weights that stay")
        group = each.group
        if group is None:
            raise ConfigurationError(f"{each} has one rank: leave it out, nothing of it is split")
        name = str(group.group_name)
        if name in names or name in _parallels:
            raise ConfigurationError(f"group {name!r} has a TensorParallel here already: give one for each group")
        names.append(name)
    return names


def _register() -> None:
    """Make the two operators known for devices for which torch has none, once. Raises UnsupportedError."""
    if _libraries:
        return
    import torch.distributed._symmetric_memory as plain

    made: Any = torch.library.Library("symm_mem", "IMPL")  # type: ignore[no-untyped-call]
    for name, ours, theirs in (
        (GATHERED, _gathered, plain._fused_all_gather_matmul_fallback),
        (SCATTERED, _scattered, plain._fused_matmul_reduce_scatter_fallback),
    ):
        for device in DEVICES:
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", device):
                raise UnsupportedError(f"symm_mem.{name} has a kernel for {device}, which is not replaced")
            made.impl(name, _or_plain(ours, theirs), device)
    _libraries.append(made)


def _or_plain(ours: Any, theirs: Any) -> Any:
    """Return the operator that calls ours where the group is known and the operands fit, else torch's own."""

    def call(x: torch.Tensor, weights: Any, *rest: Any, **more: Any) -> Any:
        tp = _parallels.get(rest[-1])  # the group's name
        dim = rest[-2]
        if tp is None or x.dtype not in DTYPES or not 0 <= dim < x.dim() - 1:
            return theirs(x, weights, *rest, **more)
        return ours(tp, x, weights, *rest, **more)

    return call


def _gathered(
    tp: TensorParallel, x: torch.Tensor, weights: list[torch.Tensor], dim: int, group: str, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gather x along dim and multiply it by each weight [D, N]; the ranks' rows come one after another."""
    first = x.movedim(dim, 0)
    shape = (first.shape[0] * tp.world_size, *first.shape[1:-1], -1)
    a, made = all_gather_matmul(first.reshape(-1, x.shape[-1]), weights, tp, return_A)
    whole, *products = (None if each is None else each.view(shape).movedim(0, dim) for each in (a, *made))
    return whole, [each for each in products if each is not None]


def _scattered(
    tp: TensorParallel, x: torch.Tensor, weight: torch.Tensor, how: str, dim: int, group: str
) -> torch.Tensor:
    """Multiply x by a weight [N, D], and return this rank's part along dim of the sum, or mean, over the ranks."""
    first = x.movedim(dim, 0)
    made = matmul_reduce_scatter(first.reshape(-1, x.shape[-1]), weight, tp)
    shape = (first.shape[0] // tp.world_size, *first.shape[1:-1], -1)
    return (made / tp.world_size if how == "avg" else made).view(shape).movedim(0, dim).contiguous()


# ---------- the pass


def _pass() -> Any:
    """Return the class of the pass. Raises UnsupportedError for a torch of another release."""
    if not str(torch.__version__).startswith(tuple(f"{each}." for each in KNOWN)):
        raise UnsupportedError(
            f"torch {torch.__version__} finds layers in graphs by functions that tokenring does not know; use "
            f"torch {' or '.join(KNOWN)}, or call tokenring.column_linear and row_linear in the model"
        )
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch._inductor.fx_passes import micro_pipeline_tp as found

    class FusedLayers(CustomGraphPass):
        """Fuse the layers of these groups; torch's own fuses for NCCL only, and asks nothing else of a group.

        What a new operator needs may stand behind it: torch sorts the graph after these passes.
        """

        def __init__(self, groups: tuple[str, ...]) -> None:
            self.groups = groups

        def __call__(self, graph: Graph) -> None:
            for each in found.find_all_gather_patterns(graph):
                if each.group_name in self.groups and _rows_move(each.shard_node, each.gather_dim):
                    _fuse_gather(found, graph, each)
            for scatter in found.find_reduce_scatter_patterns(graph):
                if scatter.group_name in self.groups and _rows_move(scatter.input_node, scatter.scatter_dim):
                    _fuse_scatter(found, graph, scatter)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,), ",".join(self.groups))

    return FusedLayers


def _rows_move(node: Node, dim: int) -> bool:
    """Return whether these are rows of a dtype that is known."""
    x = node.meta["val"]
    return x.dtype in DTYPES and 0 <= dim < x.dim() - 1


def _fuse_gather(found: Any, graph: Graph, gather: Any) -> None:
    """Put one operator in place of an all-gather and the products of what it gathers."""
    whole = gather.res_node
    products = [
        each
        for each in found._find_consumer_matmuls(whole)
        if type(each) is found._Matmul and whole not in each.arg_ancestor_nodes
    ]
    if not products:
        return
    with graph.inserting_before(gather.ag_node):
        fused = found._insert_fused_all_gather_matmul(
            graph, products, gather.shard_node, gather.gather_dim, gather.group_name
        )
        kept, made = (graph.call_function(operator.getitem, args=(fused, at)) for at in range(2))
        for at, each in enumerate(products):
            each.replace_with(graph.call_function(operator.getitem, args=(made, at)))
            each.erase()
        gather.replace_with(kept)
        gather.erase()
    if not kept.users:
        graph.erase_node(kept)
        fused.kwargs = {**fused.kwargs, "return_A": False}


def _fuse_scatter(found: Any, graph: Graph, scatter: Any) -> None:
    """Put one operator in place of a product and the reduce-scatter of it, if nobody else reads the product."""
    product = found._find_producer_matmul(scatter.input_node)
    nodes = scatter.match.nodes if hasattr(scatter.match, "nodes") else scatter.match
    if (
        type(product) is not found._Matmul
        or scatter.wait_tensor_node in product.arg_ancestor_nodes
        or not all(user in nodes for user in scatter.input_node.users)
    ):
        return
    shape = list(scatter.input_node.meta["val"].shape)
    with graph.inserting_before(scatter.wait_tensor_node):
        fused = found._insert_fused_matmul_reduce_scatter(
            graph, product, scatter.reduce_op, scatter.scatter_dim, scatter.group_name, scatter.scatter_dim, shape
        )
        scatter.replace_with(fused)
        scatter.erase()
        product.erase()
