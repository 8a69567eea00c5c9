"""The examination: the answers of the probes, files and variables, and what follows from them."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from tokenring import imports as say
from tokenring._version import __version__
from tokenring.cli.doctor.ask import Answer, ask
from tokenring.cli.doctor.cann import find_cann, is_sourced, set_env_of
from tokenring.cli.doctor.findings import (
    Accelerators,
    DefaultChoice,
    Findings,
    OperatorFinding,
    Option,
    Problem,
    TorchNpu,
)
from tokenring.cli.doctor.variables import unset, variables
from tokenring.tables.kept_files import folder_of_plans

SECONDS = 60.0  # for each process; a first import from a slow disk takes half of it
OFF = {say.AUTOLOAD: "0"}
REGISTERS = "torch.backends"  # the group of entry points that `import torch` loads


def examine(environment: Mapping[str, str] = os.environ, seconds: float = SECONDS) -> Findings:
    """Examine this machine. Raises nothing: a part that fails is a problem in the findings."""
    found = Findings(__version__, platform.python_version(), f"{platform.system()} {platform.machine()}")
    answers: dict[str, Answer] = {}
    for part in (_files, _ask_all, _torch, _torch_npu, _devices, _missing):
        try:
            part(found, answers, environment, seconds)
        except Exception as error:
            what = f"this part of the examination failed: {type(error).__name__}: {' '.join(str(error).split())}"
            found.problems.append(Problem(part.__name__.strip("_"), what, "please report it"))
    return found


def _files(found: Findings, answers: dict[str, Answer], environment: Mapping[str, str], seconds: float) -> None:
    found.cann = find_cann(environment)
    found.environment = variables(environment)
    folder = folder_of_plans(environment)
    found.plans_folder = None if folder is None else str(folder)
    for variable in found.environment:
        if variable.warning:
            what = f"{variable.name}={variable.value}: {variable.warning}"
            found.problems.append(Problem("environment", what, f"change or unset {variable.name}", hurts=False))


def _ask_all(found: Findings, answers: dict[str, Answer], environment: Mapping[str, str], seconds: float) -> None:
    """Run all probes at once: most of their time is reading files."""
    wanted: dict[str, Mapping[str, str]] = {"torch": {**environment, **OFF}}
    if _has("torch_npu"):
        wanted["torch_npu"] = {**environment, **OFF}
    if _registered() and environment.get(say.AUTOLOAD, "1") != "0":
        wanted["autoload"] = environment
    with ThreadPoolExecutor(len(wanted)) as pool:
        asked = {name: pool.submit(ask, name, variables, seconds) for name, variables in wanted.items()}
        answers.update({name: future.result() for name, future in asked.items()})


def _has(package: str) -> bool:
    """Tell whether a package is installed, or at least found."""
    if say.version_of(package) is not None:
        return True
    with suppress(ImportError, ValueError):
        return find_spec(package) is not None
    return False


def _registered() -> list[str]:
    """Return the packages that `import torch` loads by itself."""
    return sorted({each.value.partition(":")[0].partition(".")[0] for each in entry_points(group=REGISTERS)})


def _torch(found: Findings, answers: dict[str, Answer], environment: Mapping[str, str], seconds: float) -> None:
    answer = answers["torch"]
    found.torch = answer.said.get("import torch")
    found.torch_npu = TorchNpu(transfer=_transferred(answers))
    if found.torch is None:
        why = _why(answer, "import torch", None)
        found.problems.append(Problem("torch", f"torch cannot be imported: {why.what}", why.advice))
        return
    for part in ("accelerators", "choices"):
        if part not in answer.said:
            why = _why(answer, part, None)
            found.problems.append(Problem("torch", f"its {part} is unknown: {why.what}", why.advice))


def _torch_npu(found: Findings, answers: dict[str, Answer], environment: Mapping[str, str], seconds: float) -> None:
    answer = answers.get("torch_npu")
    if answer is None:
        return
    version = say.version_of("torch_npu") or answer.said.get("import torch_npu")
    imports = "import torch_npu" in answer.said
    wants = say.wanted_torch("torch_npu")
    autoload = _autoload(answers, environment)
    found.torch_npu = TorchNpu(version, imports, autoload, wants, _transferred(answers))
    set_env = set_env_of(found.cann) if found.cann and not is_sourced(environment) else None
    if not imports:
        why = _why(answer, "import torch_npu", set_env)
        found.problems.append(Problem("torch_npu", f"torch_npu cannot be imported: {why.what}", why.advice))
    if autoload == "broken":
        what = "`import torch` alone fails: it loads torch_npu by itself (autoload)"
        if imports:
            what += f", which then fails: {_why(answers['autoload'], 'import torch', set_env).what}"
        advice = f"set {say.AUTOLOAD}=0 until torch_npu imports: torch then runs on the CPU"
        found.problems.append(Problem("autoload", what, advice))
    if found.torch and version and (unlike := say.mismatch("torch_npu", version, wants, found.torch)):
        advice = "install the pair that belongs together (docs/ascend.md has the table)"
        found.problems.append(Problem("versions", unlike, advice, hurts=not imports))
    found.operators = [OperatorFinding(**each) for each in answer.said.get("operators", [])]
    for part in ("operators", "accelerators", "choices"):
        if imports and part not in answer.said:
            why = _why(answer, part, set_env)
            found.problems.append(Problem("torch_npu", f"its {part} is unknown: {why.what}", why.advice))


def _autoload(answers: dict[str, Answer], environment: Mapping[str, str]) -> str:
    if "torch_npu" not in _registered():
        return "none"
    if environment.get(say.AUTOLOAD, "1") == "0":
        return "off"
    return "works" if "import torch" in answers["autoload"].said else "broken"


def _transferred(answers: dict[str, Answer]) -> bool:
    return any(answer.said.get("transfer", False) for answer in answers.values())


def _why(answer: Answer, part: str, set_env: str | None) -> say.Explained:
    """Explain why a part failed: by its own error, or by how the process ended."""
    if part in answer.failed:
        return say.explain(say.last_line(answer.failed[part]), set_env)
    told = say.last_line(answer.printed)
    ending = answer.ending or "it says nothing"
    if told and answer.ending:
        known = say.explain(answer.printed if say.NO_LIBRARY.search(answer.printed) else told, set_env)
        return say.Explained(f"{ending}, after saying: {known.what}", known.advice)
    return say.Explained(ending, f"run `python -c '{part}'`, which shows all that it says")


def _devices(found: Findings, answers: dict[str, Answer], environment: Mapping[str, str], seconds: float) -> None:
    for name in ("torch", "torch_npu"):
        said = answers[name].said if name in answers else {}
        found.accelerators += [Accelerators(**each) for each in said.get("accelerators", [])]
        found.choices += [_choice(each) for each in said.get("choices", [])]
    cpu = next((choice for choice in found.choices if choice.device == "cpu"), None)
    if cpu is not None:  # what there would be on devices that are not here
        answer = answers["torch"]
        cpu.others.extend(Option(**each) for each in answer.said.get("elsewhere", []))
        if "elsewhere" not in answer.said:
            cpu.others.append(Option("nccl, symm, nvshmem", f"not told: {_why(answer, 'elsewhere', None).what}"))
        if not any(choice.device == "npu" for choice in found.choices):
            cpu.others.append(Option("hccl", f"moves NPU tensors; {_lacks_npu(found)}"))


def _lacks_npu(found: Findings) -> str:
    """Return all that is missing for HCCL, which comes with torch_npu and CANN."""
    npu = found.torch_npu
    if npu.installed is None and npu.imports is None:
        lacks = ["torch_npu is not installed"]
    else:
        lacks = ["torch_npu sees no NPU" if npu.imports else "torch_npu cannot be imported"]
    lacks += ["CANN is not found"] if found.cann is None else []
    lacks += [] if _npus_seen() else ["this machine has no /dev/davinci*"]
    return "; ".join(lacks)


def _choice(told: dict[str, Any]) -> DefaultChoice:
    options = {name: Option(**told[name]) if told[name] else None for name in ("transport", "kernel", "merge")}
    others, measured = ([Option(**each) for each in told[name]] for name in ("others", "measured"))
    return DefaultChoice(told["device"], options["transport"], options["kernel"], others, options["merge"], measured)


def _missing(found: Findings, answers: dict[str, Answer], environment: Mapping[str, str], seconds: float) -> None:
    """Add problems for all that an Ascend machine would need beside what is there."""
    kinds = {each.type for each in found.accelerators}
    has_npus = bool(_npus_seen())
    if has_npus and not found.torch_npu.installed:
        what = "this machine has Ascend devices, and torch_npu is not installed"
        advice = f"pip install torch_npu, of the release that goes with torch {found.torch or 'here'}, and CANN"
        found.problems.append(Problem("torch_npu", what, advice))
    if found.torch_npu.imports and "npu" not in kinds:
        advice = "see that npu-smi info lists the NPUs for this user, and what ASCEND_RT_VISIBLE_DEVICES leaves of them"
        found.problems.append(Problem("npu", "torch_npu imports, and sees no NPU", advice, hurts=has_npus))
    if "npu" in kinds:
        missing = unset(environment, any(map(_has, ("megatron", "mindspeed"))))
        found.problems += [Problem("environment", *each, hurts=False) for each in missing]
    for choice in found.choices:
        if choice.device == "cpu":
            continue
        for part, option in (("transport", choice.transport), ("kernel", choice.kernel)):
            if option is None:
                why = "; ".join(each.why for each in choice.others if each.name in ("auto", part))
                what = f"nothing here {PURPOSE[part]} {choice.device} tensors: {why}"
                found.problems.append(Problem(part, what, f"move the tensors to the CPU, or see why no {part} serves"))


PURPOSE: Mapping[str, str] = {"transport": "moves", "kernel": "computes attention of"}


def _npus_seen(folder: str = "/dev") -> list[str]:
    """Return the device files of NPUs, which are there without any package."""
    with suppress(OSError):
        return sorted(name for name in os.listdir(folder) if name.startswith("davinci") and name[7:].isdigit())
    return []
