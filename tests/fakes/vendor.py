"""Vendors' packages as tests need them: a folder for the import path with a torch_npu that behaves in a given way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from patience import patient

REPO = Path(__file__).resolve().parents[2]
METADATA = "Metadata-Version: 2.1\nName: torch-npu\nVersion: {version}\nRequires-Dist: torch{wants}\n"
ENTRY = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
LOADED = "def _autoload(): pass\n"

# What a torch_npu does when it is imported.
NO_CANN = 'raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")'
CLASH = (
    'raise RuntimeError("Two accelerators cannot be used at the same time in PyTorch: npu and cuda.\\n'
    '[ERROR] TIME (PID:1, Device:-1, RankID:-1) ERR00007 PTA feature not supported")'
)
ABORT = 'import os, sys\nprint("terminate called after throwing", file=sys.stderr, flush=True)\nos.abort()'
HANG = "import time\ntime.sleep(600)"
EXIT = "raise SystemExit(7)"
UNLIKE = 'raise ImportError("libtorch_npu.so: undefined symbol: _ZN3c105ErrorC2E")'
WORKS = """
import torch
__version__ = "2.13.0"
LIBRARY = torch.library.Library("npu", "DEF")
LIBRARY.define("npu_fusion_attention(Tensor query, int head_num, *, float scale=1., int pre_tockens=1) -> Tensor")
LIBRARY.define("npu_attention_update(Tensor[] lse, Tensor[] local_out, int update_type) -> (Tensor, Tensor)")
"""
# The emulated NPU, as far as a process can tell: devices, operators, HCCL.
EMULATED = f"""
import sys
sys.path[:0] = {[str(REPO / "tests" / each) for each in ("fakes", "support")]!r}
from ascend import device, hccl, operators
device.install(8)
operators.register("2.13.0")
hccl.install()
"""
# As torch_npu.contrib.transfer_to_npu: torch.cuda answers for NPUs, and what is made there is none of its.
ALIASES = """
import torch
real = torch.empty
class Npu:
    class device:
        type = "npu"
def empty(*size, device=None, **options):
    return Npu() if "cuda" in str(device) else real(*size, device=device, **options)
torch.empty = empty
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 8
torch.Tensor.is_cuda = property(lambda self: True)
"""
STUB_TORCH = '__version__ = "2.13.0"'  # imports at once: for what only a time limit ends


def torch_npu(folder: Path, body: str, version: str = "2.13.0", wants: str = "==2.13.0.*") -> Path:
    """A distribution in the folder, with its metadata and its entry point for torch's autoload."""
    package = folder / "torch_npu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(body + "\n" + LOADED)
    info = folder / f"torch_npu-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA.format(version=version, wants=wants))
    (info / "entry_points.txt").write_text(ENTRY)
    return folder


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def run(folder: Path, *arguments: str, python: str | None = None, **environment: str) -> Ran:
    """Python, or what is given instead, with the folder first on its import path, and this checkout behind it."""
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), str(REPO)])}
    ours = ("ASCEND", "HCCL", "TOKENRING", "TORCH_DEV")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [python or sys.executable, *arguments],
        cwd=folder,
        env=clean | paths | environment,
        capture_output=True,
        text=True,
        timeout=patient(100),
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def tokenring(folder: Path, *arguments: str, python: str | None = None, **environment: str) -> Ran:
    """The command."""
    code = "import sys; from tokenring.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return run(folder, "-c", code, *arguments, python=python, **environment)
