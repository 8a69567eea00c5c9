"""Context parallelism for MindSpeed: this import, before MindSpeed's own, and `--context-parallel-attention tokenring`.

The import registers a feature: two flags, and where they ask for it another attention (docs/mindspeed.md).
Raises ConfigurationError when it comes too late, BackendUnavailable without a MindSpeed that it knows.
"""

from tokenring.integrations.mindspeed.feature import register

__all__ = ["register"]

register()
