"""Context parallelism of MindSpeed-LLM's and MindSpeed-MM's torch-native (FSDP2) trainers by tokenring.

use_tokenring()     # above the line that builds the trainer; the sequence stays cut as their options say

Importing this imports neither. docs/mindspeed.md says what happens then, and what is refused.
"""

from tokenring.integrations.mindspeed_fsdp2.using import stop_tokenring, use_tokenring

__all__ = ["stop_tokenring", "use_tokenring"]
