"""The override that torchtitan takes: --override.imports tokenring.integrations.torchtitan.override.attention.

Importing this imports torchtitan.
"""

from __future__ import annotations

from typing import Any

from tokenring.integrations.torchtitan.using import prepare_model
from tokenring.integrations.torchtitan.versions import check_version

check_version(any_version=True)  # that it is there; `attention` checks which it is

from torchtitan.config.override import override  # noqa: E402
from torchtitan.models.common.decoder import Decoder  # noqa: E402


@override(target=Decoder.Config, description="attention over several ranks by tokenring")  # type: ignore[untyped-decorator]
def attention(model: Any, *, any_version: bool = False, **options: Any) -> Any:
    """Change the config of a model in place, and return it. options: as of `use_tokenring`."""
    check_version(any_version)
    prepare_model(model, **options)
    return model
