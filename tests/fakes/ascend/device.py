"""The device "npu" on stock torch: tensors that hold a CPU tensor, refuse what an NPU refuses, and count waits.

`install(count)` renames PrivateUse1 to npu for the whole process, and cannot be undone: call it in ranks of
their own (ascend.ranks), never in pytest's process. To torch's C++ every such tensor lies on npu:0, because its
Python backend has one device and autograd one queue for each; the index that Python sees is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from ascend import module

CROSSING = {"aten::copy_", "aten::_to_copy"}  # what may read one device and write another
# The host waits for the device in these. `host_waits` counts them: the step loop must not contain any.
WAITING = {
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero", "aten::masked_select",
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_dim_consecutive", "aten::unique_consecutive",
    "aten::bincount",
}  # fmt: skip
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
# Refused, with torch's own error for what a device does not offer.
NO_STORAGE = {"aten::set_", "aten::resize_", "aten::_resize_output_"}
# Factories that torch composes of an empty tensor that they resize, which a wrapper cannot follow.
RESIZED = (
    "arange", "arange.start", "arange.start_step", "linspace", "logspace", "eye", "eye.m", "randperm", "range",
    "range.step", "tril_indices", "triu_indices",
)  # fmt: skip

host_waits: list[str] = []
Operator = Callable[..., Any]
operators: dict[str, Operator] = {}  # "npu::name" → what computes it, given the tensors as they came
_libraries: list[torch.library.Library] = []


class NpuTensor(torch.Tensor):
    """A tensor on an emulated NPU. `raw` gives the CPU tensor that is its memory."""

    _raw: torch.Tensor
    _index: int

    @staticmethod
    def of(inner: torch.Tensor, index: int) -> NpuTensor:
        """One on this memory, of the device of that index."""
        made: NpuTensor = torch.Tensor._make_wrapper_subclass(
            NpuTensor, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=_first_device(), requires_grad=False,
        )  # fmt: skip
        made._raw, made._index = inner, index
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("npu", self._index)

    def get_device(self) -> int:
        return self._index

    def data_ptr(self) -> int:
        return self._raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory itself, to tell whether two tensors share it."""
        return self._raw.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        """Noted in `module.recorded`: memory here is never reused early."""
        if not isinstance(stream, module.Stream):
            raise TypeError(f"record_stream wants a torch.npu.Stream, not {type(stream).__name__}")
        module.recorded.append((self._raw.untyped_storage().data_ptr(), stream))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        made = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made.detach(), self.requires_grad)
        memo[id(self)] = made
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"NpuTensor({self._raw!r}, device='npu:{self._index}')"


@cache
def _first_device() -> torch.device:
    return torch.device("npu:0")


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Tensor.to, which in C++ knows npu:0 only: names the current device, and asks for moves between two as copies."""
    if args and isinstance(args[0], torch.Tensor):
        return _to(self, args[0].device, args[0].dtype, *args[1:], **kwargs)
    asked = kwargs.get("device", args[0] if args else None)
    if isinstance(asked, torch.dtype) or asked is None or torch.device(asked).type != "npu":
        return torch._C.TensorBase.to(self, *args, **kwargs)
    index = _index_of(torch.device(asked))
    if isinstance(self, NpuTensor) and self._index != index:
        kwargs["copy"] = True
    if "device" in kwargs:
        kwargs["device"] = torch.device("npu", index)
    else:
        args = (torch.device("npu", index), *args[1:])
    return torch._C.TensorBase.to(self, *args, **kwargs)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor that is the memory of an NPU tensor: same shape, strides and storage. TypeError for others."""
    if not isinstance(tensor, NpuTensor):
        raise TypeError(f"this tensor is on {tensor.device}, not on an emulated NPU")
    return tensor._raw


def wrap(inner: torch.Tensor, index: int | None = None) -> NpuTensor:
    """An NPU tensor on this memory; on the current device if no index is given."""
    return NpuTensor.of(inner, module.current_device() if index is None else index)


def install(count: int = 8) -> None:
    """`count` NPUs in this process. Calling it again changes their number only."""
    module.set_device_count(count)
    if _libraries:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("npu", module)
    torch.Tensor.to = _to  # type: ignore[method-assign,assignment]
    torch.tensor, torch.as_tensor = _over_the_host(torch.tensor), _over_the_host(torch.as_tensor)
    library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(_fallback, "PrivateUse1")  # type: ignore[no-untyped-call]
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    factories = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in RESIZED:
        factories.impl(name, _factory(name), "PrivateUse1")  # type: ignore[no-untyped-call]
    _libraries.append(factories)


def _over_the_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.tensor with device="npu": made on the CPU and copied, since torch keeps Python out while it makes one."""

    def made(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "npu":
            asked = {"requires_grad": True} if requires_grad else {}
            return make(data, *args, device=device, **asked, **kwargs)
        moved = make(data, *args, **kwargs).to(device)
        return moved.requires_grad_() if requires_grad else moved

    return made


def _factory(name: str) -> Operator:
    packet, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *args, **kwargs: _run(func, args, kwargs)


def _fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What reaches the device without an operand on it: factories."""
    return _run(func, args, kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not kwargs and _is_plain_view(func):
        return _viewed(func._op(args[0]._raw, *args[1:]), args[0]._index)
    schema = func._schema
    name = schema.name
    if name in operators:
        return operators[name](*args, **kwargs)
    if name in NO_STORAGE:
        raise NotImplementedError(f"{name} changes what memory a tensor has; the emulated NPU does not do that")
    leaves: list[torch.Tensor] = []
    plain_args, plain_kwargs = _plain(args, leaves), dict(zip(kwargs, _plain(kwargs.values(), leaves), strict=True))
    if name not in CROSSING:
        _check_one_device(name, leaves)
    elif name == "aten::copy_" or kwargs.get("device") is not None:
        _note_crossing(name, args, kwargs)
    if name in WAITING or _asks_for_a_size(name, args, kwargs):
        host_waits.append(name)
    _check_generator(kwargs)
    index, back = _where(leaves, kwargs)
    made = func._op(*plain_args, **plain_kwargs)  # past rules of torch's that are for tensors without memory
    if name == "aten::copy_":
        return args[0]
    known = {id(x._raw): x for x in leaves if isinstance(x, NpuTensor)}
    if schema.is_mutable:
        _check_kept_shapes(name, known.values())
    return made if back else _wrapped(made, known, index)


@cache
def _is_plain_view(func: Any) -> bool:
    """Whether it gives views of its first operand, which is its only tensor: most of what a program does is that."""
    schema = func._schema
    tensors = [each.name for each in schema.arguments if "Tensor" in str(each.type)]
    one = len(tensors) == 1 and tensors == [each.name for each in schema.arguments[:1]]
    return bool(func.is_view and one and not schema.is_mutable and schema.name not in NO_STORAGE)


def _plain(values: Iterable[Any], leaves: list[torch.Tensor]) -> list[Any]:
    """Arguments as the CPU takes them; the tensors among them, and in their lists, go to `leaves` as they are.

    Every operator of every rank comes here: torch's pytree takes ten times as long.
    """
    made: list[Any] = []
    for x in values:
        if isinstance(x, torch.Tensor):
            leaves.append(x)
            made.append(x._raw if isinstance(x, NpuTensor) else x)
        elif isinstance(x, (list, tuple)):
            made.append(_plain(x, leaves))
        else:
            made.append(torch.device("cpu") if isinstance(x, torch.device) and x.type == "npu" else x)
    return made


def tensors_in(value: Any) -> list[torch.Tensor]:
    """An argument of an operator, if it is a tensor; those in it, if it is a list."""
    leaves: list[torch.Tensor] = []
    _plain([value], leaves)
    return leaves


def _wrapped(made: Any, known: dict[int, NpuTensor], index: int) -> Any:
    """In-place operators and those with out= give back the tensor that they were given."""
    if isinstance(made, (list, tuple)):
        return type(made)([_wrapped(each, known, index) for each in made])
    if not isinstance(made, torch.Tensor) or isinstance(made, NpuTensor):
        return made
    return known[id(made)] if id(made) in known else NpuTensor.of(made, index)


def _viewed(made: Any, index: int) -> Any:
    return NpuTensor.of(made, index) if isinstance(made, torch.Tensor) else type(made)(_viewed(x, index) for x in made)


def _where(leaves: list[torch.Tensor], kwargs: dict[str, Any]) -> tuple[int, bool]:
    """The index of the device of the results, and whether they go to the CPU instead."""
    asked = kwargs.get("device")
    if asked is not None:
        asked = torch.device(asked)
        return (_index_of(asked), False) if asked.type == "npu" else (0, True)
    held = next((x._index for x in leaves if isinstance(x, NpuTensor)), None)
    return module.current_device() if held is None else held, False


def _index_of(device: torch.device) -> int:
    index = module.current_device() if device.index is None else device.index
    module.check_index(index)
    return index


def _check_one_device(name: str, leaves: list[torch.Tensor]) -> None:
    """All operands on one NPU; a CPU tensor without dimensions counts as a number."""
    held = [x for x in leaves if isinstance(x, NpuTensor) or x.dim() > 0]
    if len({x._index if isinstance(x, NpuTensor) else x.device for x in held}) < 2:
        return
    other = next(x.device for x in held if x.device != held[0].device)
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, "
        f"{held[0].device} and {other}! (when computing {name})"
    )


def _asks_for_a_size(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host must hear from the device how large a result is: how many are True, how often rows repeat."""
    if name in INDEXING:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return name == "aten::repeat_interleave" and kwargs.get("output_size") is None


def _note_crossing(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """A copy between host and device, either way, is waited for unless it is said not to block."""
    source = args[1] if name == "aten::copy_" else args[0]
    target = args[0].device if name == "aten::copy_" else torch.device(kwargs["device"])
    blocking = not (args[2] if name == "aten::copy_" and len(args) > 2 else kwargs.get("non_blocking", False))
    if blocking and "cpu" in (ways := (source.device.type, target.type)) and "npu" in ways:
        host_waits.append(f"{name} {'to' if target.type == 'cpu' else 'from'} the host")


def _check_generator(kwargs: dict[str, Any]) -> None:
    if kwargs.get("generator") is not None:
        raise RuntimeError("Expected a 'npu' device type for generator but found 'cpu'")


def _check_kept_shapes(name: str, tensors: Any) -> None:
    """An out= of the wrong size would be resized, which a wrapper cannot follow (and torch has deprecated)."""
    for x in tensors:
        inner = x._raw
        if x.shape != inner.shape or x.stride() != inner.stride() or x.dtype != inner.dtype:
            raise NotImplementedError(f"{name} changed a tensor's shape in place, {tuple(x.shape)} to {inner.shape}")
