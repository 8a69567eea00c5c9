"""For Megatron-LM's `--spec tokenring_layer layer`: the layer that it would take, with tokenring's attention.

Run: its import and its layer, with Megatron-LM's source, by tests/integrations/test_mindspeed_real.py.
Not run: on a GPU.
"""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

from tokenring.integrations.megatron import use_tokenring

layer = use_tokenring(get_gpt_layer_with_transformer_engine_spec(), schedule="auto")
