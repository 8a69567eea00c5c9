"""Tiny models of transformers with random weights, batches of three kinds, and one process to compare with.

A family's model has two layers (four where layers take turns), a window shorter than the texts, and sinks or caps that
show. Needs transformers; `need` skips a test without it.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from gradient_errors import largest_error
from ranks import Here
from torch.nn.functional import cross_entropy

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, WINDOW, CHUNK = 96, 32, 4, 2, 8, 7, 8
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "attention_dropout": 0.0,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {**SLIDING, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 2}),
    "gpt_oss": ("GptOss", {**SLIDING, **EXPERTS, "num_local_experts": 4}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "olmo3": ("Olmo3", SLIDING),
    "gemma3_text": ("Gemma3", {**SLIDING, "query_pre_attn_scalar": 2}),
    "llama4_text": (
        "Llama4",
        {**EXPERTS, "num_local_experts": 4, "attention_chunk_size": CHUNK, "intermediate_size_mlp": 48,
         "no_rope_layers": [1, 0], "floor_scale": 64, "layer_types": ["chunked_attention", "full_attention"]},
    ),
    "phi3": ("Phi3", {}),
    "deepseek_v3": (
        "DeepseekV3",
        {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
         "moe_intermediate_size": 24, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4,
         "qk_nope_head_dim": 8, "v_head_dim": 6, "head_dim": 4, "num_key_value_heads": 4},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    ),
    "granite": ("Granite", {"attention_multiplier": 0.3}),
}  # fmt: skip
KINDS = ("dense", "packed", "right-padded")


def need() -> None:
    """Skip where transformers is not there, which no other test wants."""
    if importlib.util.find_spec("transformers") is None:
        why = "transformers is not installed: pip install 'transformers>=5.20,<5.25'"
        pytest.skip(why, allow_module_level=True)


def make_model(family: str, **more: Any) -> Any:
    """The same weights each time, in float32; gpt-oss with sinks as large as other logits."""
    import transformers

    name, own = FAMILIES[family]
    text = "Text" if hasattr(transformers, f"{name}TextConfig") else ""
    config = getattr(transformers, f"{name}{text}Config")(**{**COMMON, **own, **more}, attn_implementation="eager")
    torch.manual_seed(11)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for title, each in model.named_parameters():
            if title.endswith(("sinks", "bias")):
                each.normal_()
            elif each.dim() > 1:
                each.normal_(0.0, 0.2)
    return model.float()


def make_batch(kind: str, length: int = 42, seed: int = 5) -> dict[str, torch.Tensor]:
    """A batch of whole sequences; lengths divide by nothing."""
    made = torch.Generator().manual_seed(seed)
    rows = 1 if kind == "packed" else 2
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=made)
    labels = tokens.clone()
    labels[:, 3] = -100
    batch = {"input_ids": tokens, "labels": labels}
    if kind == "packed":
        ends = [0, 5, 24, 25, length]
        batch["position_ids"] = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])[None]
        labels[0, ends[:-1]] = -100
    if kind == "right-padded":
        mask = torch.ones_like(tokens)
        mask[1, length - 11 :] = 0
        batch["attention_mask"], labels[mask == 0] = mask, -100
    return batch


def documents_of(batch: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each document's tokens, and the labels of their successors, [1, n] both."""
    found = []
    tokens, labels = batch["input_ids"], batch["labels"]
    for row in range(len(tokens)):
        real = int(batch["attention_mask"][row].sum()) if "attention_mask" in batch else tokens.shape[1]
        places = batch["position_ids"][row] if "position_ids" in batch else torch.arange(tokens.shape[1])
        begins = [0, *((places.diff() != 1).nonzero().flatten() + 1).tolist(), real]
        following = torch.cat([labels[row, 1:], torch.tensor([-100])])
        found += [
            (tokens[row, a:b][None], following[a:b][None]) for a, b in pairwise(begins) if a < b
        ]
    return found


def alone(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in one process, by transformers' own code, each document a call of its own."""
    documents = documents_of(batch)
    items = sum(int(labels.ne(-100).sum()) for _, labels in documents)
    total = 0.0
    model.zero_grad()
    for tokens, labels in documents:
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / items
        torch.autograd.backward(loss)
        total += loss.item()
    return total, gradients(model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


# ---------- on ranks


def split(here: Here, family: str, kind: str, layout: str = "zigzag", length: int = 42) -> tuple[float, str]:
    """The largest relative error of loss and gradients against one process, and what it is of; or a refusal."""
    from tokenring.errors import UnsupportedError
    from tokenring.integrations.transformers.training import add_up_gradients, use_tokenring

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = make_batch(kind, length)
        model = make_model(family).train()
        whole, wanted = alone(make_model(family), batch)
        cp = here.cp(layout=layout)
        use_tokenring(model, cp)
        try:
            loss = model(**batch).loss
        except UnsupportedError as error:
            return math.inf, f"refused: {error}"
        loss.backward()
        add_up_gradients(model, cp)
    return max((abs(loss.item() - whole) / whole, "loss"), largest_error(gradients(model), wanted))
