"""Models of torchtitan over the ranks of a ContextParallel: training with packed documents.

    def llama3_8b_long() -> Trainer.Config:           # among your configs
        return use_tokenring(llama3_8b())             # then --parallelism.context_parallel_degree 8

Importing this imports no torchtitan. docs/torchtitan.md says what happens then, and what is refused.
"""

from tokenring.integrations.torchtitan.batches import TitanBatch, cut_batch
from tokenring.integrations.torchtitan.using import stop_tokenring, use_tokenring

__all__ = ["TitanBatch", "cut_batch", "stop_tokenring", "use_tokenring"]
