"""`tokenring advise`: facts of models, tables of engines against the engines themselves, and the command."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from mcore.versions import PINNED, folder, need
from patience import patient
from sampling import FULL_GRID

from tokenring.cli.advise.choices import Job, splits
from tokenring.cli.advise.engines import ENGINES
from tokenring.cli.main import main
from tokenring.cli.models import KNOWN, facts_of, read_model
from tokenring.errors import ConfigurationError

LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "num_hidden_layers": 4}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def reasons(engine: str, job: Job) -> dict[str, str | None]:
    """Of each schedule, by flags that name it; the first where two do."""
    found: dict[str, str | None] = {}
    for each in ENGINES[engine].options(job):
        found.setdefault(each.schedule, each.reason)
    return found


class TestModels:
    def test_configs(self) -> None:
        found = facts_of(LLAMA, "x")
        assert (found.heads, found.kv_heads, found.head_dim, found.value_dim) == (32, 8, 128, 128)
        assert dict(found.layers) == {"full_attention": 4} and found.mask_of("full_attention") == "causal"
        assert facts_of({"text_config": LLAMA}, "x") == found
        latent = facts_of({**LLAMA, **LATENT}, "x")
        assert (latent.kv_heads, latent.head_dim, latent.value_dim) == (32, 192, 128)
        picture = facts_of(
            {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 19, "num_single_layers": 38}, "x"
        )
        assert picture == replace(KNOWN["flux.1-dev"], name="x") and picture.mask_of("full_attention") == "full"

    def test_sizes_of_linear_layers(self) -> None:
        dense: dict[str, object] = {**LLAMA, "intermediate_size": 14336, "hidden_act": "silu"}

        def sizes(config: dict[str, object]) -> tuple[int | None, int | None, bool]:
            found = facts_of(config, "x")
            return found.width, found.mlp_features, found.gated

        assert sizes(dense) == (4096, 14336, True)
        assert sizes({**dense, "hidden_act": "relu2"}) == (4096, 14336, False)
        assert sizes({**dense, "hidden_act": "gelu_pytorch_tanh", "model_type": "gemma2"}) == (4096, 14336, True)
        without = {key: value for key, value in dense.items() if key != "intermediate_size"}
        keys = "n_routed_experts", "num_local_experts", "moe_num_experts"
        experts = [dense | {key: some} for key in keys for some in (8, [8, 8])]
        for other in (without, dense | LATENT, *experts, dense | {"intermediate_size": -4}):
            assert sizes(other)[:2] == (None, None)
        for few in (0, 1, None, [1, 1], [0, 1]):
            assert sizes({**dense, "num_experts": few})[:2] == (4096, 14336)
        for some in (True, "8", [1, 2]):
            assert sizes({**dense, "num_experts": some})[:2] == (None, None)

    def test_names_of_the_same_sizes(self) -> None:
        assert read_model("llama3-70b") == read_model("Llama-3.1-70B")
        with pytest.raises(ConfigurationError, match=r"^--layer lama3-70b: .*; did you mean llama3-70b\?"):
            read_model("lama3-70b", "--layer")

    def test_windows(self) -> None:
        sliding = {**LLAMA, "sliding_window": 64}
        every = facts_of(sliding, "x")
        assert dict(every.layers) == {"sliding_attention": 4} and every.mask_of("sliding_attention") == "window(63,0)"
        assert dict(facts_of({**sliding, "use_sliding_window": False}, "x").layers) == {"full_attention": 4}
        half = facts_of({**sliding, "model_type": "gemma2", "attn_logit_softcapping": 50.0}, "x")
        assert dict(half.layers) == {"full_attention": 2, "sliding_attention": 2} and half.softcap
        listed = facts_of(
            {**LLAMA, "attention_chunk_size": 8, "layer_types": ["chunked_attention"] * 3 + ["full_attention"]}, "x"
        )
        assert listed.chunk == 8 and listed.mask_of("chunked_attention") == "causal&chunks(8)"
        assert facts_of({**sliding, "model_type": "gpt_oss"}, "x").sinks

    def test_what_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="linear_attention: advice is for attention only"):
            facts_of({**LLAMA, "layer_types": ["linear_attention"]}, "x")
        with pytest.raises(ConfigurationError, match="num_attention_heads is None"):
            facts_of({}, "x")
        for key, odd in (
            ("text_config", "x"), ("text_config", [1]), ("layer_types", [1]), ("layer_types", 1),
            ("layer_types", [1, "full_attention"]), ("sliding_window", "4k"), ("sliding_window", -4),
        ):  # fmt: skip
            with pytest.raises(ConfigurationError, match=re.escape(f"--model x: {key} is {odd!r}: give a config with")):
                facts_of({**LLAMA, key: odd}, "x")
        chunked = {**LLAMA, "layer_types": ["chunked_attention"], "attention_chunk_size": "long"}
        with pytest.raises(ConfigurationError, match="--model x: attention_chunk_size is 'long'"):
            facts_of(chunked, "x")
        with pytest.raises(ConfigurationError, match=r"no such file.*llama-3\.1-8b"):
            read_model("llama-3.1-9b")
        with pytest.raises(ConfigurationError, match="no such file"):
            read_model("x" * 5000)
        config = tmp_path / "config.json"
        config.write_text("[]")
        with pytest.raises(ConfigurationError, match="no object at its top"):
            read_model(str(tmp_path))
        config.write_text("{")
        with pytest.raises(ConfigurationError, match="cannot be read"):
            read_model(str(config))
        config.write_text(json.dumps(LLAMA))
        assert read_model(str(tmp_path)).name == tmp_path.name


class TestEngines:
    def test_splits(self) -> None:
        assert splits(8) == [(2, 4), (4, 2)] and splits(6) == [(2, 3), (3, 2)] and not splits(5) and not splits(2)

    def test_megatron(self) -> None:
        job = Job(KNOWN["llama-3.1-8b"], 8, 4096, True)
        assert set(reasons("megatron", job).values()) == {None}
        tensor = reasons("megatron", replace(job, tensor_parallel=2))
        assert tensor["ulysses"] == "a2a over 8 ranks wants heads that divide: there are 16 of q and 4 of kv a group"
        assert tensor["usp/4"] is None and tensor["ring"] is None
        oss = reasons("megatron", replace(job, model=KNOWN["gpt-oss-20b"]))
        assert [name for name, why in oss.items() if why is None] == ["ulysses"]
        windows = replace(KNOWN["gpt-oss-20b"], sinks=False)
        free = reasons("megatron", replace(job, model=windows))
        assert [name for name, why in free.items() if why is None] == ["all-gather-kv", "ulysses"]
        for model, why in (
            (KNOWN["gemma-2-9b"], "soft-caps"),
            (KNOWN["flux.1-dev"], "causal language"),
            (replace(KNOWN["llama-3.1-8b"], chunk=8), "chunked"),
        ):
            assert all(why in str(each) for each in reasons("megatron", replace(job, model=model)).values())
        assert ENGINES["megatron"].lengths(job) is None
        assert ENGINES["megatron"].lengths(replace(job, length=4104)) == (
            "pad sequences to a multiple of 16 (2 x context-parallel size)"
        )

    def test_diffusers(self) -> None:
        job = Job(KNOWN["flux.1-dev"], 8, 4608, False)
        assert set(reasons("diffusers", job).values()) == {None}
        odd = list(ENGINES["diffusers"].options(replace(job, length=4609)))
        assert [each.flags for each in odd if each.reason is None] == [
            "ring_degree=8, ring_anything=True", "ulysses_degree=8, ulysses_anything=True",
        ]  # fmt: skip
        training = list(ENGINES["diffusers"].options(replace(job, length=4609, training=True)))
        without = [each.reason for each in training if "anything" in each.flags]
        assert without == ["ring_anything has no backward pass", "ulysses_anything has no backward pass"]
        few = replace(job, model=replace(KNOWN["flux.1-dev"], heads=30, kv_heads=30))
        padded = "ulysses_degree=8, ulysses_anything=True"
        found = {each.flags: each for each in ENGINES["diffusers"].options(few)}
        assert found[padded].reason is None and found[padded].heads == (32, 32)
        assert reasons("diffusers", few)["ulysses"] and reasons("diffusers", few)["usp/2"] is None
        assert reasons("diffusers", few)["usp/4"]
        none = replace(job, model=replace(KNOWN["flux.1-dev"], heads=3, kv_heads=3))
        (why,) = (each.reason for each in ENGINES["diffusers"].options(none) if each.flags == padded)
        assert why == "padding would add 5 heads, and a rank would have 1"
        for model, why in ((KNOWN["llama-3.1-8b"], "causal"), (replace(KNOWN["flux.1-dev"], kv_heads=8), "grouped")):
            assert all(why in str(each) for each in reasons("diffusers", replace(job, model=model)).values())


def every_flag(engine: str) -> list[str]:
    model = {"megatron": "llama-3.1-8b", "diffusers": "flux.1-dev"}[engine]
    return [each.flags for each in ENGINES[engine].options(Job(KNOWN[model], 8, 4608, False))]


@pytest.mark.slow
@pytest.mark.waits
def test_megatron_takes_the_flags(warm: str) -> None:
    """The newest pinned release, or each, has these settings by their names on the command line."""
    text = "import sys, json\nfrom megatron.core.transformer import TransformerConfig as C\n" + (
        "for each in json.loads(sys.argv[1]):\n    C(num_layers=2, hidden_size=64, num_attention_heads=8, **each)\n"
    )
    given = []
    for flags in every_flag("megatron"):
        words = flags.removeprefix("--").split(" --")
        names = {each.partition(" ")[0].replace("-", "_"): each.split()[1:] for each in words}
        assert set(names) <= {"context_parallel_size", "cp_comm_type", "hierarchical_context_parallel_sizes"}
        one = {"context_parallel_size": 8, "cp_comm_type": names["cp_comm_type"][0]}
        if "hierarchical_context_parallel_sizes" in names:
            one["hierarchical_context_parallel_sizes"] = [int(n) for n in names["hierarchical_context_parallel_sizes"]]
        given.append(one)
    for version in PINNED if FULL_GRID else PINNED[-1:]:
        need(version)
        run = [warm, "-c", text, json.dumps(given)]
        done = subprocess.run(
            run, capture_output=True, text=True, timeout=patient(60), env={"PYTHONPATH": str(folder(version))}
        )
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.waits
def test_diffusers_takes_the_flags() -> None:
    if importlib.util.find_spec("diffusers") is None:
        pytest.skip("diffusers is not installed")
    text = "from diffusers import ContextParallelConfig as C\n" + "".join(f"C({f})\n" for f in every_flag("diffusers"))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=patient(100))
    assert done.returncode == 0, done.stderr[-2000:]


# ---------- the command


def said(*argv: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    code = main(["advise", *argv], out, err)
    return code, out.getvalue(), err.getvalue()


SMALL = ("--topology", "preset:hgx-h100", "--ranks", "2", "--seq", "8k", "--passes", "forward")


def test_advice() -> None:
    code, out, err = said("--engine", "megatron", "--model", "llama-3.1-8b", *SMALL)
    assert code == 0, err
    assert out.startswith("llama-3.1-8b: 32 heads, 8 of kv, head dim 128, 32 layers; 8,192 tokens over 2 ranks;")
    best = re.search(r"take: (--context-parallel-size 2 --cp-comm-type \S+)\n  (\S+ \S+): the next, ", out)
    rows = re.findall(r"^ +(\S+ m?s)  (--context-parallel-size 2 \S+ \S+): moves", out, re.MULTILINE)
    assert best is not None and len(rows) == 3 and rows[0] == (best[2], best[1])
    assert "tokenring itself: " in out


def test_a_model_that_an_engine_does_not_compute() -> None:
    code, out, err = said("--engine", "diffusers", "--model", "llama-3.1-8b", *SMALL)
    assert code == 0, err
    assert "take: nothing that it ships computes this model" in out and "no causal masks" in out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--engine", "vllm", "--model", "llama-3.1-8b", *SMALL), "--engine vllm: choose one of megatron, torchtitan"),
        (("--engine", "megatron", "--model", "nothing", *SMALL), "there is no such file"),
        (("--engine", "megatron", "--model", "llama-3.1-8b", *SMALL, "--tp", "2"), "one rank shares no sequence"),
    ],
)
def test_what_is_refused(argv: tuple[str, ...], text: str) -> None:
    code, _, err = said(*argv)
    assert code == 2 and text in err
