"""`tokenring rates`: measure the speed of this machine's kernel, once, for the planner.

Where "auto" chooses among several kernels (CUDA) each of them is measured, and from then on the choice goes by their
tables. With --transports it runs on ranks, and measures what moves messages (transports).

Exit codes: 0 measured and kept; 2 a wrong option, or a device or kernel that is not there.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from tokenring.backends.devices import accelerator_types
from tokenring.backends.interfaces import AttentionKernel
from tokenring.backends.kernels.auto import Choosing, refuses
from tokenring.backends.measuring import SECONDS, measured_rates
from tokenring.backends.registry import make_kernel
from tokenring.backends.table_keys import key_of
from tokenring.cli.plan.options import DTYPES
from tokenring.cli.spelling import add_dtype, add_value_dim, also
from tokenring.display.console import Console, Parser, read_options
from tokenring.errors import BackendUnavailable, ConfigurationError
from tokenring.nearest import hint
from tokenring.tables.kernel_rates import KernelKey, keep, to_json
from tokenring.tables.rates import Rates

DEVICES = ("cpu", "cuda", "npu")
MOST = {"dim": 4096, "value_dim": 4096, "threads": 4096, "seconds": 3600}


def main(argv: list[str]) -> int:
    """Measure and keep rates; return the exit code. Raises ConfigurationError and BackendUnavailable."""
    if "--transports" in argv:
        from tokenring.cli.rates.transports import main as transfers_main  # it runs on ranks, as bench does

        return transfers_main(argv)
    options = read_options(_parser().parse_args, argv)
    if isinstance(options, int):
        return options
    console = Console(sys.stdout, sys.stderr, os.environ)
    _check(options)
    kind = options.device or next(iter(accelerator_types()), "cpu")
    if kind not in DEVICES:
        raise ConfigurationError(f"--device {kind}: choose one of {', '.join(DEVICES)}{hint(kind, DEVICES)}")
    if kind != "cpu" and kind not in accelerator_types():
        raise BackendUnavailable(f"--device {kind}: torch finds none here; `tokenring doctor` says what is missing")
    threads = torch.get_num_threads()
    if kind == "cpu":
        torch.set_num_threads(options.threads)  # as many as a rank will have
    try:
        _measure(kind, options, console)
    finally:
        torch.set_num_threads(threads)
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("dim", "value_dim", "threads", "seconds"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= MOST[name]:
            spelled = name.replace("_", "-")
            raise ConfigurationError(f"--{spelled} {value}: give a number above 0, of {MOST[name]} at most")


def _measure(kind: str, options: argparse.Namespace, console: Console) -> None:
    device = torch.device(kind)
    kernel, dtype = make_kernel(options.kernel, device), DTYPES[options.dtype]
    for each in candidates(kernel, options.dim, dtype, options.value_dim):
        try:
            _show(_measure_one(each, device, options, console), options, console)
        except Exception as error:
            if not refuses(error):
                raise
            say = console.complain if options.json else console.say
            say(f"{each.name} is left out: {' '.join(str(error).split())}\n")
    measured = _measure_one(kernel, device, options, console)
    if options.json:  # of what attention takes: one document
        console.data(to_json(*measured[:2]))
    else:
        _show(measured, options, console, "")


def candidates(
    kernel: AttentionKernel, head_dim: int, dtype: torch.dtype, value_dim: int | None = None
) -> list[AttentionKernel]:
    """Return the kernels among which this one chooses by their tables, which are measured before it is."""
    return kernel.kernels(head_dim, dtype, value_dim) if isinstance(kernel, Choosing) else []


Kept = tuple[Rates, KernelKey, Path | None]


def _measure_one(kernel: AttentionKernel, device: torch.device, options: argparse.Namespace, console: Console) -> Kept:
    dtype = DTYPES[options.dtype]
    key = key_of(kernel, device, dtype, options.dim, options.value_dim)
    console.status(f"measuring {key}")
    found = measured_rates(kernel, device, dtype, options.dim, options.seconds, options.value_dim)
    return found, key, keep(found, key, os.environ)


def _show(measured: Kept, options: argparse.Namespace, console: Console, after: str = "\n") -> None:
    """Print the table and where it was kept; nothing where JSON alone is asked for."""
    found, key, path = measured
    if not options.json:
        where = "not kept: there is no home folder" if path is None else f"kept in {path}"
        console.say("\n".join([str(key), "", *table(found), "", where + after]))


def table(rates: Rates) -> list[str]:
    """Return rates as text, a line for each tile."""
    forward, backward = dict(rates.forward), dict(rates.backward)
    lines = [f"{'tile':>13}  {'forward':>8}  {'backward':>8}  TFLOP/s"]
    for side in sorted({*forward, *backward}):
        cells = [f"{each[side]:8.3g}" if side in each else f"{'-':>8}" for each in (forward, backward)]
        lines.append(f"{f'{side} × {side}':>13}  {cells[0]}  {cells[1]}")
    lines.append(
        f"a call {rates.call_seconds * 1e6:.3g} µs, a copy {rates.op_seconds * 1e6:.3g} µs, a merge "
        f"{(rates.op_seconds + rates.merge_seconds) * 1e6:.3g} µs, copies {rates.copy_gbs:.3g} GB/s read and written"
    )
    if rates.launching is not None:
        lines.append(f"a launch {rates.launching.seconds * 1e6:.3g} µs of the host")
    return lines


def _parser() -> Parser:
    parser = Parser(
        prog="tokenring rates",
        description="Measure the attention kernel on this machine's device, for tiles of every length, and keep the "
        "table: schedule='auto' uses it from then on.",
        allow_abbrev=False,  # of --transports, which is another command
    )
    add = parser.add_argument
    add("--transports", action="store_true", help="messages between ranks instead: --transports --help says more")
    add("--device", metavar="TYPE", help="cpu, cuda, npu (an accelerator if there is one, else cpu)")
    add("--kernel", default="auto", metavar="NAME", help="(auto: what attention would take)")
    add_dtype(parser, "bf16")
    also(parser, add("--dim", type=int, default=128, metavar="N", help="dimension of a head (128)"), "--head-dim")
    add_value_dim(parser)
    add("--json", action="store_true", help="print the table that is kept, as JSON")
    add("--threads", type=int, default=1, metavar="N", help="on a CPU, of a rank (1)")
    add("--seconds", type=float, default=SECONDS, metavar="S", help="no call longer than this (1)")
    return parser
