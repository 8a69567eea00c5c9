"""Context parallelism for MindSpeed: one import, before MindSpeed's own, and `--context-parallel-attention tokenring`.

    import tokenring.integrations.mindspeed
    import mindspeed.megatron_adaptor

The import registers a feature with MindSpeed, which adds two flags and, where they ask for it, replaces the attention
under context parallelism (docs/mindspeed.md). Raises ConfigurationError where it comes too late, BackendUnavailable
without a MindSpeed that it knows.
"""

from tokenring.integrations.mindspeed.feature import register

__all__ = ["register"]

register()
