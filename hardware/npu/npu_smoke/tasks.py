"""The tasks by name: what each needs of its processes' environment, and how much longer than others it may take."""

from __future__ import annotations

from collections.abc import Mapping

LINKS = ["pair", "peers", "ways", "staging", "wait", "memory", "receives", "lanes", "prepared", "curve"]
OPERATORS = ["rows", "packed", "determinism", "updates", "launches"]
KERNEL = ["tile", "documents", "merges", "torchmerge", "shapes"]
LAYERS = ["column", "row"]
JOBS = ["retried", "curve64", "curve128", "mindspeed"]  # behind the schedules: in processes of their own, or long

# HCCL reads them when a process begins. Retry: within a server and between servers, as CANN's documents write it.
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "retried": {"HCCL_OP_RETRY_ENABLE": "L0:1, L1:1, L2:0"},
    "curve64": {"P2P_HCCL_BUFFSIZE": "64"},
    "curve128": {"P2P_HCCL_BUFFSIZE": "128"},
}
TIMES_AS_LONG: Mapping[str, float] = {"mindspeed": 3.0, "shapes": 2.0}
