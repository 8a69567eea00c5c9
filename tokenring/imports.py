"""Failures to import torch or torch_npu: the error in one sentence, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
AUTOLOAD_FAILED = "Failed to load the backend extension"
NO_LIBRARY = re.compile(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file")
CANN_LIBRARIES = re.compile(r"lib(hccl|ascend|acl|ge_|graph|fmk|msprof|runtime|opapi|nnopbase|tiling|profapi)")
SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
SOURCE_CANN = (
    "install CANN and the operators of your chip, and run its set_env.sh in this shell "
    "(source /usr/local/Ascend/cann/set_env.sh, before CANN 8.5 /usr/local/Ascend/ascend-toolkit/set_env.sh)"
)
SHORT = 160


class Explained(NamedTuple):
    """An explanation of a failure: what is wrong, and what to do."""

    what: str
    advice: str


def explain(text: str, set_env: str | None = None) -> Explained:
    """Explain an error's text, as torch_npu or the loader wrote it. set_env: the script of a CANN that is installed."""
    if found := NO_LIBRARY.search(text):
        return _no_library(found[1], set_env)
    if "ERR00007" in text or "Two accelerators cannot be used" in text:
        return Explained(
            "this torch is built for another accelerator, and a process can have one kind only (ERR00007)",
            "install the CPU build of torch (its version ends in +cpu) beside torch_npu, in an environment of its own",
        )
    if "undefined symbol" in text:
        return Explained(
            f"torch_npu and this torch, or this CANN, are not of one release ({_short(text)})",
            "install the torch that torch_npu names, and the CANN that goes with both (docs/ascend.md has the table)",
        )
    if found := re.search(r"No module named '([\w.]+)'", text):
        return Explained(f"it needs the Python package {found[1]}", f"pip install {found[1].partition('.')[0]}")
    if "PyTorch is not linked with support for" in text or "8020" in text or "drvRet" in text:
        return Explained(
            f"the driver gives it no device ({_short(text)})",
            "see that npu-smi info lists the NPUs for this user, and that the container maps /dev/davinci*",
        )
    return Explained(_short(text) or "it says nothing", "run `python -c 'import torch_npu'` to see all that it says")


def _no_library(name: str, set_env: str | None) -> Explained:
    if not CANN_LIBRARIES.match(name):
        return Explained(f"{name} is not found", f"install what has {name}, or put its folder into LD_LIBRARY_PATH")
    if set_env is not None:
        return Explained(f"{name}, a library of CANN, is not found in this shell", f"run: source {set_env}")
    return Explained(f"{name}, a library of CANN, is not found", SOURCE_CANN)


def ended_by(code: int) -> str:
    """Return an exit code as words."""
    if code < 0:
        name = SIGNALS.get(-code)
        return f"it ends the process by signal {-code}" + (f" ({name})" if name else "")
    return f"it ends the process with exit code {code}"


def last_line(text: str) -> str:
    """Return the line of a traceback that names the error, or the last one that is not empty.

    A chain of errors ends in torch's own sentence about the autoload, which tells nothing: the one before counts.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    telling = [line for line in errors if AUTOLOAD_FAILED not in line]
    return (telling or errors or lines or [""])[-1]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHORT else text[: SHORT - 2] + " …"


# ---------- in a process that fails to import torch


def import_failure(error: BaseException) -> str | None:
    """Return a sentence for an error of `import torch` that is known; None for any other, which explains itself."""
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "torch is not installed: pip install torch (README.md says which versions)"
    chain = list(_chain(error))
    if not any(AUTOLOAD_FAILED in str(each) for each in chain):
        return None
    what = " ".join(str(error).split())
    name = re.search(rf"{AUTOLOAD_FAILED}: (\w+(?:\.\w+)*)", what)
    package = name[1] if name else "a backend"
    cause = explain(str(chain[-1])) if len(chain) > 1 else Explained("it says no more", "run tokenring doctor")
    return (
        f"torch cannot be imported: it loads {package}, which fails: {cause.what}; {cause.advice}, or set {AUTOLOAD}=0 "
        f"to run without it; `tokenring doctor` says more"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# ---------- versions


def version_of(package: str) -> str | None:
    """Return the version of a package as installed; None: it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def wanted_torch(package: str) -> str | None:
    """Return the torch that an installed package requires, such as "==2.13.0.*"; None: it has no requirement."""
    try:
        wanted = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return None
    for each in wanted:
        if found := re.match(r"torch\b(?![-_.\w])\s*\(?([^;)]*)", each):
            return found[1].strip() or None
    return None


def mismatch(package: str, version: str, wants: str | None, torch: str) -> str | None:
    """Return why a vendor's package and a torch do not go together; None: they do, as far as versions show.

    A vendor's package is built for one release of torch: by what it requires, else by its own number.
    """
    if wants is None:
        wanted = version
    elif found := re.search(r"==\s*([0-9][0-9.]*)", wants):
        wanted = found[1]
    else:
        return None
    if _release(wanted) == _release(torch):
        return None
    return f"{package} {version} goes with torch {'.'.join(map(str, _release(wanted)))}, and this is torch {torch}"


def _release(version: str) -> tuple[int, ...]:
    """Return the release of a version, (2, 13) of "2.13.0+cpu"; the patch is left out, as post-releases change it."""
    return tuple(int(part) for part in re.findall(r"[0-9]+", version.partition("+")[0])[:2])
