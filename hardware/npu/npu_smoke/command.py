"""ci/npu-smoke: options, the file of results, one verdict line for each unknown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from npu_smoke.tasks import JOBS as JOBS
from npu_smoke.tasks import KERNEL as KERNEL
from npu_smoke.tasks import LAYERS as LAYERS
from npu_smoke.tasks import LINKS as LINKS
from npu_smoke.tasks import OPERATORS as OPERATORS
from npu_smoke.tasks import SETTINGS
from npu_smoke.team import TASK_SECONDS, Asked, run
from npu_smoke.unknowns import UNKNOWNS, verdict

FORMAT, VERSION = "tokenring-npu-smoke", 1
TESTS = Path(__file__).resolve().parents[3] / "tests"
DOCTOR_SECONDS = 60.0


def main(argv: list[str] | None = None) -> int:
    """0: every task was done; 1: some was not (the file says which, and has all the others)."""
    options = _parser().parse_args(argv)
    began = time.monotonic()
    kind = "npu" if options.emulate else options.device
    document = _document(options, kind)
    save = _Saver(Path(options.output), document)
    try:
        _everything(options, kind, began, document, save)
    except BaseException as error:  # Ctrl-C too: what was found is kept
        document["error"] = f"{type(error).__name__}: {error}"
        print(f"npu-smoke: stopped: {document['error']}", file=sys.stderr)
    document["seconds"] = round(time.monotonic() - began, 1)
    _judge(document)
    save()
    _show(document)
    print(f"\nwritten: {options.output}: send this one file back")
    whole = all(each["status"] == "done" for each in document["tasks"].values())
    return 0 if whole and "error" not in document else 1


def _everything(options: argparse.Namespace, kind: str, began: float, document: dict[str, Any], save: _Saver) -> None:
    if not options.no_doctor:
        from tokenring.cli.doctor.examine import examine

        document["doctor"] = asdict(examine(os.environ, DOCTOR_SECONDS))
        save()
    ranks = options.ranks or _count(kind, options, document)
    document["ranks"] = ranks
    emulate = str(TESTS) if options.emulate else None
    asked = Asked(kind, ranks, emulate, began + 60 * options.minutes, options.task_seconds)
    if kind == "npu" and not emulate:  # nothing else reads them
        asked.settings = SETTINGS
    tasks = options.only.split(",") if options.only else _all_tasks(options, kind, ranks)
    document["asked"] = tasks

    def tell(task: str, told: dict[str, Any]) -> None:
        document["tasks"][task] = told
        save()
        print(f"{task:<28} {told['status']:<9} {told.get('seconds', '')!s:>8}  {told.get('error', '')}", flush=True)

    document["device"] = run(asked, tasks, tell)


def _document(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    return {
        "format": FORMAT, "version": VERSION, "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.system()} {platform.machine()}", "kind": kind, "emulated": options.emulate,
        "ranks": None, "device": "", "asked": [], "tasks": {}, "verdicts": [],
    }  # fmt: skip


class _Saver:
    """Writes the file as a whole, whenever something was found: what broke later takes nothing away."""

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.path, self.document = path, document
        self()

    def __call__(self) -> None:
        beside = self.path.with_name(f".{self.path.name}.part")
        beside.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)


def _count(kind: str, options: argparse.Namespace, document: dict[str, Any]) -> int:
    """As many ranks as NPUs; by the doctor, as this process imports no torch_npu."""
    if kind == "cpu" or options.emulate:
        return 4
    if "doctor" not in document:
        raise RuntimeError("with --no-doctor, say how many NPUs: --ranks 8")
    npus = [each for each in document["doctor"]["accelerators"] if each["type"] == "npu"]
    if not npus:
        raise RuntimeError("no NPU was found here: `tokenring doctor` says why; --device cpu tries the script itself")
    return len(npus[0]["names"])


def _all_tasks(options: argparse.Namespace, kind: str, ranks: int) -> list[str]:
    return [*LINKS, *OPERATORS, *KERNEL, *LAYERS, *_schedules(options, kind, ranks), *JOBS]


def _schedules(options: argparse.Namespace, kind: str, ranks: int) -> list[str]:
    """A task for each schedule that fits the smaller call."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # here, torch is needed for arithmetic alone
    from npu_smoke import here, schedules

    sizes = here.DRY if kind == "cpu" or options.emulate else here.ON_NPU
    place = here.Here(0, ranks, "cpu", bool(options.emulate), lambda text: None)
    named = schedules.names(ranks, *schedules.size(place, sizes.check))
    if options.schedules != "all":
        wanted = options.schedules.split(",")
        named = [name for name in named if name in wanted or name.partition("/")[0] in wanted]
    return [f"schedule:{name}" for name in named]


def _judge(document: dict[str, Any]) -> None:
    tasks = dict(document["tasks"])
    tasks["schedules"] = _all_schedules(tasks, document["asked"])
    document["verdicts"] = []
    real = document["kind"] == "npu" and not document["emulated"]
    for each in UNKNOWNS:
        word, text = verdict(each, tasks, real)
        document["verdicts"].append(
            {"key": each.key, "question": each.question, "assumed": each.assumed, "verdict": word, "text": text}
        )


def _all_schedules(tasks: dict[str, Any], asked: list[str]) -> dict[str, Any]:
    """The tasks of schedules as one. asked: all tasks; what no time was left for, or a stop came before, is untried."""
    each = {name.partition(":")[2]: told for name, told in tasks.items() if name.startswith("schedule:")}
    done = {name: told["result"] for name, told in each.items() if told["status"] == "done"}
    if not done:
        return {"status": "failed", "error": "no schedule ran to its end"}
    failed = [name for name, told in each.items() if told["status"] in ("failed", "late")]
    wanted = [name.partition(":")[2] for name in asked if name.startswith("schedule:")]
    untried = [name for name in wanted if name not in done and name not in failed]
    return {"status": "done", "result": {"schedules": done, "failed": failed, "untried": untried}}


def _show(document: dict[str, Any]) -> None:
    where = f"{document['ranks']} × {document['device'] or document['kind']}"
    real = document["kind"] == "npu" and not document["emulated"]
    print(f"\nnpu-smoke on {where}, {document['seconds']} s" + ("" if real else ": A TRIAL, no NPU was there"))
    for each in document["verdicts"]:
        print(f"{each['verdict']:<12} {each['key']:<20} {each['text']}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ci/npu-smoke",
        description="Settle on NPUs what no emulation can: links, waits, memory, operators, every schedule, "
        "a step of MindSpeed. "
        "Starts its own processes; needs tokenring and torch_npu. Writes one file to send back.",
    )
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="so many NPUs, from 0 on (all)")
    add("-o", "--output", default="npu-smoke.json", metavar="FILE", help="results (npu-smoke.json)")
    add("--minutes", type=float, default=10.0, metavar="M", help="what is not begun by then is left out (10)")
    add("--task-seconds", type=float, default=TASK_SECONDS, metavar="S", help=f"limit of each task ({TASK_SECONDS:g})")
    add("--only", metavar="TASKS", help=f"of {', '.join([*LINKS, *OPERATORS, *KERNEL, *LAYERS, *JOBS])}, schedule:NAME")
    add("--schedules", default="all", metavar="NAMES", help="schedules or families, separated by commas (all that fit)")
    add("--device", choices=("npu", "cpu"), default="npu", help="cpu: a dry run of the script itself, over Gloo (npu)")
    add("--emulate", action="store_true", help="on the emulated NPUs of tests/fakes: a trial of the script itself")
    add("--no-doctor", action="store_true", help="leave the report of `tokenring doctor` out of the file")
    return parser
