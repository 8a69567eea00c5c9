"""The names of linear layers and collectives in commands, as `--operator` takes them."""

from __future__ import annotations

from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import Pass
from tokenring.nearest import hint

LAYERS = ("column", "row")
COLLECTIVES: dict[str, tuple[Pass, ...]] = {  # passes of operator reduce
    "all-reduce": ("forward", "backward"), "reduce-scatter": ("forward",), "all-gather": ("backward",),
}  # fmt: skip
OPERATORS = (*LAYERS, *COLLECTIVES)


def operator_name(text: str) -> str:
    """Return the name of an operator, all_reduce or all-reduce. Raises ConfigurationError for another."""
    name = text.replace("_", "-")
    if name not in OPERATORS:
        raise ConfigurationError(
            f"--operator {text}: choose one of {', '.join(OPERATORS)}{hint(name, OPERATORS)}; without it the plan is "
            f"for attention"
        )
    return name
