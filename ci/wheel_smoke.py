"""What ci/wheel runs in the clean environment: is the wheel whole, and does it work?"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tokenring as tr
import tokenring.backends
import tokenring.topology


def check_origin() -> None:
    for module in (tr, tokenring.backends, tokenring.topology):
        origin = Path(str(module.__file__))
        assert origin.is_relative_to(sys.prefix), f"{module.__name__} comes from {origin}"
    assert Path(str(tr.__file__)).with_name("py.typed").is_file(), "py.typed is missing"
    installed = importlib.metadata.version("tokenring-attention")
    assert installed == tr.__version__, f"the wheel says {installed}, the package {tr.__version__}"


def check_command() -> None:
    script = Path(sys.prefix, "bin", "tokenring")
    out = subprocess.run([script, "--help"], check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout
    assert "usage: tokenring" in out, out


def check_attention() -> None:
    """One rank alone must compute what torch computes."""
    torch.manual_seed(0)
    q_BTHD, k_BTHD, v_BTHD = (torch.randn(2, 64, heads, 32) for heads in (4, 2, 2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        out_BTHD = tr.attention(q_BTHD, k_BTHD, v_BTHD, tr.ContextParallel(), mask=tr.Causal())
    finally:
        dist.destroy_process_group()
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out_BTHD, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


for check in (check_origin, check_command, check_attention):
    check()
    print(f"wheel: {check.__name__} ok")
