"""Libraries that stand in for CANN, so that a real torch_npu wheel can be imported where there is no NPU.

usage: python hardware/npu/cann_stubs.py DIRECTORY    the one that `pip install --target` put torch_npu into

Every CANN library that the wheel's own libraries need comes to lie in DIRECTORY/stubs. libascendcl.so holds what
nothing else defines, as functions that return 0, which is CANN's word for success; the others are empty and need it.
Nothing can be computed with them: there are no devices. Needs gcc, nm and readelf; run it with the Python, and
beside the torch, that will import torch_npu. docs/ascend-emulation.md says what it is for.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

HOLDER = "libascendcl.so"
CHIP = "Ascend910B1"  # what aclrtGetSocName says: the import asks for it
LOOKED_UP = {"aclrtSetOpWaitTimeout"}  # by name, when torch_npu makes an HCCL group
COMPILE = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin"]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    where = Path(sys.argv[1])
    wheel = [*where.glob("torch_npu/lib/*.so*"), *where.glob("torch_npu/_C*.so")]
    if not wheel:
        sys.exit(f"{where}/torch_npu holds no libraries: pip install --no-deps --target {where} torch_npu==2.13.0")
    stubs = where / "stubs"
    stubs.mkdir(exist_ok=True)
    held = [*wheel, *libraries_of("torch")]
    symbols = sorted(missing_symbols(wheel, held) | LOOKED_UP)
    libraries = missing_libraries(wheel, {each.name for each in held}) | {HOLDER}
    build(stubs, symbols, libraries)
    print(f"{len(symbols)} symbols in {stubs}/{HOLDER}, of {len(libraries)} libraries: {', '.join(sorted(libraries))}")


def libraries_of(package: str) -> list[Path]:
    """Those of an installed package, which is not imported for that."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        sys.exit(f"{package} is not installed beside {sys.executable}")
    return sorted(Path(found.origin).parent.glob("lib/*.so*"))


def missing_symbols(wheel: Iterable[Path], held: Iterable[Path]) -> set[str]:
    """What the wheel must find and neither it, nor torch, nor this process (Python and the C library) defines.

    A version ("@GLIBCXX_3.4") means that a system library had the name when the wheel was linked; CANN has none.
    """
    wanted = {name for each in wheel for kind, name in symbols_of(each, "--undefined-only") if kind == "U"}
    defined = {name.partition("@")[0] for each in held for _, name in symbols_of(each, "--defined-only")}
    return {name for name in wanted - defined if "@" not in name and not in_this_process(name)}


def symbols_of(library: Path, which: str) -> set[tuple[str, str]]:
    """(kind, name): kind "U" must be found, "w" may be missing."""
    lines = output("nm", "--dynamic", which, library).splitlines()
    return {(parts[-2], parts[-1]) for parts in map(str.split, lines) if len(parts) > 1}


def in_this_process(name: str) -> bool:
    return hasattr(ctypes.pythonapi, name)


def missing_libraries(wheel: Iterable[Path], held: set[str]) -> set[str]:
    """What the wheel's libraries are linked with, and no one has."""
    dynamic = "".join(output("readelf", "--dynamic", each) for each in wheel)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)) - held
    return {name for name in needed if not loads(name)}


def loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def build(stubs: Path, symbols: list[str], libraries: set[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "stubs.c")
        source.write_text("".join(map(definition, enumerate(symbols))))
        output(*COMPILE, source, f"-Wl,-soname,{HOLDER}", "-o", stubs / HOLDER)
        source.write_text("")
        for name in libraries - {HOLDER}:
            output(*COMPILE, source, "-Wl,--no-as-needed", stubs / HOLDER, f"-Wl,-soname,{name}", "-o", stubs / name)


def definition(numbered: tuple[int, str]) -> str:
    """In C, of whatever name: C++ has names that C cannot write."""
    number, name = numbered
    if name == "aclrtGetSocName":
        return f'const char *{name}(void) {{ return "{CHIP}"; }}\n'
    return f'long stub_{number}(void) __asm__("{name}");\nlong stub_{number}(void) {{ return 0; }}\n'


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
