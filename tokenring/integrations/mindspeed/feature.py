"""What MindSpeed applies: a feature with our flags, their checks, and the patches of Megatron's attention."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tokenring.errors import BackendUnavailable, ConfigurationError, one_line
from tokenring.integrations.mindspeed.flags import add_arguments, check_arguments, is_asked

FEATURE = "context_parallel_attention"
ADAPTOR = "mindspeed.megatron_adaptor"
ATTENTION = "megatron.core.transformer.dot_product_attention.DotProductAttention"
TE_ATTENTION = "megatron.core.extensions.transformer_engine.TEDotProductAttention"
OWN_ATTENTION = "mindspeed.core.context_parallel.adaptor.MindSpeedCPDotProductAttention"
WHOLE = "mindspeed.te"  # gone since core_r0.17, which left attention to a package of its own

TOO_LATE = (
    f"tokenring.integrations.mindspeed was imported after {ADAPTOR}, which had applied its features by then: move "
    f"`import tokenring.integrations.mindspeed` above it, to the first line of the training script"
)
INSTALL = (
    "install it from its git repository (Ascend/MindSpeed), in the branch for your Megatron-core; what PyPI has under "
    "that name is an empty placeholder"
)
KNOWN = "it knows those for Megatron-core 0.12.1 and 0.14 to 0.16, and core_r0.17 and core_r0.18"


def register() -> None:
    """Adds the feature to MindSpeed's; calling it again changes nothing.

    Raises ConfigurationError when MindSpeed has applied its features already, BackendUnavailable when it is missing, a
    placeholder, broken, or of a release that lacks what this needs.
    """
    if ADAPTOR in sys.modules:
        raise ConfigurationError(TOO_LATE)
    features, base = _surface()
    if not any(each.feature_name == FEATURE for each in features):
        features.append(_feature(base))


def _surface() -> tuple[list[Any], type[Any]]:
    """MindSpeed's list of features, and the class of which they are."""
    try:
        package = import_module("mindspeed.features_manager")
    except Exception as error:
        raise _unavailable(error) from error
    features = getattr(getattr(package, "MindSpeedFeaturesManager", None), "FEATURES_LIST", [])
    if not any(each.feature_name == "context_parallel_size" for each in features):
        raise _unknown("its features_manager has no list with context parallelism in it")
    return features, package.MindSpeedFeature


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
            replace_attention(patch_manager, args.tokenring_schedule)

    return TokenRingFeature()


def replace_attention(patch_manager: Any, schedule: str) -> None:
    """Puts our attention over whatever MindSpeed put in place of Megatron's."""
    from tokenring.integrations.mindspeed.attention import attention_class

    is_whole = find_spec(WHOLE) is not None
    module, _, name = (OWN_ATTENTION if is_whole else TE_ATTENTION).rpartition(".")
    try:
        own = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _unknown(one_line(error)) from error
    made = attention_class(own, schedule)
    for target in (ATTENTION, TE_ATTENTION) if is_whole else (TE_ATTENTION,):
        patch_manager.register_patch(target, made, force_patch=True)
