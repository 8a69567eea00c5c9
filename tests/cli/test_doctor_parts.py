"""The parts of the doctor that need no process: variables, CANN's files, explanations, versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_topology_dumps import SHARED

from tokenring.cli.doctor.cann import find_cann, set_env_of
from tokenring.cli.doctor.variables import unset, variables
from tokenring.imports import explain, import_failure, last_line, mismatch

# ---------- variables


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"ASCEND_RT_VISIBLE_DEVICES": "3,1"}, "not ascending: torch_npu then counts 0 devices"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "1,1"}, "not ascending"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "all"}, "no list of device numbers"),
        ({"HCCL_CONNECT_TIMEOUT": "120"}, "recommends 600 and more"),
        ({"HCCL_CONNECT_TIMEOUT": "119"}, "HCCL takes 120 to 7200 seconds"),
        ({"HCCL_CONNECT_TIMEOUT": "7201"}, "HCCL takes 120 to 7200 seconds"),
        ({"HCCL_CONNECT_TIMEOUT": "soon"}, "HCCL takes 120 to 7200 seconds"),
        ({"HCCL_EXEC_TIMEOUT": "1868"}, "HCCL_EVENT_TIMEOUT (1868) must be longer"),
        ({"HCCL_EXEC_TIMEOUT": "60", "HCCL_EVENT_TIMEOUT": "50"}, "HCCL_EVENT_TIMEOUT (50) must be longer"),
        ({"HCCL_EXEC_TIMEOUT": "0"}, "waits for ever, also for a rank that died: set a limit, 1836"),
        ({"HCCL_EXEC_TIMEOUT": "204"}, "comes 204 s late to a message ends the job"),
        ({"HCCL_ASYNC_ERROR_HANDLING": "0"}, "only a later call tells"),
        ({"HCCL_BUFFSIZE": "0"}, "no number of MB from 1 on"),
        ({"HCCL_BUFFSIZE": "2048"}, "every communicator takes twice this: 4096 MB"),
        ({"P2P_HCCL_BUFFSIZE": "0"}, "share one stream"),
        ({"HCCL_OP_EXPANSION_MODE": "AIV"}, "AIV does not serve send and receive"),
        ({"HCCL_OP_EXPANSION_MODE": "AIV"}, "given it alone"),
        ({"HCCL_OP_RETRY_ENABLE": "L1:0, L2:1"}, "at most 5 communicators"),
        ({"RANK_TABLE_FILE": __file__}, "transport `hccl` refuses it; unset it"),
        ({"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "1"}, "are both 1"),
        ({"HCCL_WHITELIST_DISABLE": "0"}, "HCCL_WHITELIST_FILE names none"),
        ({"RANK_TABLE_FILE": "/nowhere/table.json"}, "no such file"),
        ({"RANK_TABLE_FILE": __file__}, "400 MB more"),
        ({"STREAMS_PER_DEVICE": "8"}, "share 8 streams"),
        ({"STREAMS_PER_DEVICE": "many"}, "takes 8 or 32"),
        ({"TORCH_HCCL_BLOCKING_WAIT": "1"}, "blocks the host"),
        ({"ASCEND_LAUNCH_BLOCKING": "1"}, "slow"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "blocks the host"),
        ({"TOKENRING_SCHEDULE": "spiral"}, "unknown schedule 'spiral'"),
    ],
)
def test_values_that_hurt(environment: dict[str, str], says: str) -> None:
    warned = [each for each in variables(environment) if each.warning]
    assert warned and says in str(warned[0].warning)


@pytest.mark.parametrize(
    "environment",
    [
        {"ASCEND_RT_VISIBLE_DEVICES": "0,1,5"},
        {"ASCEND_RT_VISIBLE_DEVICES": ""},
        {"HCCL_CONNECT_TIMEOUT": "600"},
        {"HCCL_CONNECT_TIMEOUT": "7200"},
        {"HCCL_EXEC_TIMEOUT": "1836"},
        {"HCCL_EXEC_TIMEOUT": "2000", "HCCL_EVENT_TIMEOUT": "0"},
        {"HCCL_EXEC_TIMEOUT": "600"},
        {"HCCL_ASYNC_ERROR_HANDLING": "1"},
        {"CUDA_DEVICE_MAX_CONNECTIONS": "2", "ASCEND_HOME_PATH": "/cann"},
        {"HCCL_EXEC_TIMEOUT": "3600", "HCCL_EVENT_TIMEOUT": "3700"},
        {"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        {"HCCL_BUFFSIZE": "200"},
        {"P2P_HCCL_BUFFSIZE": "20"},
        {"STREAMS_PER_DEVICE": "32"},
        {"HCCL_OP_EXPANSION_MODE": "HOST"},
        {"HCCL_OP_RETRY_ENABLE": "L1:0,L2:0"},
        {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0"},
        {"HCCL_WHITELIST_DISABLE": "1"},
        {"TORCH_HCCL_BLOCKING_WAIT": "0"},
        {"TOKENRING_SCHEDULE": "auto:ring"},
        {"NCCL_DEBUG": "INFO"},
    ],
)
def test_values_that_do_not(environment: dict[str, str]) -> None:
    found = [(each.name, each.warning) for each in variables(environment)]
    assert found == [(name, None) for name in sorted(environment)]


QUEUES = "export CUDA_DEVICE_MAX_CONNECTIONS=1, with --use-torch-fsdp2 2"


@pytest.mark.parametrize(
    ("environment", "has_megatron", "advised"),
    [
        ({}, False, ["export HCCL_CONNECT_TIMEOUT=600 or more"]),
        ({}, True, ["export HCCL_CONNECT_TIMEOUT=600 or more", QUEUES]),
        ({"HCCL_CONNECT_TIMEOUT": "1200"}, True, [QUEUES]),
        ({"HCCL_CONNECT_TIMEOUT": "1200", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, True, []),
        ({"HCCL_CONNECT_TIMEOUT": "1200"}, False, []),
    ],
)
def test_what_should_be_set_on_npus(environment: dict[str, str], has_megatron: bool, advised: list[str]) -> None:
    found = unset(environment, has_megatron)
    assert [advice for _, advice in found] == advised
    assert all("is not set" in what for what, _ in found)


def test_others_are_left_out() -> None:
    assert variables({"PATH": "/bin", "HOME": "/root", "MY_HCCL": "1"}) == []


# ---------- CANN's files


@pytest.mark.parametrize(
    ("place", "text", "version"),
    [
        ("Ascend/cann/x86_64-linux/ascend_toolkit_install.info", "arch=x86_64\nversion=8.5.0\n", "8.5.0"),
        ("Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info", "version=8.3.RC1\n", "8.3.RC1"),
        ("Ascend/ascend-toolkit/latest/runtime/version.info", "Version=7.7.0.1.238\n", "7.7.0.1.238"),
        ("Ascend/ascend-toolkit/latest/version.cfg", "# x\nruntime_running_version=[7.6.0:8.2]\n", "7.6.0"),
        ("Ascend/cann/x86_64-linux/ascend_toolkit_install.info", "nothing of use\n", None),
    ],
)
def test_cann_says_its_version(place: str, text: str, version: str | None, tmp_path: Path) -> None:
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(text)
    found = find_cann({}, (str(tmp_path),))
    assert found is not None and found.version == version
    assert found.folder.startswith(str(tmp_path / "Ascend"))


def test_the_cann_of_this_shell_comes_first(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "Ascend" / "cann"
    mine.mkdir()
    theirs.mkdir(parents=True)
    roots = (str(tmp_path),)
    assert str(find_cann({"ASCEND_HOME_PATH": str(mine)}, roots)).count("mine") == 1
    gone = find_cann({"ASCEND_HOME_PATH": str(tmp_path / "gone")}, roots)
    assert gone is not None and gone.folder == str(theirs)
    assert find_cann({}, (str(mine),)) is None
    (tmp_path / "Ascend" / "set_env.sh").touch()
    assert set_env_of(gone) == str(tmp_path / "Ascend" / "set_env.sh")


# ---------- explanations


@pytest.mark.parametrize(
    ("text", "what", "advice"),
    [
        ("ImportError: libascendcl.so: cannot open shared object file: ...", "a library of CANN", "set_env.sh"),
        ("libfoo.so.3: cannot open shared object file: ...", "libfoo.so.3 is not found", "LD_LIBRARY_PATH"),
        ("ModuleNotFoundError: No module named 'yaml.cyaml'", "the Python package yaml.cyaml", "pip install yaml"),
        ("ImportError: x.so: undefined symbol: _Z", "not of one release", "docs/ascend.md"),
        ("RuntimeError: dcmi ... ret is -8020", "the driver gives it no device", "npu-smi info"),
        ("", "it says nothing", "import torch_npu"),
    ],
)
def test_what_errors_mean(text: str, what: str, advice: str) -> None:
    found = explain(text)
    assert what in found.what and advice in found.advice


def test_the_telling_line_of_a_traceback() -> None:
    text = (
        "Traceback ...\n  File x\nImportError: libhccl.so: cannot open shared object file: No such file\n\n"
        "The above exception ...\nRuntimeError: Failed to load the backend extension: torch_npu. You can ...\n"
    )
    assert last_line(text).startswith("ImportError: libhccl.so")
    assert last_line("no error\nat all") == "at all"


def test_only_what_is_known_is_explained() -> None:
    assert import_failure(RuntimeError("out of memory")) is None
    assert import_failure(ModuleNotFoundError("No module named 'yaml'", name="yaml")) is None
    missing = import_failure(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert missing is not None and missing.startswith("torch is not installed")
    loads = RuntimeError("Failed to load the backend extension: torch_npu. You can disable ...")
    loads.__cause__ = ImportError("libhccl.so: cannot open shared object file: No such file or directory")
    assert "libhccl.so, a library of CANN, is not found" in str(import_failure(loads))


@pytest.mark.parametrize(
    ("version", "wants", "torch", "fits"),
    [
        ("2.13.0", "==2.13.0.*", "2.13.0+cpu", True),
        ("2.7.1.post11", "==2.7.1+cpu", "2.7.1", True),
        ("2.7.1.post11", None, "2.7.1+cpu", True),
        ("2.9.1", None, "2.13.0+cpu", False),
        ("2.9.1", "==2.9.1+cpu", "2.10.0", False),
        ("2.13.0", ">=2.0", "2.14.0", True),
    ],
)
def test_pairs(version: str, wants: str | None, torch: str, fits: bool) -> None:
    assert (mismatch("torch_npu", version, wants, torch) is None) is fits


@pytest.mark.skipif(SHARED is None, reason="no ../shared here")
@pytest.mark.parametrize("release", ["2.13.0", "2.7.1"])
def test_a_recorded_failure_is_explained(release: str) -> None:
    """What the real wheels print where there is no CANN."""
    assert SHARED is not None
    text = (SHARED / f"ascend/fixtures/torch_npu_import_no_cann_{release}.txt").read_text(encoding="utf-8")
    for part in text.split("$ ")[1:]:
        assert "libhccl.so, a library of CANN" in explain(last_line(part)).what
