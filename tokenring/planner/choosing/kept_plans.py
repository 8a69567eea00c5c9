"""Plans kept on disk: a job that asks for what an earlier one asked for does not plan again.

A file holds the name of a schedule, the order of the ranks, the direction of its rings and what was said of the choice,
as JSON; the schedule is made from its name. Its own name is a digest of all that the plan depends on: the call, the
interconnect with its bandwidths, the rates, the transport's abilities, the families, and the source files of whatever
plans. So nothing is ever out of date, it is merely not asked for any more; the oldest files go when there are many. A
file that is damaged, too large, or that somebody else may write is not used. TOKENRING_PLAN_CACHE names another folder;
"off" keeps none.
"""

from __future__ import annotations

import enum
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tokenring._version import __version__
from tokenring.errors import TokenRingError
from tokenring.gc_pause import no_collection
from tokenring.planner.choosing.auto import CallToPlan, forecast_call, order_of, plan_call
from tokenring.planner.choosing.candidates import candidate_of
from tokenring.planner.choosing.plan import Forecast, Plan
from tokenring.planner.choosing.scale_out import is_large
from tokenring.schedule.families.registry import FAMILIES
from tokenring.schedule.names import direction_of, schedule_in_parts
from tokenring.schedule.size_limits import MADE_RANKS
from tokenring.tables.kept_files import BEGUN, folder_of_plans, write_whole

LOG = logging.getLogger("tokenring")
FORMAT, VERSION = "tokenring-kept-plan", 1
MOST_FILES, MOST_BYTES = 1000, 1 << 20  # in the folder; of one file
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
PACKAGE = Path(__file__).resolve().parents[2]
PLANS = (  # rooms whose code decides what a plan is, and what is said of it
    "sequence", "ir", "lowering", "schedule", "tables", "backends/kernels", "planner", "display",
)  # fmt: skip
PLAIN = frozenset({type(None), bool, int, str})  # types that JSON writes as they are
STALE_SECONDS = 3600  # after which a file that somebody began to write is somebody's who was killed


Known = dict[int, tuple[object, object]]  # by identity: a value, and what was written for it


class Unknown(Exception):
    """Something is part of a call of which no digest can be made, such as a user's own family."""


def plan_or_forecast_kept(call: CallToPlan, environment: Mapping[str, str]) -> Plan | Forecast:
    """Return a plan as of `plan_kept`, or a forecast where there are too many ranks for a schedule to be made."""
    if is_large(call.setting.interconnect, MADE_RANKS):
        return forecast_call(call)
    return plan_kept(call, environment)


def plan_kept(call: CallToPlan, environment: Mapping[str, str]) -> Plan:
    """Return the plan for a call, as it was kept or else planned now and kept. Raises ConfigurationError."""
    path = path_of(call, environment)
    if path is None:
        return plan_call(call)
    found = _read(path, call)
    if found is None:
        found, order = plan_call(call), order_of(call.setting.interconnect)
        if found.direction is None:
            layouts = call.q_layout, call.kv_layout
            direction = direction_of(found.name, call.setting.workload, *layouts, call.mask, order)
            found = replace(found, direction=direction)
        _keep(path, found, order)
    return found


def path_of(call: CallToPlan, environment: Mapping[str, str]) -> Path | None:
    """Return where the plan for a call is kept; None if it is not."""
    folder = folder_of_plans(environment)
    if folder is None:
        return None
    try:
        return folder / f"plan-{digest(call)[:40]}.json"
    except (Unknown, OSError) as what:  # of a source file that goes while it is looked at
        LOG.debug("plan not kept: %s", what)
        return None


# ---------- the digest


def digest(call: CallToPlan) -> str:
    """Return a digest of all that the plan for a call depends on. Raises Unknown where it cannot be told."""
    parts = [FORMAT, VERSION, __version__, torch.__version__, _sources(), _families(), _plain(call, {})]
    return _hash(parts)


@cache
def _sources() -> list[list[str]]:
    """Return a hash of every source file that decides what a plan is: code may change within a version."""
    found, start = [], len(f"{PACKAGE}{os.sep}")
    for room in PLANS:
        for path in _python_files(str(PACKAGE / room)):
            with open(path, "rb", buffering=0) as file:
                found.append([path[start:], hashlib.sha256(file.readall()).hexdigest()])
    return found


def _python_files(folder: str) -> Iterator[str]:
    """Yield the modules in a folder and those below it, in order; editors leave files that begin with a dot."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir():
            yield from _python_files(entry.path)
        elif entry.name.endswith(".py") and not entry.name.startswith("."):
            yield entry.path


def _families() -> list[str]:
    """Return the names of the registered families, all of them our own. Raises Unknown for a user's."""
    for family in FAMILIES.values():
        for part in (family.scheme, family.choices, family.cut, family.small):
            if part is not None and not _is_ours(part):
                raise Unknown(f"family {family.name!r} is not one of tokenring's own, and its code may change")
    return list(FAMILIES)


def _is_ours(function: object) -> bool:
    """Return whether a function's code is in tokenring's own files, and all of it: it has no values from elsewhere."""
    ours = str(getattr(function, "__module__", "")).startswith("tokenring.")
    return ours and getattr(function, "__closure__", None) is None


def _plain(value: object, known: Known) -> object:
    """Return a value as JSON can write it, alike for values that are alike. Raises Unknown for what it does not know.

    known: what was written before, by identity. Of a dataclass that is its digest: hosts of many ranks are one object.
    """
    if type(value) in PLAIN:
        return value
    match value:
        case bool() | int() | str():
            return value
        case float():
            return repr(value)
        case torch.dtype():
            return str(value)
        case enum.Enum():
            return value.name
    if id(value) not in known:
        parts: object = list(_parts(value, known))
        # With the value, so that no other gets its identity.
        known[id(value)] = value, _hash(parts) if is_dataclass(value) else parts
    return known[id(value)][1]


def _kind_of_plain_tuples(value: tuple[Any, ...]) -> str | None:
    """Return the name of the type of a value's parts where all are tuples of one type, of plain values; else None.

    Places of ranks and chunks of layouts are such, and of thousands of ranks most of what there is.
    """
    kinds = set(map(type, value))
    kind = kinds.pop() if len(kinds) == 1 else object
    is_plain = issubclass(kind, tuple) and PLAIN.issuperset(map(type, chain.from_iterable(value)))
    return kind.__qualname__ if is_plain else None


def _hash(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _parts(value: object, known: Known) -> Iterator[object]:
    """Yield the parts of a value, after the name of its type."""
    yield type(value).__qualname__
    if is_dataclass(value):
        yield from (_plain(getattr(value, each.name), known) for each in fields(value) if each.compare)
    elif isinstance(value, Mapping):
        yield from ([_plain(key, known), _plain(each, known)] for key, each in value.items())  # the order may count
    elif isinstance(value, Set):
        yield from sorted((_plain(each, known) for each in value), key=json.dumps)
    elif isinstance(value, tuple) and PLAIN.issuperset(map(type, value)):
        yield from value
    elif isinstance(value, tuple) and (kind := _kind_of_plain_tuples(value)) is not None:
        yield {"each": kind}  # an object, as nothing else is written, so that no value equals it
        yield from value
    elif isinstance(value, Sequence):
        yield from (_plain(each, known) for each in value)
    elif callable(value) and hasattr(value, "__qualname__"):  # what a kernel takes: by the kernel's class
        if not _is_ours(value):
            raise Unknown(f"{value.__qualname__} is not tokenring's own, and its code may change")
        owner = getattr(value, "__self__", None)
        yield from (value.__module__, value.__qualname__, type(owner).__qualname__, str(getattr(owner, "name", "")))
    else:
        raise Unknown(f"a {type(value).__qualname__} is part of the call")


# ---------- files


@dataclass(frozen=True)
class KeptPlan:
    """A plan as a file has it."""

    name: str
    order: tuple[int, ...] | None
    direction: int | None
    reason: str
    candidates: tuple[dict[str, Any], ...]
    transport: str | None


def _keep(path: Path, plan: Plan, order: tuple[int, ...] | None) -> None:
    """Write the plan, whole or not at all, and remove the oldest of many; a folder that cannot be written is no error.

    What is named in the file is what makes the schedule again.
    """
    candidates = tuple(asdict(each) for each in plan.candidates)
    kept = KeptPlan(plan.name, order, plan.direction, plan.reason, candidates, plan.transport)
    try:
        write_whole(path, json.dumps({"format": FORMAT, "version": VERSION, "file": path.name, "plan": asdict(kept)}))
        _remove_oldest(path.parent)
    except OSError as error:
        LOG.debug("plan not kept in %s: %s", path.parent, error)


def _remove_oldest(folder: Path) -> None:
    plans: list[tuple[float, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # another job was faster
                written = entry.stat(follow_symlinks=False).st_mtime
                if entry.name.startswith("plan-"):
                    plans.append((written, entry.path))
                elif entry.name.startswith(BEGUN) and written < time.time() - STALE_SECONDS:
                    os.unlink(entry.path)
    for _, path in sorted(plans)[: max(0, len(plans) - MOST_FILES)]:
        with suppress(OSError):
            os.unlink(path)


def _read(path: Path, call: CallToPlan) -> Plan | None:
    """Return the plan in the file; None where there is none, or one that is not to be trusted."""
    try:
        document = json.loads(_text(path))
        found = document["plan"]
        order, kept_order = order_of(call.setting.interconnect), found["order"]
        usable = [document[name] for name in ("format", "version", "file")] == [FORMAT, VERSION, path.name]
        if not usable or order != (None if kept_order is None else tuple(kept_order)):
            return None
        candidates = tuple(map(candidate_of, found["candidates"]))
        reason, transport = _word(found["reason"]), None if found["transport"] is None else _word(found["transport"])
        if (direction := found["direction"]) not in (None, 1, -1):
            raise ValueError(f"{direction!r} is no direction")
        direction = None if direction is None else int(direction)
        with no_collection():
            made = schedule_in_parts(
                _word(found["name"]), call.setting.workload, call.q_layout, call.kv_layout, call.mask,
                order=order, direction=direction,
            )  # fmt: skip
        LOG.debug("plan taken from %s", path)
        return Plan(made, call.setting.workload, reason, candidates, transport, direction)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, TokenRingError) as error:
        LOG.debug("kept plan %s is not used: %s: %s", path, type(error).__name__, error)
        return None


def _word(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _text(path: Path) -> str:
    """Return the text of a file of this user's, which nobody else may write. Raises OSError for any other."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & OTHERS_WRITE:
            raise PermissionError(f"{path} is no file of this user's alone")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(f"{path} is larger than {MOST_BYTES} bytes")
    return data.decode()


