"""What ranks compute with and what their wires reach: the same by whatever way a machine is named."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.backends.kernels.npu_fusion import NpuFusion
from tokenring.cli.plan.command import options_parser
from tokenring.cli.plan.options import ask, where
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.lowering.calls import calls, split
from tokenring.lowering.storage import storage_of
from tokenring.planner.choosing.auto import make
from tokenring.planner.choosing.planner import Planner
from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.machines.machine import machine_of_device, machine_of_preset, machine_of_topology
from tokenring.planner.machines.presets import PRESETS, preset
from tokenring.sequence.region import Patch
from tokenring.tables.rates import Machine
from tokenring.topology.model.schema import to_json
from tokenring.topology.ranks import Topology

BF16, FP16 = torch.bfloat16, torch.float16


def asked(name: str, **options: object) -> tuple[Interconnect, Machine]:
    """As `tokenring plan --topology NAME` with these options."""
    given = {"tflops": None, "device": None, "rates": None, **options}
    return where(name, BF16, argparse.Namespace(**given))


class TestWhatIsSaidOfKernelsChangesNothingElse:
    """Messages and transports are those of the machine, however fast its kernels are said to be."""

    def test_a_rate_that_is_asked_for(self) -> None:
        _, known = asked("preset:atlas-800t-a2")
        _, found = asked("preset:atlas-800t-a2", tflops=100.0)
        assert found.rates.tflops("forward", 512) == 100.0
        assert found.messages == known.messages and found.messages.latency_seconds == pytest.approx(10e-6)
        assert found.transport == known.transport == "hccl"

    def test_a_device_that_is_asked_for(self) -> None:
        _, found = asked("preset:atlas-800t-a2", device="910b2")
        assert "910B2" in found.rates.source
        assert found.transport == "hccl"
        assert found.messages.latency_seconds == pytest.approx(10e-6)
        assert asked("preset:hgx-h100", device="h100-sxm")[1] == asked("preset:hgx-h100")[1]

    def test_a_topology_of_unknown_accelerators(self, tmp_path: Path) -> None:
        """Nothing is known but what is asked for: a message's cost is assumed."""
        dump = str(Path(__file__).resolve().parents[1] / "data" / "topology" / "nvidia-switch.txt")
        with pytest.raises(ConfigurationError, match="no compute figures"):
            asked(dump)
        _, found = asked(dump, tflops=100.0)
        assert found.messages.latency_seconds == pytest.approx(10e-6)
        _, found = asked(dump, device="h100-sxm")
        assert found.messages.latency_seconds == pytest.approx(6.2e-6)


class TestPresets:
    @pytest.mark.parametrize("name", ["hgx-h100", "atlas-a3", "l40s-pcie-8", "a10-pix-4*2"])
    def test_the_command_and_a_job_plan_for_the_same_wires(self, name: str) -> None:
        """A preset has its own shares of what links reach, also in ContextParallel(topology=preset(...))."""
        net, _ = asked(f"preset:{name}")
        job, machine = Planner(None, net.world_size, preset(name), (), None).look(torch.device("cuda"), BF16)
        assert job.fabrics == net.fabrics
        assert job.notes == (*net.notes, machine.source), "which the command says in the line above"

    def test_what_a_port_reaches(self) -> None:
        """18 links of 25 GB/s, of which a copy was measured to get 0.84."""
        net, _ = asked("preset:hgx-h100")
        assert [net.gbs(wire) for wire in net.way(0, 1)] == pytest.approx([378.0, 378.0])

    def test_a_saved_preset_has_lost_what_it_reaches(self, tmp_path: Path) -> None:
        """A file says what is published; what links reach is then assumed, as of any machine."""
        (tmp_path / "saved.json").write_text(to_json(PRESETS["hgx-h100"].facts()), encoding="utf-8")
        net, _ = asked(str(tmp_path / "saved.json"))
        assert [net.gbs(wire) for wire in net.way(0, 1)] == pytest.approx([382.5, 382.5])

    def test_half_precision_where_a_device_has_no_other(self) -> None:
        with pytest.raises(UnsupportedError, match="bfloat16"):
            machine_of_preset("atlas-800-910a", BF16)
        assert machine_of_preset("atlas-800-910a", BF16, or_half=True) == machine_of_preset("atlas-800-910a", FP16)
        assert machine_of_preset("hgx-h100", BF16, or_half=True) == machine_of_preset("hgx-h100", BF16)

    @pytest.mark.parametrize("name", PRESETS)
    def test_by_name_device_or_model(self, name: str) -> None:
        """Devices of one kind cost a message what the first preset of them says, unless the preset itself is named."""
        device = PRESETS[name].device
        by_device = machine_of_device(device, FP16)
        assert by_device.rates == machine_of_preset(name, FP16).rates
        assert by_device.transport == machine_of_preset(name, FP16).transport
        try:
            assert machine_of_topology(preset(name), FP16) == by_device
        except ConfigurationError as error:  # a model that no probe has named yet
            assert "no compute figures" in str(error)


class TestKernels:
    """A window over contiguous chunks of 1,024 tokens: a band of 128 in each tile beside the diagonal."""

    WINDOW = ("--seq", "8k", "--heads", "8", "--mask", "window(128,0)", "--layout", "contiguous", "--dtype", "fp16")

    def calls(self, topology: str) -> list[int]:
        """How many calls compute what rank 1 sees, of its own block and of rank 0's."""
        call = ask(options_parser().parse_args(["--topology", topology, *self.WINDOW])).call
        storage = storage_of(make(call, "ring"))
        tiles = storage.tiles(1)
        return [len(calls(storage, tile, call.setting.supports)) for tile in tiles]

    def test_accelerators_take_bands_whole(self) -> None:
        assert set(self.calls("preset:hgx-h100")) == {1}

    def test_an_npu_takes_what_its_kernel_does(self) -> None:
        """By its own rules, without torch_npu: it halves only what needs a mask above 64 MiB."""
        call = ask(options_parser().parse_args(["--topology", "preset:atlas-800t-a2", *self.WINDOW])).call
        assert call.setting.supports is NpuFusion.supports_patch
        assert set(self.calls("preset:atlas-800t-a2")) == {1}

    def test_a_cpu_cuts_bands(self) -> None:
        """So that less than half of what it computes is hidden."""
        machine = machine_of_topology(Topology("machine without accelerators", 2), torch.float32)
        assert machine.kernel == "cpu-flash"
        band = Patch(0, 1024, 0, 1024, -128, 0)
        assert len(list(split(band, CpuFlash.supports_patch))) > 1 == len(list(split(band, NpuFusion.supports_patch)))
