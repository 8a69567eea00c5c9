"""Changes of Megatron's layer specs, which put our attention and our linear layers into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from tokenring.api.arguments import check_schedule_name
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.megatron.arguments import check_linear_options, check_options
from tokenring.integrations.megatron.attention import TokenRingAttention
from tokenring.integrations.megatron.latents import UP, SendsLatents, latent_layer, with_latents
from tokenring.integrations.megatron.version import check_version

OTHER_ATTENTION = ("cross_attention",)  # keys of another sequence: stays what it is
LINEARS = (
    "linear_qkv", "linear_q", "linear_kv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_proj",
    "linear_fc1", "linear_fc2",
)  # fmt: skip
EXPERTS = ("experts",)  # their messages go from token to expert, not from rank to rank of a layer


def use_tokenring(
    spec: Any, schedule: str = "auto", *, any_version: bool = False, latents: bool = False, **options: Any
) -> Any:
    """Return the spec with our attention as core_attention of every self-attention in it; the given one is unchanged.

    spec: a ModuleSpec of a layer or a block, a TransformerBlockSubmodules, or a list of them.
    schedule: for layers whose cp_comm_type does not name one.
    any_version: also take a Megatron-core outside the range that tokenring knows.
    latents: in layers of multi-latent attention, send latents in place of keys and values where they are fewer bytes;
    "auto" does where that is predicted to be no slower. Such a layer refuses what it cannot do when it is made.
    options: of ContextParallel: transport, topology, memory_limit_bytes, kernel, pieces, timeout_seconds.

    Raises ConfigurationError for a spec without self-attention and for unknown names, UnsupportedError for an unknown
    version.
    """
    if not any_version:
        check_version()
    check_schedule_name(schedule)
    check_options(options)
    from megatron.core.transformer.spec_utils import ModuleSpec

    params = {"schedule": schedule, "any_version": any_version, **options}
    ours = ModuleSpec(module=TokenRingAttention, params=params)

    def attention(name: str, value: Any) -> Any:
        return ours if name == "core_attention" and value is not None else value

    def latent(name: str, value: Any) -> Any:
        layer = latent_layer(value)
        return value if layer is None else replace(value, module=with_latents(layer))

    changed = _changed(spec, attention, OTHER_ATTENTION)
    if changed is spec:
        raise ConfigurationError(
            f"there is no core_attention of a self-attention in this {type(spec).__name__}: give a layer spec such as "
            f"get_gpt_layer_local_spec() makes, a block spec, or TransformerBlockSubmodules"
        )
    changed = _changed(changed, latent, OTHER_ATTENTION) if latents else changed
    if latents and not _sends_latents(changed):
        raise ConfigurationError(
            f"latents=True, and no layer in this {type(spec).__name__} has multi-latent attention with a {UP}: "
            f"make the spec with multi_latent_attention=True, or leave latents out"
        )
    return changed


def use_tokenring_linears(spec: Any, schedule: str = "auto", *, any_version: bool = False, **options: Any) -> Any:
    """Return the spec with our column and row linears in attention and MLP; the given one is unchanged.

    spec: of a layer or a block, whose linears are Megatron's own (get_gpt_layer_local_spec), as for use_tokenring.
    schedule: "auto", or one where weights stay, as "direct-q" or "tokenring".
    any_version: also take a Megatron-core outside the range that tokenring knows.
    options: of TensorParallel: transport, topology, partials, kernel, timeout_seconds.

    Experts, the output layer, and the down-projections of latent attention stay Megatron's. Raises UnsupportedError
    for TransformerEngine's linears and an unknown version, ConfigurationError for a spec without linears and for
    unknown names.
    """
    if not any_version:
        check_version()
    check_schedule_name(schedule)
    _check_rows_move(schedule)
    check_linear_options(options)
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from tokenring.integrations.megatron.linears import SplitLinear, linears

    made = linears({"schedule": schedule, **options}, any_version)
    ours = list(zip((ColumnParallelLinear, RowParallelLinear), made, strict=True))

    def instead_of(module: Any) -> type | None:
        """Return our class in place of Megatron's, or of one that was put there before."""
        for theirs, own in ours:
            again = isinstance(module, type) and issubclass(module, SplitLinear) and issubclass(module, theirs)
            if module is theirs or again:
                return own
        return None

    def linear(name: str, value: Any) -> Any:
        if name not in LINEARS or value is None:
            return value
        module = getattr(value, "module", value)
        found = instead_of(module)
        if found is None:
            raise UnsupportedError(
                f"{name} is {getattr(module, '__name__', module)}, which is not replaced: use_tokenring_linears takes "
                f"Megatron's ColumnParallelLinear and RowParallelLinear, as get_gpt_layer_local_spec() has them"
            )
        return found if module is value else replace(value, module=found)

    changed = _changed(spec, linear, EXPERTS)
    if changed is spec:
        raise ConfigurationError(
            f"there is no {LINEARS[0]}, {LINEARS[-2]} or other linear layer in this {type(spec).__name__}: give a "
            f"layer spec such as get_gpt_layer_local_spec() makes, a block spec, or TransformerBlockSubmodules"
        )
    return changed


def _check_rows_move(schedule: str) -> None:
    """Raise ConfigurationError unless weights stay, as the shapes between Megatron's layers want."""
    if schedule.startswith("auto"):
        if schedule != "auto":
            raise ConfigurationError(f"schedule={schedule!r}: linear layers take 'auto', or one by name")
        return
    from tokenring.schedule.families.registry import parse

    if parse(schedule).family.moves != "Q":
        raise ConfigurationError(
            f"schedule {schedule!r} moves weights, and Megatron's layers keep theirs: take one where weights stay, as "
            f"'direct-q' or 'tokenring'"
        )


def _changed(part: Any, change: Callable[[str, Any], Any], stays: tuple[str, ...]) -> Any:
    """Return a part of a spec with its fields changed, and those of all parts in it; the part itself if none was.

    change: from a field's name and value to its new value. stays: names of fields that are left as they are.
    """
    if isinstance(part, (list, tuple)):
        new = [_changed(each, change, stays) for each in part]
        return type(part)(new) if any(a is not b for a, b in zip(new, part, strict=True)) else part
    if not is_dataclass(part) or isinstance(part, type):
        return part
    found = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
    changes = {}
    for name, value in found.items():
        if name not in stays:
            new_value = change(name, value)
            new_value = _changed(value, change, stays) if new_value is value else new_value
            if new_value is not value:
                changes[name] = new_value
    return replace(part, **changes) if changes else part


def _sends_latents(part: Any) -> bool:
    """Tell whether latents travel in any layer of a spec."""
    if isinstance(part, (list, tuple)):
        return any(_sends_latents(each) for each in part)
    if not is_dataclass(part) or isinstance(part, type):
        return False
    layer = latent_layer(part)
    if layer is not None and issubclass(layer, SendsLatents):
        return True
    return any(_sends_latents(getattr(part, field.name)) for field in fields(part) if field.init)
