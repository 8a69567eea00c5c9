"""Changes of Megatron's layer specs, which put our attention into them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from tokenring.api.arguments import check_schedule_name
from tokenring.errors import ConfigurationError
from tokenring.integrations.megatron.arguments import check_options
from tokenring.integrations.megatron.attention import TokenRingAttention
from tokenring.integrations.megatron.latents import UP, SendsLatents, latent_layer, with_latents
from tokenring.integrations.megatron.version import check_version

OTHER_ATTENTION = ("cross_attention",)  # keys of another sequence: stays what it is


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
    changed = _with_attention(spec, ModuleSpec(module=TokenRingAttention, params=params), latents)
    if changed is spec:
        raise ConfigurationError(
            f"there is no core_attention of a self-attention in this {type(spec).__name__}: give a layer spec such as "
            f"get_gpt_layer_local_spec() makes, a block spec, or TransformerBlockSubmodules"
        )
    if latents and not _sends_latents(changed):
        raise ConfigurationError(
            f"latents=True, and no layer in this {type(spec).__name__} has multi-latent attention with a {UP}: "
            f"make the spec with multi_latent_attention=True, or leave latents out"
        )
    return changed


def _with_attention(part: Any, attention: Any, latents: bool) -> Any:
    """Return a part of a spec with every core_attention in it replaced; the part itself where there is none.

    latents: also replace layers of multi-latent attention by those whose latents travel.
    """
    how = attention, latents
    if isinstance(part, (list, tuple)):
        new = [_with_attention(each, *how) for each in part]
        return type(part)(new) if any(a is not b for a, b in zip(new, part, strict=True)) else part
    if not is_dataclass(part) or isinstance(part, type):
        return part
    found = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
    new_parts = {
        name: attention if name == "core_attention" and value is not None else _with_attention(value, *how)
        for name, value in found.items()
        if name not in OTHER_ATTENTION
    }
    if latents and (layer := latent_layer(part)) is not None:
        new_parts["module"] = with_latents(layer)
    changes = {name: value for name, value in new_parts.items() if value is not found[name]}
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
