"""The forks that stand in for Pythons: their ends are those of their clients, and none outlives anybody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import patient
from warm import warm_python

pytestmark = pytest.mark.timeout(300)  # one that imports torch, on a machine that is busy


def run(python: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = os.environ | environment
    return subprocess.run([python, *arguments], capture_output=True, text=True, env=given, timeout=patient(100))


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("import sys; sys.exit(3)", 3), ("raise SystemExit('said')", 1), ("pass", 0), ("1 / 0", 1),
        ("import os; os._exit(7)", 7), ("import os; os.abort()", -signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)  # fmt: skip
def test_it_ends_as_a_python_does(code: str, ends: int, warm: str) -> None:
    made = [run(python, "-c", code) for python in (warm, sys.executable)]
    assert [each.returncode for each in made] == [ends, ends]
    assert [each.stderr.splitlines()[-1:] for each in made[:1]] == [each.stderr.splitlines()[-1:] for each in made[1:]]


def test_what_it_is_given(warm: str, tmp_path: Path) -> None:
    """Arguments, environment, folder and streams; torch is there, and what it starts is as warm."""
    code = "import os, sys; print(sys.argv, os.environ['GIVEN'], os.getcwd(), 'torch' in sys.modules, sys.executable)"
    script = tmp_path / "script.py"
    script.write_text(f"{code}; print('said', file=sys.stderr)")
    made = run(warm, str(script), "a", "b", GIVEN="here")
    assert made.stdout.split("\n")[0] == f"{[str(script), 'a', 'b']} here {os.getcwd()} True {warm}"
    assert made.stderr == "said\n"
    assert run(warm, "-u", "-m", "json.tool", "--help").stdout.startswith("usage:")
    assert run(warm, "-I", "-S", "-c", "import sys; print('site' in sys.modules)").stdout == "False\n"


def test_its_streams_are_those_of_a_start(warm: str) -> None:
    """What one was made for a file would not do with a pipe, and each line of an error is there at once."""
    code = (
        "import os, sys; sys.stdout.reconfigure(errors='replace'); sys.stderr.reconfigure(errors='replace'); "
        "print('a'); print('b', file=sys.stderr); os._exit(0)"
    )
    for unbuffered, out in (("", ""), ("1", "a\n")):
        made = [run(python, "-c", code, PYTHONUNBUFFERED=unbuffered) for python in (warm, sys.executable)]
        assert [(each.returncode, each.stdout, each.stderr) for each in made] == [(0, out, "b\n")] * 2


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="namespaces need root")
@pytest.mark.parametrize("namespace", ["net", "uts"])
def test_it_is_in_its_clients_namespaces(namespace: str, warm: str) -> None:
    code = f"import os; print(os.readlink('/proc/self/ns/{namespace}'), flush=True)"
    both = f"{code}; os.execv({warm!r}, [{warm!r}, '-c', {code!r}])"
    apart = ["unshare", f"--{namespace}", sys.executable, "-c", both]
    outside = os.readlink(f"/proc/self/ns/{namespace}")
    wanted, found = subprocess.run(apart, capture_output=True, text=True, timeout=patient(100)).stdout.split()
    assert wanted == found != outside


def test_one_in_which_torch_is_still_to_be_imported(warm_torch: str, tmp_path: Path) -> None:
    """What is installed for torch is loaded at its import, and may fail it, each time."""
    (tmp_path / "extension.py").write_text("def load(): raise OSError('no driver')")
    (tmp_path / "extension-1.dist-info").mkdir()
    (tmp_path / "extension-1.dist-info" / "entry_points.txt").write_text("[torch.backends]\nx = extension:load\n")
    code = (
        "import sys; print('torch' in sys.modules)\n"
        "for _ in range(2):\n"
        "    try: import torch; print(torch.ones(1).item(), torch is sys.modules['torch'])\n"
        "    except RuntimeError as error: print(error.__cause__, 'torch' in sys.modules)\n"
    )
    path = str(tmp_path)
    fails, off = (run(warm_torch, "-c", code, PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD=on) for on in "10")
    assert fails.stdout.splitlines() == ["False", *["no driver False"] * 2], fails.stderr
    assert off.stdout.splitlines() == ["False", *["1.0 True"] * 2], off.stderr


WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def test_it_goes_with_its_client(warm: str) -> None:
    with subprocess.Popen([warm, "-c", WAITS], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        process = int(client.stdout.readline())
        client.kill()
    wait_until_gone(process)


def test_it_goes_with_what_it_was_forked_from() -> None:
    """And its client with both."""
    with warm_python(bare=True) as python:
        client = subprocess.Popen([python, "-c", WAITS], stdout=subprocess.PIPE)
        assert client.stdout is not None
        process = int(client.stdout.readline())
    with client:
        wait_until_gone(process)
        assert client.wait(patient(60)) == 1


def wait_until_gone(process: int) -> None:
    """Gone, or waited for by nobody."""
    deadline = time.monotonic() + patient(60)
    while time.monotonic() < deadline:
        try:
            if "(zombie)" in Path(f"/proc/{process}/status").read_text():
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {process} is still there")
