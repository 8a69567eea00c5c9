"""hardware/npu/cann_stubs.py on a wheel of our own making: what it lacks is found and made, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient

SCRIPT = Path(__file__).resolve().parents[2] / "hardware" / "npu" / "cann_stubs.py"
TOOLS = ("gcc", "nm", "readelf")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="CANN's libraries are of Linux"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"),
]

CANN = 'void HcclThing(void) {}\nvoid mangled(void) __asm__("_ZN3atb5ThingEv");\nvoid mangled(void) {}\n'
WHEEL = """
#include <math.h>
extern long HcclThing(void), mangled(void) __asm__("_ZN3atb5ThingEv");
extern const char *aclrtGetSocName(void);
extern void *PyList_New(long), *torch_c10_is_not_asked(void) __attribute__((weak));
extern void helper(void);
long all_succeed(double x) { helper(); return HcclThing() + mangled() + (cos(x) > 2); }
const char *chip(void) { return aclrtGetSocName(); }
void *list(void) { return PyList_New(torch_c10_is_not_asked != 0); }
"""


def run(*command: str | Path) -> str:
    done = subprocess.run(
        command, check=True, text=True, timeout=patient(60), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout


def compiled(source: str, library: Path, *options: str | Path) -> None:
    text = library.with_suffix(".c")
    text.write_text(source)
    run("gcc", "-shared", "-fPIC", "-w", text, "-o", library, f"-Wl,-soname,{library.name}", *options)
    text.unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """torch_npu with two libraries, linked with a libhccl.so that is gone."""
    held = tmp_path / "torch_npu" / "lib"
    held.mkdir(parents=True)
    compiled(CANN, tmp_path / "libhccl.so")
    compiled("void helper(void) {}", held / "libhelper.so")
    linked = ("-Wl,--unresolved-symbols=ignore-all", "-Wl,--no-as-needed", tmp_path / "libhccl.so", "-lm")
    compiled(WHEEL, held / "libtorch_npu.so", *linked, held / "libhelper.so", "-Wl,-rpath,$ORIGIN")
    (tmp_path / "libhccl.so").unlink()
    return tmp_path


CALLS = """
import ctypes, sys
from pathlib import Path
for stub in sys.argv[2:]:
    ctypes.CDLL(stub, ctypes.RTLD_GLOBAL)
library = ctypes.CDLL(sys.argv[1] + "/torch_npu/lib/libtorch_npu.so")
library.chip.restype = ctypes.c_char_p
library.all_succeed.argtypes = [ctypes.c_double]
print(library.all_succeed(0.0), library.chip().decode())
"""


def test_what_is_missing_is_made(folder: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run(sys.executable, "-c", CALLS, folder)
    assert "libhccl.so: cannot open shared object file" in failed.value.stdout
    said = run(sys.executable, SCRIPT, folder)
    assert said.startswith("4 symbols in") and said.endswith("of 2 libraries: libascendcl.so, libhccl.so\n")
    stubs = [folder / "stubs" / name for name in ("libascendcl.so", "libhccl.so")]
    assert sorted((folder / "stubs").iterdir()) == stubs
    assert run(sys.executable, "-c", CALLS, folder, *stubs) == "0 Ascend910B1\n"
    names = {line.split()[-1] for line in run("nm", "-D", "--defined-only", stubs[0]).splitlines()}
    linked = {"HcclThing", "_ZN3atb5ThingEv", "aclrtGetSocName"}  # not cos, PyList_New, helper, nor the weak one
    assert names == {*linked, "aclrtSetOpWaitTimeout"}


def test_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run(sys.executable, SCRIPT, tmp_path)
    assert "torch_npu holds no libraries: pip install --no-deps --target" in failed.value.stdout
