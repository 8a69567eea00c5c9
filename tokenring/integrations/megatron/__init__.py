"""Context parallelism for Megatron-core: attention over the context-parallel group, by the planner's schedule.

spec = use_tokenring(get_gpt_layer_with_transformer_engine_spec(), schedule="auto")

`use_tokenring_linears` puts the linear layers of tensor parallelism on schedules too.

Importing this imports no Megatron. docs/megatron.md says what happens then.
"""

from tokenring.integrations.megatron.attention import TokenRingAttention
from tokenring.integrations.megatron.contexts import release_contexts
from tokenring.integrations.megatron.options import add_arguments, options_of
from tokenring.integrations.megatron.schedules import per_layer
from tokenring.integrations.megatron.specs import use_tokenring, use_tokenring_linears

__all__ = [
    "TokenRingAttention",
    "add_arguments",
    "options_of",
    "per_layer",
    "release_contexts",
    "use_tokenring",
    "use_tokenring_linears",
]
