"""Options of ContextParallel as flags of Megatron-LM and MindSpeed, and a time limit that is the framework's."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mindspeed_layer
import pytest
import torch.distributed as dist
from mcore.stand_ins import config, layer, refusal
from mindspeed_like import OURS, like_mindspeed
from ranks import Here, RankPools
from test_mindspeed import ASKED, attentions
from test_mindspeed import arguments as made_with
from test_mindspeed_flags import parsed

from tokenring.api.context import TIMEOUT_SECONDS
from tokenring.errors import ConfigurationError
from tokenring.integrations.megatron import add_arguments, options_of
from tokenring.integrations.megatron.arguments import OPTIONS
from tokenring.integrations.megatron.options import FLAGS, flag_of, framework_seconds, options_said
from tokenring.topology.ranks import Topology

REPO = Path(__file__).resolve().parents[2]
GIVEN = {
    "timeout_seconds": ("1800", 1800.0), "transport": ("hccl/pair", "hccl/pair"), "memory_limit_bytes": ("2G", 2 << 30),
    "kernel": ("reference", "reference"), "pieces": ("2", 2),
}  # fmt: skip
WRONG = {
    ("timeout_seconds", "soon"): "--tokenring-timeout-seconds soon: write a number of seconds",
    ("timeout_seconds", "0"): "--tokenring-timeout-seconds 0: timeout_seconds=0.0: give a number of seconds from",
    ("timeout_seconds", "nan"): "--tokenring-timeout-seconds nan: timeout_seconds=nan: give a number of seconds",
    ("transport", "pigeon"): "--tokenring-transport: unknown transport 'pigeon'; choose one of auto, gloo, shm, hccl",
    ("kernel", "magic"): "--tokenring-kernel: unknown kernel 'magic'; choose one of auto, cpu-flash",
    ("memory_limit_bytes", "lots"): "--tokenring-memory-limit-bytes lots: write a number from 1 to",
    ("memory_limit_bytes", "0"): "--tokenring-memory-limit-bytes 0: write a number from 1 to",
    ("pieces", "-1"): "--tokenring-pieces -1: write a number from 1 to",
    ("topology", "/nowhere/at.all"): "--tokenring-topology: cannot read '/nowhere/at.all': No such file or directory",
}


def four_npus(folder: Path) -> Path:
    """What `npu-smi info -t topo` prints of four of them."""
    names = [f"NPU{n}" for n in range(4)]
    rows = ["".join(f"{each:11}" for each in ["", *names, "CPU Affinity"])]
    for name in names:
        cells = ["X" if name == other else "HCCS" for other in names]
        rows.append("".join(f"{each:11}" for each in [name, *cells, "0-23"]))
    file = folder / "topo.txt"
    file.write_text("\n".join(rows) + "\n")
    return file


def megatron_args(*command_line: str) -> Namespace:
    """As Megatron-LM parses them with our extra_args_provider."""
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    for name in ("context-parallel-size", "tensor-model-parallel-size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    return parser.parse_args(command_line)


def said(**given: str) -> list[str]:
    return [each for name, text in given.items() for each in (flag_of(name), text)]


class TestMegatronFlags:
    def test_each_option_has_one(self) -> None:
        assert set(FLAGS) == set(OPTIONS)

    def test_nothing_said(self) -> None:
        assert options_of(megatron_args()) == {"schedule": "auto"}
        assert options_of(Namespace()) == {"schedule": "auto"}
        assert options_of(megatron_args("--tokenring-latents")) == {"schedule": "auto", "latents": True}

    def test_all_but_a_topology(self) -> None:
        flags = said(**{name: text for name, (text, _) in GIVEN.items()})
        found = options_of(megatron_args("--tokenring-schedule", "usp/2", *flags))
        assert found == {"schedule": "usp/2"} | {name: value for name, (_, value) in GIVEN.items()}
        assert layer(**found).options == {name: value for name, (_, value) in GIVEN.items()} | {"tensor_parallel": 1}

    @pytest.mark.parametrize(("name", "text"), WRONG)
    def test_wrong_values_are_refused_by_us(self, name: str, text: str) -> None:
        args = megatron_args(f"{flag_of(name)}={text}")
        assert refusal(ConfigurationError, lambda: options_of(args)).startswith(WRONG[name, text])

    def test_wrong_schedule(self) -> None:
        text = refusal(ConfigurationError, lambda: options_of(megatron_args("--tokenring-schedule", "rings")))
        assert "unknown schedule 'rings'" in text

    @pytest.mark.parametrize(("tp", "cp"), [(1, 4), (2, 2), (1, 2)])
    def test_topology_is_that_of_a_file(self, tmp_path: Path, tp: int, cp: int) -> None:
        """Of its first ranks that share a sequence and its heads."""
        sizes = ("--context-parallel-size", str(cp), "--tensor-model-parallel-size", str(tp))
        found = options_of(megatron_args(*sizes, *said(topology=str(four_npus(tmp_path)))))["topology"]
        assert isinstance(found, Topology) and found.world_size == tp * cp
        assert [str(each)[-1] for each in found.devices] == ["0", "1", "2", "3"][: tp * cp]

    def test_topology_of_too_few(self, tmp_path: Path) -> None:
        args = megatron_args("--context-parallel-size", "8", *said(topology=str(four_npus(tmp_path))))
        text = refusal(ConfigurationError, lambda: options_of(args))
        assert "it has 4 accelerators, and 8 ranks share a sequence and heads: save that of all" in text

    def test_topology_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "x.txt").write_text("nothing of use\n")
        args = megatron_args(*said(topology=str(tmp_path / "x.txt")))
        assert refusal(ConfigurationError, lambda: options_of(args)).startswith("--tokenring-topology: ")


class TestMindSpeedFlags:
    def test_reach_the_attention(self, tmp_path: Path) -> None:
        given = {name: text for name, (text, _) in GIVEN.items()} | {"topology": str(four_npus(tmp_path))}
        with like_mindspeed() as mindspeed:
            import_module(OURS)
            mindspeed.import_adaptor(*ASKED, *said(**given))
            made = attentions()[0](**made_with())
        topology = made.options.pop("topology")
        assert topology.world_size == 2
        assert made.options == {name: value for name, (_, value) in GIVEN.items()} | {"tensor_parallel": 1}

    @pytest.mark.parametrize(("name", "text"), WRONG)
    def test_wrong_values_are_refused_by_us(self, name: str, text: str) -> None:
        with like_mindspeed() as mindspeed:
            import_module(OURS)
            for fails in (
                lambda: mindspeed.validate(parsed(**{f"tokenring_{name}": text})),
                lambda: mindspeed.import_adaptor(*ASKED, f"{flag_of(name)}={text}"),
            ):
                assert refusal(ConfigurationError, fails).startswith(WRONG[name, text])

    @pytest.mark.parametrize("name", GIVEN)
    def test_without_ours_they_have_no_effect(self, name: str) -> None:
        text, _ = GIVEN[name]
        with like_mindspeed() as mindspeed:
            import_module(OURS)
            args = parsed(context_parallel_attention="mindspeed", **{f"tokenring_{name}": text})
            found = refusal(ConfigurationError, lambda: mindspeed.validate(args))
        wanted = f"{flag_of(name)} {text} has no effect without --context-parallel-attention tokenring: add it"
        assert found == wanted


def test_docs_have_every_flag() -> None:
    for page in ("mindspeed", "megatron"):
        text = (REPO / f"docs/{page}.md").read_text()
        assert all(f"`{flag_of(name)}" in text for name in FLAGS), page


# ---------- the time limit


class TestTimeLimit:
    def test_of_mindspeeds_config(self) -> None:
        made = layer(config(distributed_timeout_minutes=30))
        assert made.options["timeout_seconds"] == 1800.0
        assert made._contexts.context("ring").timeout_seconds == 1800.0

    def test_what_is_given_counts(self) -> None:
        assert layer(config(distributed_timeout_minutes=30), timeout_seconds=7.0).options["timeout_seconds"] == 7.0

    def test_of_megatron_lm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        held = ModuleType("megatron.training.global_vars")
        held.__dict__["_GLOBAL_ARGS"] = Namespace(distributed_timeout_minutes=20)
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", held)
        assert framework_seconds(config(), "self") == 1200.0
        held.__dict__["_GLOBAL_ARGS"] = None  # before it has parsed them
        assert framework_seconds(config(), "self") is None

    def test_where_nothing_is_said(self) -> None:
        assert framework_seconds(config(), "self") is None
        assert layer()._contexts.context("ring").timeout_seconds == TIMEOUT_SECONDS

    def test_a_group_that_tells_nothing(self) -> None:
        silent: Any = SimpleNamespace(_device_types=["cpu"], _get_backend=lambda device: SimpleNamespace())
        assert framework_seconds(config(), silent) is None


def of_group(here: Here) -> tuple[float, float]:
    """As Megatron-core makes its groups: with --distributed-timeout-minutes (parallel_state.create_group)."""
    group = dist.new_group(timeout=timedelta(minutes=7))
    made = layer(config(context_parallel_size=2), pg_collection=SimpleNamespace(cp=group))
    return made.options["timeout_seconds"], made._contexts.context("ring").timeout_seconds


def test_of_the_group(ranks: RankPools) -> None:
    assert ranks(2)(of_group) == [(420.0, 420.0)] * 2


def test_options_are_read_from_a_config_too() -> None:
    """Into which MindSpeed puts all arguments."""
    settings = mindspeed_layer.config(2, tokenring_kernel="reference", tokenring_pieces="3")
    assert options_said(settings) == {"kernel": "reference", "pieces": 3}
