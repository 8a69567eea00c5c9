"""Changes of Megatron's layer specs, which put our attention into them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from tokenring.api.arguments import check_schedule_name
from tokenring.errors import ConfigurationError
from tokenring.integrations.megatron.arguments import check_options
from tokenring.integrations.megatron.attention import TokenRingAttention
from tokenring.integrations.megatron.version import check_version

OTHER_ATTENTION = ("cross_attention",)  # keys of another sequence: stays what it is


def use_tokenring(spec: Any, schedule: str = "auto", *, any_version: bool = False, **options: Any) -> Any:
    """Return the spec with our attention as core_attention of every self-attention in it; the given one is unchanged.

    spec: a ModuleSpec of a layer or a block, a TransformerBlockSubmodules, or a list of them.
    schedule: for layers whose cp_comm_type does not name one.
    any_version: also take a Megatron-core outside the range that tokenring knows.
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
    changed = _with_attention(spec, ModuleSpec(module=TokenRingAttention, params=params))
    if changed is spec:
        raise ConfigurationError(
            f"there is no core_attention of a self-attention in this {type(spec).__name__}: give a layer spec such as "
            f"get_gpt_layer_local_spec() makes, a block spec, or TransformerBlockSubmodules"
        )
    return changed


def _with_attention(part: Any, attention: Any) -> Any:
    """Return a part of a spec with every core_attention in it replaced; the part itself where there is none."""
    if isinstance(part, (list, tuple)):
        new = [_with_attention(each, attention) for each in part]
        return type(part)(new) if any(a is not b for a, b in zip(new, part, strict=True)) else part
    if not is_dataclass(part) or isinstance(part, type):
        return part
    found = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
    new_parts = {
        name: attention if name == "core_attention" and value is not None else _with_attention(value, attention)
        for name, value in found.items()
        if name not in OTHER_ATTENTION
    }
    changes = {name: value for name, value in new_parts.items() if value is not found[name]}
    return replace(part, **changes) if changes else part
