"""Tables of engines: what each refuses, and its flags given to its own parser or configuration class."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from patience import patient

from tokenring.cli.advise.choices import Choice, Job
from tokenring.cli.advise.engines import ENGINES
from tokenring.cli.advise.pricing import BY_OPERATORS, BY_OPERATORS_GATHERED, FUSED
from tokenring.cli.models import KNOWN

LLAMA, FLUX, OSS, GEMMA = (KNOWN[name] for name in ("llama-3.1-8b", "flux.1-dev", "gpt-oss-20b", "gemma-2-9b"))
TRAIN = Job(LLAMA, 8, 8192, True)
SERVE = Job(FLUX, 8, 4608, False)


def options(engine: str, job: Job) -> dict[str, Choice]:
    """Return each choice by its flags."""
    found = {each.flags: each for each in ENGINES[engine].options(job)}
    assert found
    return found


def fitting(engine: str, job: Job) -> list[str]:
    """Return the schedules of the choices that can be taken."""
    return [each.schedule for each in options(engine, job).values() if each.reason is None]


def reasons(engine: str, job: Job) -> str:
    return "; ".join(str(each.reason) for each in options(engine, job).values())


class TestTraining:
    def test_torchtitan(self) -> None:
        found = options("torchtitan", TRAIN)
        assert [each.reason for each in found.values()] == [None, None]
        assert [each.merging.gathered for each in found.values()] == [True, False]
        assert all(flags.startswith("--parallelism.context_parallel_degree 8 ") for flags in found)
        uneven = reasons("torchtitan", replace(TRAIN, length=8208))
        assert uneven == "None; 8208 tokens do not divide by 1024: FlexAttention's masks are sharded in blocks of 128"
        assert "full causal attention only" in reasons("torchtitan", replace(TRAIN, model=OSS))
        assert len(fitting("torchtitan", replace(TRAIN, model=OSS))) == 1
        several = [each.flags for each in options("torchtitan", replace(TRAIN, model=OSS)).values() if not each.reason]
        assert several[0].endswith("ptrr --parallelism.context_parallel_ptrr_mask_key basic_mask")
        assert not any("mask_key" in flags for flags in found)
        assert not fitting("torchtitan", replace(TRAIN, model=replace(GEMMA, window=None)))
        assert list(options("torchtitan", replace(TRAIN, model=FLUX))) == [
            "--parallelism.context_parallel_degree 8 --parallelism.context_parallel_load_balancer None"
        ]

    def test_accelerate(self) -> None:
        assert fitting("accelerate", TRAIN) == ["all-gather-kv", "ring", "ulysses"]
        *torch_own, deepspeed = options("accelerate", TRAIN)
        assert all(each.startswith("--use_fsdp --fsdp_version 2 --use_parallelism_config ") for each in torch_own)
        assert deepspeed.startswith("--config_file ") and "--use_parallelism_config" not in deepspeed
        assert fitting("accelerate", replace(TRAIN, model=replace(GEMMA, heads=16))) == ["ulysses"]
        assert any("flash_attention_2" in flags for flags in options("accelerate", replace(TRAIN, model=GEMMA)))
        assert not fitting("accelerate", replace(TRAIN, model=OSS))
        assert not fitting("accelerate", replace(TRAIN, model=FLUX))
        assert "chunks would be ignored" in reasons("accelerate", replace(TRAIN, model=replace(LLAMA, chunk=8)))
        assert fitting("accelerate", replace(TRAIN, ranks=16)) == ["all-gather-kv", "ring", "ulysses"]  # kv repeated
        assert fitting("accelerate", replace(TRAIN, ranks=12)) == ["all-gather-kv", "ring"]
        assert "there are 32 of q and 8 of kv" in reasons("accelerate", replace(TRAIN, ranks=12))
        for job, why in (
            (replace(TRAIN, model=KNOWN["deepseek-v3"]), "128 is not 192"),
            (replace(TRAIN, tensor_parallel=2), "no tensor parallelism"),
        ):
            assert fitting("accelerate", job) == ["all-gather-kv", "ring"] and why in reasons("accelerate", job)

    def test_mindspeed(self) -> None:
        found = options("mindspeed-llm", TRAIN)
        assert [each.schedule for each in found.values()] == [
            "ring", "double-ring/2", "double-ring/4", "ulysses", "usp/2", "usp/4", "all-gather-kv",
        ]  # fmt: skip
        assert not fitting("mindspeed-llm", replace(TRAIN, model=OSS))
        assert fitting("mindspeed-llm", replace(TRAIN, ranks=6, length=9600)) == [
            "ring", "double-ring/2", "double-ring/3", "usp/2", "all-gather-kv",
        ]  # fmt: skip
        some = replace(TRAIN, model=replace(LLAMA, heads=24), ranks=6, length=9600)  # 8 of kv are not repeated for 6
        assert "usp/2" in fitting("mindspeed-llm", some) and "ulysses" not in fitting("mindspeed-llm", some)
        many = options("mindspeed-llm", replace(TRAIN, ranks=16)).values()
        assert {each.schedule: each.heads for each in many if each.heads} == {"ulysses": (32, 32)}  # all repeated
        short = replace(LLAMA, window=8192)
        assert "ring" in fitting("mindspeed-llm", replace(TRAIN, model=short))
        assert not fitting("mindspeed-llm", replace(TRAIN, model=short, length=16384))
        general = options("mindspeed-llm", replace(TRAIN, model=FLUX))
        assert all("--attention-mask-type general" in flags for flags in general)
        assert "causal masks only" in reasons("mindspeed-llm", replace(TRAIN, model=FLUX))
        assert "soft-cap" in reasons("mindspeed-llm", replace(TRAIN, model=replace(GEMMA, window=None)))

    @pytest.mark.parametrize("engine", ["megatron", "torchtitan", "accelerate", "mindspeed-llm"])
    def test_lengths_that_zigzag_does_not_cut(self, engine: str) -> None:
        assert ENGINES[engine].lengths(TRAIN) is None
        assert "multiple of 16" in str(ENGINES[engine].lengths(replace(TRAIN, length=8200)))


class TestDiffusion:
    def test_xdit(self) -> None:
        found = options("xdit", SERVE)
        assert {each.reason for each in found.values()} == {None}
        assert found["--ring_degree 8"].merging.gathered and found["--ulysses_degree 8"].merging == FUSED
        assert found["--ulysses_degree 2 --ring_degree 4"].merging == BY_OPERATORS_GATHERED
        uneven = replace(SERVE, length=4610)
        assert fitting("xdit", uneven) == fitting("xdit", SERVE) and ENGINES["xdit"].lengths(SERVE) is None
        assert "pad sequences to a multiple of 8" in str(ENGINES["xdit"].lengths(uneven))
        few = replace(FLUX, heads=12, kv_heads=12)
        assert fitting("xdit", replace(SERVE, model=few)) == ["all-gather-kv", "usp/2", "usp/4"]
        assert "there are 12 of q" in reasons("xdit", replace(SERVE, model=few))
        for job, why in (
            (replace(SERVE, model=LLAMA), "no causal masks"), (replace(SERVE, training=True), "no backward pass"),
        ):  # fmt: skip
            assert not fitting("xdit", job) and why in reasons("xdit", job)

    def test_omni(self) -> None:
        assert fitting("vllm-omni", SERVE) == ["ulysses", "ulysses", "ring", "all-gather-kv", "usp/2", "usp/4"]
        few = replace(SERVE, model=replace(FLUX, heads=30, kv_heads=30))
        assert fitting("vllm-omni", few) == ["ulysses", "ring", "all-gather-kv", "usp/2"]
        padded = "--ulysses-degree 8 --ulysses-mode advanced_uaa"
        assert options("vllm-omni", few)[padded].heads == (32, 32)
        assert options("vllm-omni", replace(few, tensor_parallel=2))[padded].heads == (16, 16)
        fewer = options("vllm-omni", replace(SERVE, model=replace(FLUX, heads=3, kv_heads=3)))[padded]
        assert fewer.reason is None and fewer.heads == (8, 8)
        assert options("vllm-omni", SERVE)[padded].heads is None
        assert fitting("vllm-omni", replace(SERVE, length=4610)) == ["ulysses"]  # padded, as it says
        assert not fitting("vllm-omni", replace(SERVE, model=LLAMA))
        assert options("vllm-omni", SERVE)["--ring-degree 8"].merging == BY_OPERATORS


# ---------- the engines themselves

PARSED = {
    "torchtitan": """
from torchtitan.config.configs import ParallelismConfig
for words in given:
    names = [each.removeprefix("--parallelism.") for each in words[::2]]
    values = [None if each == "None" else int(each) if each.isdigit() else each for each in words[1::2]]
    made = ParallelismConfig(**dict(zip(names, values)))
    assert made.context_parallel_degree == 8
    assert made.context_parallel_load_balancer in ("headtail", "ptrr", None)
""",
    "accelerate": """
from accelerate import ParallelismConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import TorchContextParallelConfig
from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig
with open("deepspeed.yaml", "w") as file:
    file.write("compute_environment: LOCAL_MACHINE\\ndistributed_type: DEEPSPEED\\nnum_processes: 8\\n")
    file.write("num_machines: 1\\nparallelism_config:\\n  parallelism_config_sp_size: 2\\n")
for words in given:
    asked = launch_command_parser().parse_args([*words, "train.py"])
    asked, *_ = _validate_launch_command(asked)
    assert asked.use_parallelism_config
    cp, sp = asked.parallelism_config_cp_size, asked.parallelism_config_sp_size
    assert (cp, sp) in ((8, 1), (1, 8)) and asked.training_script == "train.py"
    ParallelismConfig(
        cp_size=cp, sp_size=sp, sp_backend=asked.parallelism_config_sp_backend,
        cp_handler=TorchContextParallelConfig(asked.parallelism_config_cp_comm_strategy) if cp > 1 else None,
        sp_handler=DeepSpeedSequenceParallelConfig(
            sp_attn_implementation=asked.parallelism_config_sp_attn_implementation) if sp > 1 else None,
    )
""",
    "xdit": """
import torch
torch.backends.mps.is_available = lambda: True  # it does not import without any accelerator
import xfuser
from xfuser.config.args import FlexibleArgumentParser, xFuserArgs
for words in given:
    for add in (xFuserArgs.add_cli_args, xFuserArgs.add_runner_args):
        asked = add(FlexibleArgumentParser()).parse_args(["--model", "m", *words])
        assert asked.ulysses_degree * asked.ring_degree == 8
""",
    "vllm-omni": """
import argparse
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.entrypoints.cli.serve import OmniServeCommand
for words in given:
    parser = OmniServeCommand().subparser_init(argparse.ArgumentParser().add_subparsers())
    asked = parser.parse_args(["m", *words])
    degrees = {
        name: getattr(asked, name) or 1 for name in ("ulysses_degree", "ring_degree", "allgather_degree")
    }
    DiffusionParallelConfig(**degrees, ulysses_mode=asked.ulysses_mode)
""",
    "mindspeed-llm": """
import argparse
from mindspeed_llm.features_manager.context_parallel.context_parallel_feature import ContextParallelFeature
from mindspeed_llm.features_manager.context_parallel.ulysses_context_parallel import UlyssesContextParallelFeature
for words in given:
    parser = argparse.ArgumentParser()
    parser.add_argument("--context-parallel-size", type=int)
    parser.add_argument("--transformer-impl")
    ContextParallelFeature().register_args(parser)
    UlyssesContextParallelFeature().register_args(parser)
    asked = parser.parse_args(words)
    vars(asked).update(
        seq_length=8192, num_attention_heads=32, tensor_model_parallel_size=1, use_kv_cache=False,
        position_embedding_type="rope", sliding_window=None,
    )
    ContextParallelFeature().validate_args(asked)
    UlyssesContextParallelFeature().validate_args(asked)
    assert asked.context_parallel_algo != "kvallgather_cp_algo" or asked.transformer_impl == "transformer_engine"
""",
}


def test_keys_are_gathered_where_the_engine_gathers_them() -> None:
    """MindSpeed-LLM does so in its class for TransformerEngine alone."""
    (gathers,) = [each for each in options("mindspeed-llm", TRAIN) if "kvallgather" in each]
    assert gathers.endswith(" --transformer-impl transformer_engine")


MISSING = 77
# In a process of its own: other tests put stand-ins for some of these packages into this one.
LOOK = f"""
import importlib.util, json, sys
missing = [name for name in sys.argv[2:] if importlib.util.find_spec(name) is None]
if missing:
    print(", ".join(missing))
    sys.exit({MISSING})
given = json.loads(sys.argv[1])
"""
MODULES = {
    "torchtitan": ("torchtitan",), "accelerate": ("accelerate",), "xdit": ("xfuser",),
    "vllm-omni": ("vllm_omni", "vllm"), "mindspeed-llm": ("mindspeed_llm", "mindspeed"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("engine", PARSED)
def test_the_engine_takes_the_flags(engine: str, tmp_path: Path) -> None:
    """Its own parser and configuration classes take each choice that can be taken, in the installed version."""
    job = SERVE if engine in ("xdit", "vllm-omni") else TRAIN
    jobs = (job, replace(job, model=FLUX), replace(job, model=OSS)) if engine == "torchtitan" else (job,)
    given = [each.flags.split() for one in jobs for each in options(engine, one).values() if each.reason is None]
    done = subprocess.run(
        [sys.executable, "-c", LOOK + PARSED[engine], json.dumps(given), *MODULES[engine]], capture_output=True,
        text=True, timeout=patient(100), cwd=tmp_path,
    )  # fmt: skip
    if done.returncode == MISSING:
        pytest.skip(f"{done.stdout.strip()} is not installed")
    assert done.returncode == 0, done.stderr[-2000:]
