"""The launchers in examples/: what they make of their settings, and what the manifests say. None of it needs a cluster.

Two nodes are two processes here, started by slurm.sh through stand-ins of srun and scontrol.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from mindspeed_like import OURS, like_mindspeed
from patience import patient

from tokenring.integrations.megatron import add_arguments

REPO = Path(__file__).resolve().parents[2]
CLUSTER = REPO / "examples" / "cluster"
PRETRAIN = {"ascend": REPO / "examples/mindspeed/pretrain.sh", "nvidia": REPO / "examples/megatron_lm/pretrain.sh"}
MANIFESTS = sorted(CLUSTER.glob("*.yaml"))
RESOURCES = {"ascend": "huawei.com/Ascend910", "nvidia": "nvidia.com/gpu"}
SHOWN = "#!/bin/bash\nprintf '%s\\n' \"$@\"\n"


def program(folder: Path, name: str, text: str) -> None:
    """An executable that is found before others of its name."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def run(folder: Path, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """A launcher with these programs and settings; the Python is ours."""
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | settings
    return subprocess.run(command, env=env, cwd=REPO, capture_output=True, text=True, timeout=patient(100))


def free_port(first: int, last: int) -> int:
    for port in range(first, last):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no port is free")


def test_two_nodes(tmp_path: Path, warm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """slurm.sh starts torchrun.sh on both, which meet and compute."""
    monkeypatch.setattr(sys, "executable", warm)
    program(tmp_path, "scontrol", "#!/bin/bash\necho 127.0.0.1\necho another-host\n")
    program(
        tmp_path, "srun",
        '#!/bin/bash\nshift\nSLURM_NODEID=0 "$@" &\nfirst=$!\nSLURM_NODEID=1 "$@" || exit 1\nwait $first\n',
    )  # fmt: skip
    port = free_port(20000 + os.getpid() % 10000, 40000)
    done = run(
        tmp_path, str(CLUSTER / "slurm.sh"), str(CLUSTER / "torchrun.sh"), "examples/split_attention.py",
        SLURM_JOB_NODELIST="host[1-2]", SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID=str(port - 20000), PER_NODE="1",
        PYTHONPATH=str(REPO),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    error = re.search(r"relative error against one process: (\S+)", done.stdout)
    assert error is not None and float(error[1]) < 2e-6


def pretrain_command(folder: Path, vendor: str, **settings: str) -> list[str]:
    """What a pretrain.sh would start."""
    program(folder, "python", SHOWN)
    done = run(folder, str(PRETRAIN[vendor]), "--train-iters", "3", MEGATRON="/megatron", **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def value(command: list[str], flag: str) -> str:
    """What is given last for a flag, which is what counts."""
    return command[len(command) - command[::-1].index(flag)]


def flags_of(command: list[str]) -> list[str]:
    """What follows the program."""
    return command[next(index for index, each in enumerate(command) if each.endswith("pretrain_gpt.py")) + 1 :]


@pytest.mark.parametrize("vendor", PRETRAIN)
@pytest.mark.parametrize(("devices", "cp", "length"), [("8", "4", "65536"), ("16", "8", "131072")])
def test_pretrain_divides_the_devices(tmp_path: Path, vendor: str, devices: str, cp: str, length: str) -> None:
    command = pretrain_command(tmp_path, vendor, PER_NODE=devices)
    assert command[:2] == ["-m", "torch.distributed.run"] and value(command, "--nproc-per-node") == devices
    assert value(command, "--context-parallel-size") == cp and value(command, "--seq-length") == length
    assert value(command, "--train-iters") == "3"


@pytest.mark.parametrize("vendor", PRETRAIN)
def test_pretrain_over_two_servers(tmp_path: Path, vendor: str) -> None:
    command = pretrain_command(tmp_path, vendor, PER_NODE="8", NNODES="2", NODE_RANK="1", MASTER_ADDR="first")
    asked = {flag: value(command, flag) for flag in ("--nnodes", "--node-rank", "--master-addr")}
    assert asked == {"--nnodes": "2", "--node-rank": "1", "--master-addr": "first"}
    assert value(command, "--context-parallel-size") == "8"


@pytest.mark.parametrize("vendor", PRETRAIN)
def test_pretrain_wants_megatron(tmp_path: Path, vendor: str) -> None:
    done = run(tmp_path, str(PRETRAIN[vendor]), MEGATRON="")
    assert done.returncode != 0 and "the folder of Megatron-LM" in done.stderr


def test_flags_of_pretrain_are_ours(tmp_path: Path) -> None:
    """Through our parser and our checks; MindSpeed's and Megatron's read them in test_mindspeed_real."""
    check_own_flags(flags_of(pretrain_command(tmp_path, "ascend")))


def check_own_flags(flags: list[str]) -> None:
    """Raises where a flag of ours is unknown or conflicts. Others are MindSpeed's or Megatron's."""
    following = zip(flags, [*flags[1:], "--"], strict=True)
    pairs = [(a, b) for a, b in following if a.startswith("--") and not b.startswith("--")]
    with like_mindspeed() as mindspeed:
        import_module(OURS)
        args = mindspeed.import_adaptor(*(each for pair in pairs for each in pair))
        assert args.context_parallel_attention == "tokenring"
        known = {name for name in vars(add_arguments(argparse.ArgumentParser()).parse_args([]))}
        assert not {name for name in vars(args) if name.startswith("tokenring")} - known
        args.attention_dropout = float(args.attention_dropout)  # as Megatron's parser does
        mindspeed.validate(args)


def read(manifest: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load(manifest.read_text())
    return found


def replicas(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Volcano's tasks, or the PyTorchJob's two kinds of pods."""
    spec = found["spec"]
    made: list[dict[str, Any]] = spec["tasks"] if found["kind"] == "Job" else [*spec["pytorchReplicaSpecs"].values()]
    return made


def container(replica: dict[str, Any]) -> dict[str, Any]:
    (only,) = replica["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def test_there_are_four_manifests() -> None:
    made = {f"{kind}-{vendor}" for kind in ("volcano", "pytorchjob") for vendor in RESOURCES}
    assert {path.stem for path in MANIFESTS} == made


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
class TestManifest:
    def test_kind(self, manifest: Path) -> None:
        found, volcano = read(manifest), manifest.stem.startswith("volcano")
        wanted = ("batch.volcano.sh/v1alpha1", "Job") if volcano else ("kubeflow.org/v1", "PyTorchJob")
        assert (found["apiVersion"], found["kind"]) == wanted

    def test_all_nodes_start_or_none(self, manifest: Path) -> None:
        spec = read(manifest)["spec"]
        least = spec.get("minAvailable") or spec["runPolicy"]["schedulingPolicy"]["minAvailable"]
        assert least == sum(each["replicas"] for each in replicas(read(manifest))) == 2

    def test_devices_are_as_many_as_processes(self, manifest: Path) -> None:
        name = RESOURCES[manifest.stem.partition("-")[2]]
        for replica in replicas(read(manifest)):
            found = container(replica)
            settings = {each["name"]: each["value"] for each in found["env"]}
            assert found["resources"] == {"requests": {name: 8}, "limits": {name: 8}}
            assert settings["PER_NODE"] == "8"

    def test_port_is_that_of_the_master(self, manifest: Path) -> None:
        for replica in replicas(read(manifest)):
            (port,) = container(replica)["ports"]
            settings = {each["name"]: each["value"] for each in container(replica)["env"]}
            if manifest.stem.startswith("volcano"):
                assert settings["MASTER_PORT"] == str(port["containerPort"])
            else:  # by these names the operator knows both
                assert (container(replica)["name"], port["name"]) == ("pytorch", "pytorchjob-port")
                assert "MASTER_PORT" not in settings

    def test_command(self, manifest: Path, tmp_path: Path) -> None:
        """What the pod's shell makes of the launcher's variables; files are there, flags are ours."""
        program(tmp_path, "python", SHOWN)
        given = {
            "VC_WORKER_NUM": "2", "VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "first.job,second.job",
            "WORLD_SIZE": "2", "RANK": "1",
        }  # fmt: skip
        if not manifest.stem.startswith("volcano"):
            given |= {"MASTER_ADDR": "first.job", "MASTER_PORT": "23456"}
        for replica in replicas(read(manifest)):
            found = container(replica)
            settings = given | {each["name"]: each["value"] for each in found["env"]}
            done = run(tmp_path, *found["command"], *found["args"], **settings)
            assert done.returncode == 0, done.stderr
            check_launch(done.stdout.splitlines(), found["ports"][0]["containerPort"])
            assert shlex.split(found["args"][0])[0] == "export"


def check_launch(command: list[str], port: int) -> None:
    launch = {
        "--nnodes": "2", "--node-rank": "1", "--nproc-per-node": "8", "--master-addr": "first.job",
        "--master-port": str(port),
    }  # fmt: skip
    assert {flag: value(command, flag) for flag in launch} == launch
    flags = flags_of(command)
    if "--spec" in flags:
        module, name = flags[flags.index("--spec") + 1 :][:2]
        assert f"{name} = use_tokenring(" in (PRETRAIN["nvidia"].parent / f"{module}.py").read_text()
    else:
        check_own_flags(flags)


def test_every_launcher_says_what_was_run() -> None:
    for path in (*MANIFESTS, *CLUSTER.glob("*.sh"), *PRETRAIN.values()):
        text = re.sub(r"\n# ?", " ", path.read_text())
        assert "Run: " in text and "Not run: " in text, path
