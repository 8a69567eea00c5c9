"""The findings as text: a sentence, what is there, what would be used, what is wrong and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from tokenring.cli.doctor.findings import DefaultChoice, Findings, OperatorFinding, Problem
from tokenring.display.safe_text import plain, plain_lines

WIDTH = 10  # of the words on the left
GIB = 1 << 30
MAX_CELL = 300


def report(found: Findings) -> str:
    """Return the whole report, ending in a newline."""
    blocks = [
        [_sentence(found)],
        _installed(found),
        _table(found.choices),
        _operators(found),
        _environment(found),
        _problems(found.problems),
    ]
    return plain_lines("\n\n".join("\n".join(block) for block in blocks if block)) + "\n"


def _sentence(found: Findings) -> str:
    devices = ", ".join(
        f"{count} × {name}" for each in found.accelerators for name, count in Counter(each.names).items()
    )
    where = f"accelerators: {devices}" if devices else "no accelerators: attention runs on the CPU"
    if found.torch is None:
        where = "torch cannot be imported: nothing runs"
    count = sum(each.hurts for each in found.problems)
    told = {0: "nothing is wrong", 1: "one thing is wrong"}.get(count, f"{count} things are wrong")
    return f"tokenring {found.tokenring}, {where}; {told}"


def _installed(found: Findings) -> list[str]:
    lines = [("python", f"{found.python}, {found.machine}"), ("torch", found.torch or "cannot be imported")]
    npu = found.torch_npu
    if npu.installed is None and npu.imports is None:
        text = "not installed"
    else:
        text = f"{npu.installed or 'of unknown version'}, {'imports' if npu.imports else 'cannot be imported'}"
        text += {"none": "", "off": "; autoload is off"}.get(npu.autoload, f"; autoload {_is(npu.autoload)}")
    text += "; transfer_to_npu is at work: torch.cuda stands for torch.npu" if npu.transfer else ""
    lines.append(("torch_npu", text))
    cann = found.cann
    lines.append(("CANN", "not found" if cann is None else f"{cann.version or 'of unknown version'} in {cann.folder}"))
    lines.append(("plans", f"kept in {found.plans_folder}" if found.plans_folder else "not kept"))
    for each in found.accelerators:
        gib = sorted({round(size / GIB) for size in each.memory_bytes if size is not None})
        memory = f", {' to '.join(map(str, gib))} GiB each" if gib else ""
        lines.append((each.type, f"{len(each.names)} device{'s' if len(each.names) > 1 else ''}{memory}"))
    return _columns(lines)


def _is(word: str) -> str:
    return {"broken": "is broken"}.get(word, word)


def _columns(lines: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{name:<{WIDTH}}{plain(text, MAX_CELL)}" for name, text in lines]


def _table(choices: Sequence[DefaultChoice]) -> list[str]:
    """Return the lines of the defaults for tensors on each device."""
    lines: list[str] = ["used by default for tensors on"] if choices else []
    for each in choices:
        parts = [("transport", each.transport), ("kernel", each.kernel)]
        parts += [] if each.merge is None else [("merge", each.merge)]
        for part, option in parts:
            text = "none" if option is None else f"{option.name}: {option.why}"
            lines.append(f"  {each.device:<{WIDTH - 2}}{part:<{WIDTH}} {plain(text, MAX_CELL)}")
        for word, options in (("measured", each.measured), ("other", each.others)):
            for why, alike in groupby(options, lambda option: option.why):  # one line for all that share a reason
                names = ", ".join(option.name for option in alike)
                lines.append(f"  {'':<{WIDTH - 2}}{word:<{WIDTH}} {names}: {plain(why, MAX_CELL)}")
    return lines


def _operators(found: Findings) -> list[str]:
    """Return a line for each attention operator, with the arguments that differ between releases."""
    if not found.operators:
        return []
    return ["operators of torch_npu", *(f"  {_operator(each)}" for each in found.operators)]


def _operator(each: OperatorFinding) -> str:
    if each.arguments is None:
        return f"{each.name}: not in this torch_npu"
    return f"{each.name}({', '.join(each.arguments)})"


def _environment(found: Findings) -> list[str]:
    if not found.environment:
        return []
    lines = ["variables that matter"]
    for each in found.environment:
        lines.append(f"  {each.name}={plain(each.value, MAX_CELL)}" + (f"   {each.warning}" if each.warning else ""))
    return lines


def _problems(problems: Sequence[Problem]) -> list[str]:
    lines: list[tuple[str, str]] = []
    for each in sorted(problems, key=lambda problem: not problem.hurts):
        lines += [("problem" if each.hurts else "warning", each.what), ("  do", each.advice)]
    return _columns(lines)
