"""The environment variables of HCCL and torch_npu that transport `hccl` goes by, or is stopped by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

import torch

from tokenring.backends.transports.accelerated import from_the_post
from tokenring.errors import BackendUnavailable, ConfigurationError

MEGABYTE = 1 << 20  # as HCCL counts
P2P_MEGABYTES = 20  # of P2P_HCCL_BUFFSIZE where it is not set
GROUP_MEGABYTES = 200  # of HCCL_BUFFSIZE where it is not set
EXECUTE_SECONDS = 1836  # of HCCL_EXEC_TIMEOUT where it is not set
LEAST_LIMIT_SECONDS = 30 * 60  # torch's own for a group
FOREVER_SECONDS = 365 * 24 * 3600
RETRY = "HCCL_OP_RETRY_ENABLE"
RETRYING_COMMUNICATORS = 5  # with retries on HCCL takes no more (hicann/hccl, hccl_env/HCCL_OP_RETRY_ENABLE.md)
RETRYING_PRODUCT = "Ascend910_93"  # A3: the page and SetRetryEnable know of retries on no other
RETRYING_MODE = "AI_CPU"  # A3's own where HCCL_OP_EXPANSION_MODE is not set
CROWDED = (
    f"{RETRY} is on, with which HCCL takes at most {RETRYING_COMMUNICATORS} communicators in a process: more may hold "
    f"all AI CPU cores, and what they wait for cannot begin"
)

ADVISED_COMMUNICATORS = 64  # our own figure: one with each of 63 others, or four with each of 16; of 40 MB each
MANY = f"more than {ADVISED_COMMUNICATORS} communicators on a rank take gigabytes, and long to make"


def watchdog_seconds(environment: Mapping[str, str]) -> float:
    """Return the seconds after a message's post on the host at which torch_npu may give it up.

    Newer builds then end the process (HCCL_ASYNC_ERROR_HANDLING). HCCL counts from when the device comes to it.
    """
    given = environment.get("HCCL_EXEC_TIMEOUT", "").strip()
    execute = int(given) if given.isascii() and given.isdigit() else EXECUTE_SECONDS
    return max(LEAST_LIMIT_SECONDS, from_the_post(execute)) if execute else FOREVER_SECONDS  # 0: HCCL waits for ever


def connection_bytes(environment: Mapping[str, str]) -> int:
    """Return the device memory, in bytes, of one communicator of two ranks, at each of them."""
    return 2 * _p2p_megabytes(environment) * MEGABYTE


def group_bytes(environment: Mapping[str, str]) -> int:
    """Return the device memory, in bytes, of one communicator of several ranks, at each of them."""
    return 2 * megabytes(environment, "HCCL_BUFFSIZE", GROUP_MEGABYTES) * MEGABYTE


def _p2p_megabytes(environment: Mapping[str, str]) -> int:
    return megabytes(environment, "P2P_HCCL_BUFFSIZE", P2P_MEGABYTES)


def megabytes(environment: Mapping[str, str], variable: str, unset: int) -> int:
    """Return the size of a buffer, in MB, that a variable says. Raises ConfigurationError."""
    given = environment.get(variable, str(unset))
    if not given.isascii() or not given.isdigit():
        raise ConfigurationError(f"{variable}={given!r}: HCCL reads a number of MB from it")
    return int(given)


def most_communicators(environment: Mapping[str, str]) -> int | None:
    """Return how many communicators HCCL takes; None: as many as there is memory for."""
    return RETRYING_COMMUNICATORS if retries(environment) and _may_retry(_product()) else None


def retries(environment: Mapping[str, str]) -> bool:
    """Return True if HCCL is asked to retry operations on any level: "L1:1,L2:0", and L0 in older releases.

    Only where the AI CPU expands them, as without the variable on A3.
    """
    asked = re.search(r"L[0-2]\s*:\s*1", environment.get(RETRY, ""), re.ASCII | re.IGNORECASE) is not None
    return asked and environment.get("HCCL_OP_EXPANSION_MODE", "").strip().upper() in ("", RETRYING_MODE)


def _may_retry(product: str | None) -> bool:
    """Return True if this product knows retries, as one must suppose where it is not known."""
    return product is None or product.startswith(RETRYING_PRODUCT)


def _product() -> str | None:
    """Return the name of this machine's NPU; None where there is none."""
    with suppress(Exception):  # a driver may fail in any way
        return str(torch.get_device_module("npu").get_device_name())
    return None


def check_environment(name: str, environment: Mapping[str, str], by_pairs: bool = True) -> None:
    """Raise BackendUnavailable for settings under which messages would not go as they must.

    by_pairs: each pair of ranks has communicators of its own.
    """
    if environment.get("HCCL_OP_EXPANSION_MODE", "").strip().upper() == "AIV":
        raise BackendUnavailable(
            f"transport {name!r}: HCCL_OP_EXPANSION_MODE=AIV does not serve send and receive: unset it. Groups whose "
            f"collectives are to keep AIV can be given it alone: "
            f"ProcessGroupHCCL.Options().hccl_config['hccl_op_expansion_mode']"
        )
    if by_pairs:
        _check_pairs(name, environment)


def _check_pairs(name: str, environment: Mapping[str, str]) -> None:
    """Raise BackendUnavailable for settings under which messages of pairs would not go as they must."""
    instead = "or take transport 'hccl/batch', which has one communicator of all ranks for each channel"
    if not _p2p_megabytes(environment):
        raise BackendUnavailable(
            f"transport {name!r}: with P2P_HCCL_BUFFSIZE=0 all messages of a group stand in one queue, where the ranks "
            f"would wait for each other: unset it, or give the MB of each pair's buffer; {instead}"
        )
    if table := environment.get("RANK_TABLE_FILE", "").strip():
        raise BackendUnavailable(
            f"transport {name!r}: with RANK_TABLE_FILE={table} torch_npu makes all communicators of two ranks out of "
            f"one of all, and gives those of one pair in several groups the same id, which was never seen to work: "
            f"unset it in this job, so that ranks find each other by root information, as torchrun starts them; "
            f"{instead}"
        )
