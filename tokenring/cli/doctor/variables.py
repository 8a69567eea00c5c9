"""Environment variables that change what accelerators do, and values of them that hurt.

Meanings and ranges are those of the HCCL and torch_npu documentation of CANN 8.5 and 9, and of NCCL and torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenring.cli.doctor.findings import Variable

PREFIXES = (
    "HCCL_", "P2P_HCCL_", "TORCH_HCCL_", "TORCH_NPU", "ASCEND_", "PYTORCH_NPU_", "NCCL_", "TORCH_NCCL_", "GLOO_",
    "TOKENRING_",
)  # fmt: skip
NAMES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "RANK_TABLE_FILE",
    "TASK_QUEUE_ENABLE", "MULTI_STREAM_MEMORY_REUSE", "INF_NAN_MODE_ENABLE", "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "STREAMS_PER_DEVICE",
)  # fmt: skip
CONNECT, QUEUES = "HCCL_CONNECT_TIMEOUT", "CUDA_DEVICE_MAX_CONNECTIONS"
MEGATRON_WANTS = (
    "Megatron, and with it MindSpeed, refuses context and tensor parallelism unless it is 1, or with FSDP2 if it is; "
    "NPUs themselves ignore it"
)
CONNECT_SECONDS = (120, 7200)
PAIRS_CONNECT_SECONDS = 600  # that torch_npu recommends where pairs of ranks have communicators (P2P_HCCL_BUFFSIZE.md)
EXEC_SECONDS, EVENT_SECONDS = 1836, 1868  # HCCL's and torch_npu's own
ENOUGH = f"{EXEC_SECONDS}, or 3600 as MindSpeed's scripts do with HCCL_EVENT_TIMEOUT above it"
BUFFER_MB = 200
MUCH_BUFFER_MB = 1024
FEW_STREAMS, STREAMS = 8, 32  # of torch_npu's pool: in older builds, and in newer ones
BLOCKING = "every wait blocks the host, so that nothing overlaps; unset it unless you look for an error"
EVERY_CALL = "every call waits for its end: good for finding an error, and slow"
Check = Callable[[str, Mapping[str, str]], "str | None"]  # of a value, in an environment: the warning


def variables(environment: Mapping[str, str]) -> list[Variable]:
    """Return the variables that matter and are set, by name, with a warning where the value hurts."""
    chosen = sorted(name for name in environment if name.startswith(PREFIXES) or name in NAMES)
    return [Variable(name, environment[name], _warning(name, environment)) for name in chosen]


def _warning(name: str, environment: Mapping[str, str]) -> str | None:
    check = CHECKS.get(name)
    return check(environment[name].strip(), environment) if check else None


def _number(value: str) -> int | None:
    return int(value) if re.fullmatch(r"[0-9]{1,9}", value, re.ASCII) else None


def _visible(value: str, environment: Mapping[str, str]) -> str | None:
    numbers = [_number(part.strip()) for part in value.split(",")] if value else []
    if None in numbers:
        return "no list of device numbers such as 0,1,2: torch_npu then sees no device"
    known = [number for number in numbers if number is not None]
    if known != sorted(set(known)):
        return "not ascending: torch_npu then counts 0 devices; list each once, smallest first"
    return None


def _one_gpu(value: str, environment: Mapping[str, str]) -> str | None:
    if "," in value or value in ("", "-1"):
        return None
    return (
        "one GPU: if each rank sees only its own, all are number 0 in their processes, which torch's symmetric memory "
        "takes for one device, and transport symm cannot be used; let every rank see all and call torch.cuda.set_device"
    )


def _connect(value: str, environment: Mapping[str, str]) -> str | None:
    least, most = CONNECT_SECONDS
    seconds = _number(value)
    if seconds is None or not least <= seconds <= most:
        return f"HCCL takes {least} to {most} seconds"
    if seconds < PAIRS_CONNECT_SECONDS:
        return f"pairs of ranks must meet within it, which torch_npu recommends {PAIRS_CONNECT_SECONDS} and more for"
    return None


def _retry(value: str, environment: Mapping[str, str]) -> str | None:
    if not re.search(r"L[0-2]\s*:\s*1", value, re.ASCII | re.IGNORECASE):
        return None
    return (
        "with retries on HCCL takes at most 5 communicators in a process, those of the training framework among them: "
        "transport `hccl` then keeps to 5 of its own on Atlas A3, the only product that retries, `hccl/batch` to 2 "
        "(docs/ascend.md)"
    )


def _execution(value: str, environment: Mapping[str, str]) -> str | None:
    seconds = _number(value)
    if seconds is None:
        return f"no number of seconds; HCCL's own is {EXEC_SECONDS}"
    event = _number(environment.get("HCCL_EVENT_TIMEOUT", str(EVENT_SECONDS)).strip())
    if event is not None and event != 0 and event <= seconds:
        return f"HCCL_EVENT_TIMEOUT ({event}) must be longer: raise it above {seconds}"
    if seconds == 0:
        return f"HCCL waits for ever, also for a rank that died: set a limit, {ENOUGH}"
    if seconds < PAIRS_CONNECT_SECONDS:
        return (
            f"a rank that comes {seconds} s late to a message ends the job, as one does that compiles operators or "
            f"writes a checkpoint: set {ENOUGH}"
        )
    return None


def unset(environment: Mapping[str, str], has_megatron: bool) -> list[tuple[str, str]]:
    """Return what is missing on a machine with NPUs, and what to do: of each variable that should be set and is not.

    has_megatron: Megatron-core or MindSpeed is installed.
    """
    found = []
    if not environment.get(CONNECT):
        what = f"{CONNECT} is not set: pairs of ranks must meet within HCCL's own 120 s, a first step may take longer"
        found.append((what, f"export {CONNECT}={PAIRS_CONNECT_SECONDS} or more"))
    if has_megatron and not environment.get(QUEUES):
        found.append((f"{QUEUES} is not set: {MEGATRON_WANTS}", f"export {QUEUES}=1, with --use-torch-fsdp2 2"))
    return found


def _buffer(value: str, environment: Mapping[str, str]) -> str | None:
    mb = _number(value)
    if mb is None or mb < 1:
        return f"no number of MB from 1 on; HCCL's own is {BUFFER_MB}"
    return f"every communicator takes twice this: {2 * mb} MB" if mb >= MUCH_BUFFER_MB else None


def _pair_buffer(value: str, environment: Mapping[str, str]) -> str | None:
    mb = _number(value)
    if mb is None:
        return "no number of MB; torch_npu's own is 20"
    if mb == 0:
        return (
            "pairs of ranks get no communicator of their own: all sends and receives of a group share one stream; "
            "transport `hccl` refuses it, `hccl/batch` does not need them"
        )
    return None


def _expansion(value: str, environment: Mapping[str, str]) -> str | None:
    if value.upper() != "AIV":
        return None
    return (
        "AIV does not serve send and receive, nor several communicators at once: transport `hccl` refuses it; groups "
        "that are to keep it can be given it alone (docs/ascend.md)"
    )


def _intra(value: str, environment: Mapping[str, str]) -> str | None:
    both = all(environment.get(f"HCCL_INTRA_{way}_ENABLE", "").strip() == "1" for way in ("PCIE", "ROCE"))
    return "HCCL_INTRA_PCIE_ENABLE and HCCL_INTRA_ROCE_ENABLE are both 1, which HCCL does not take" if both else None


def _whitelist(value: str, environment: Mapping[str, str]) -> str | None:
    if value == "0" and not environment.get("HCCL_WHITELIST_FILE"):
        return "the whitelist is on and HCCL_WHITELIST_FILE names none: no rank may connect"
    return None


def _rank_table(value: str, environment: Mapping[str, str]) -> str | None:
    if not Path(value).is_file():
        return "no such file: HCCL reads the ranks' addresses from it"
    return (
        "torch_npu then makes every communicator out of one of all ranks: "
        f"{2 * BUFFER_MB} MB more (2 x HCCL_BUFFSIZE), and those of one pair get the same id: transport `hccl` refuses "
        "it; unset it, and ranks find each other by root information, as under torchrun, or take transport `hccl/batch`"
    )


def _streams(value: str, environment: Mapping[str, str]) -> str | None:
    if value != str(FEW_STREAMS):
        return None if value == str(STREAMS) else f"torch_npu takes {FEW_STREAMS} or {STREAMS}"
    return (
        f"communicators share {FEW_STREAMS} streams of each device, where messages to different peers wait for each "
        f"other: take {STREAMS}"
    )


def _schedule(value: str, environment: Mapping[str, str]) -> str | None:
    from tokenring.api.arguments import check_schedule_name  # neither of these needs torch
    from tokenring.errors import TokenRingError

    try:
        check_schedule_name(value)
    except TokenRingError as error:
        return str(error)
    return None


def _is(text: str, warning: str) -> Check:
    return lambda value, environment: warning if value == text else None


CHECKS: Mapping[str, Check] = {
    "ASCEND_RT_VISIBLE_DEVICES": _visible,
    CONNECT: _connect,
    "HCCL_EXEC_TIMEOUT": _execution,
    "HCCL_OP_RETRY_ENABLE": _retry,
    "HCCL_BUFFSIZE": _buffer,
    "P2P_HCCL_BUFFSIZE": _pair_buffer,
    "HCCL_OP_EXPANSION_MODE": _expansion,
    "HCCL_INTRA_PCIE_ENABLE": _intra,
    "HCCL_INTRA_ROCE_ENABLE": _intra,
    "HCCL_WHITELIST_DISABLE": _whitelist,
    "RANK_TABLE_FILE": _rank_table,
    "STREAMS_PER_DEVICE": _streams,
    "HCCL_ASYNC_ERROR_HANDLING": _is("0", "torch_npu then never ends a job; only a later call tells of a lost message"),
    "TORCH_HCCL_BLOCKING_WAIT": _is("1", BLOCKING),
    "ASCEND_LAUNCH_BLOCKING": _is("1", EVERY_CALL),
    "TASK_QUEUE_ENABLE": _is("0", "the host launches every operator itself, one after another: slow"),
    "INF_NAN_MODE_ENABLE": _is("0", "saturation: infinities become large numbers and NaN becomes 0, unnoticed"),
    "CUDA_VISIBLE_DEVICES": _one_gpu,
    "CUDA_LAUNCH_BLOCKING": _is("1", EVERY_CALL),
    "TORCH_NCCL_BLOCKING_WAIT": _is("1", BLOCKING),
    "NCCL_BLOCKING_WAIT": _is("1", BLOCKING),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _is("0", "a lost rank then hangs the others instead of ending them"),
    "NCCL_P2P_DISABLE": _is("1", "GPUs of one machine then exchange through the host's memory"),
    "NCCL_IB_DISABLE": _is("1", "machines then exchange over sockets"),
    "TOKENRING_SCHEDULE": _schedule,
}
