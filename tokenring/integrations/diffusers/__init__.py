"""Diffusion transformers of diffusers over the ranks of a ContextParallel: Flux, Wan and QwenImage, both passes.

use_tokenring(pipe.transformer, tr.ContextParallel())     # then call the pipeline or the model as in one process

Importing this imports no diffusers. docs/diffusers.md says what happens then, and what is refused.
"""

from tokenring.integrations.diffusers.using import stop_tokenring, use_tokenring
from tokenring.integrations.gradient_joins import add_up_gradients

__all__ = ["add_up_gradients", "stop_tokenring", "use_tokenring"]
