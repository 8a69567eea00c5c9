"""The feature that MindSpeed applies: our flags, their checks, and the patches of Megatron's attention."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tokenring.errors import BackendUnavailable, ConfigurationError, one_line
from tokenring.integrations.megatron.latents import build_latents_wrapper
from tokenring.integrations.megatron.options import options_said
from tokenring.integrations.mindspeed.flags import add_arguments, check_arguments, is_asked
from tokenring.integrations.mindspeed_llm import ADAPTOR, keep_last, registered

FEATURE = "context_parallel_attention"
ADAPTORS = ("mindspeed.megatron_adaptor", ADAPTOR)
ATTENTION = "megatron.core.transformer.dot_product_attention.DotProductAttention"
TE_ATTENTION = "megatron.core.extensions.transformer_engine.TEDotProductAttention"
BUILD = "megatron.core.transformer.spec_utils.build_module"  # of every layer, whoever wrote its spec
OWN_ATTENTION = "mindspeed.core.context_parallel.adaptor.MindSpeedCPDotProductAttention"
ULYSSES = "mindspeed.core.context_parallel.ulysses_context_parallel.ulysses_context_parallel.UlyssesContextAttention"
WHOLE = "mindspeed.te"  # gone since core_r0.17, which left attention to a package of its own

TOO_LATE = (
    "tokenring.integrations.mindspeed was imported after {}, which had applied its features by then: move "
    "`import tokenring.integrations.mindspeed` above it, to the first line of the training script"
)
INSTALL = (
    "install it from its git repository (Ascend/MindSpeed), in the branch for your Megatron-core; what PyPI has under "
    "that name is an empty placeholder"
)
KNOWN = "it knows those for Megatron-core 0.12.1 and 0.14 to 0.16, and core_r0.17 and core_r0.18"


def register() -> None:
    """Add the feature to MindSpeed's; calling it again changes nothing.

    Raises ConfigurationError when MindSpeed has applied its features already, BackendUnavailable when it is missing, a
    placeholder, broken, or of a release that lacks what this needs.
    """
    if late := [name for name in ADAPTORS if name in sys.modules]:
        raise ConfigurationError(TOO_LATE.format(late[0]))
    manager, base = _surface()
    if not any(each.feature_name == FEATURE for each in manager.FEATURES_LIST):
        keep_last(manager, _feature(base))


def _surface() -> tuple[Any, type[Any]]:
    """Return MindSpeed's manager with its list of features, and the class of which they are."""
    try:
        package = import_module("mindspeed.features_manager")
    except Exception as error:
        raise _unavailable(error) from error
    manager = getattr(package, "MindSpeedFeaturesManager", None)
    features = getattr(manager, "FEATURES_LIST", [])
    if not any(each.feature_name == "context_parallel_size" for each in features):
        raise _unknown("its features_manager has no list with context parallelism in it")
    return manager, package.MindSpeedFeature


def _unavailable(error: Exception) -> BackendUnavailable:
    missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if missing == "mindspeed":
        return BackendUnavailable(f"there is no MindSpeed here: {INSTALL}")
    if "placeholder" in str(error):
        return BackendUnavailable(f"this MindSpeed does nothing: {INSTALL}")
    if missing.startswith("mindspeed."):
        return _unknown(one_line(error))
    return BackendUnavailable(f"MindSpeed cannot be imported ({one_line(error)}): `tokenring doctor` may tell why")


def _unknown(found: str) -> BackendUnavailable:
    return BackendUnavailable(f"this release of MindSpeed is not one that tokenring knows: {found}; {KNOWN}")


def _feature(base: type[Any]) -> Any:
    class TokenRingFeature(base):  # type: ignore[misc]
        """Flags in every run; patches where they ask for our attention."""

        def __init__(self) -> None:
            super().__init__(FEATURE, optimization_level=0)

        def is_need_apply(self, args: Any) -> bool:
            return is_asked(args)

        def register_args(self, parser: Any) -> None:
            add_arguments(parser)

        def validate_args(self, args: Any) -> None:
            check_arguments(args)

        def register_patches(self, patch_manager: Any, args: Any) -> None:
            replace_attention(patch_manager, args.tokenring_schedule, options_said(args))
            if getattr(args, "tokenring_latents", False):
                patch_manager.register_patch(BUILD, build_latents_wrapper)

    return TokenRingFeature()


def replace_attention(patch_manager: Any, schedule: str, options: dict[str, Any]) -> None:
    """Put our attention over whatever MindSpeed, or MindSpeed-LLM, put in place of Megatron's."""
    from tokenring.integrations.mindspeed.attention import attention_class

    is_whole, made = find_spec(WHOLE) is not None, dict[Any, Any]()  # by the class that is replaced
    for target in (ATTENTION, TE_ATTENTION) if is_whole else (TE_ATTENTION,):
        own = registered(patch_manager, target) or _found(OWN_ATTENTION if is_whole else TE_ATTENTION)
        made[own] = made.get(own) or attention_class(own, schedule, options)
        patch_manager.register_patch(target, made[own], force_patch=True)
        # MindSpeed-LLM's of kvallgather_cp_algo, which would now be ours.
        getattr(patch_manager, "patches_info", {}).pop(f"{target}.forward", None)
    if is_whole:
        patch_manager.register_patch(ULYSSES, around_others_wrapper)


def around_others_wrapper(own: Any) -> Any:
    """Return the class that exchanges heads around an attention, which leaves ours as it is: ours does that itself.

    Named as MindSpeed's patches tell wrappers: they stay around classes that are patched later, as MindSpeed-MM's.
    """
    from tokenring.integrations.megatron import TokenRingAttention

    class UlyssesOfOthers(own):  # type: ignore[misc]
        """MindSpeed's exchange of heads, around attentions but ours."""

        replaces = own

        def __new__(cls, local_attention: Any, *args: Any, **kwargs: Any) -> Any:
            """Return our attention itself, another in its exchange."""
            return local_attention if isinstance(local_attention, TokenRingAttention) else super().__new__(cls)

    return UlyssesOfOthers


def _found(place: str) -> Any:
    module, _, name = place.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _unknown(one_line(error)) from error
