"""Calls of generate(), of tiny random models of transformers: as one process makes them, and over ranks."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple

import torch
from beam_replay import apart, replayed, rows_of
from ranks import Here

from tokenring.integrations.transformers.serving import serve_with_tokenring

VOCABULARY, PAD = 256, 0
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "max_position_embeddings": 8192, "pad_token_id": PAD, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "mqa": ("Llama", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 4}),
    "sliding": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 40}),
}
RANKS, PROMPTS, PAGES, NEW_TOKENS = (1, 2, 3, 4), (1, 63, 517, 1000, 4097), (1, 16, 64), 256


class Case(NamedTuple):
    """A call of generate."""

    model: str
    ranks: int
    prompt: int
    new: int = 24
    page: int = 4
    chunk: int | None = None
    layout: str = "zigzag"
    options: tuple[tuple[str, object], ...] = ()
    lengths: tuple[int, ...] = ()  # of the rows of a batch that is padded on its left


def whole_grid() -> list[Case]:
    """Return the cells of greedy search that were promised: every model, number of ranks, prompt and page."""
    return [
        Case(model, ranks, prompt, NEW_TOKENS, page)
        for model, ranks, prompt, page in product(MODELS, RANKS, PROMPTS, PAGES)
    ]


def make_model(name: str) -> Any:
    """Return a model, the same in every process."""
    import transformers

    kind, options = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**COMMON, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for where, parameter in model.named_parameters():
        if parameter.dim() > 1 or where.endswith("bias"):  # which would be zero otherwise, as if there were none
            torch.nn.init.normal_(parameter, std=0.08)
    return model


def prompt_of(case: Case) -> dict[str, torch.Tensor]:
    """Return the random prompt of a case, with its mask of padding."""
    rows = case.lengths or (case.prompt,)
    generator = torch.Generator().manual_seed(case.prompt)
    ids = torch.randint(3, VOCABULARY, (len(rows), case.prompt), generator=generator)
    shown = torch.arange(case.prompt) >= torch.tensor([case.prompt - length for length in rows])[:, None]
    return {"input_ids": ids.masked_fill(~shown, PAD), "attention_mask": shown.long()}


def generated(model: Any, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids, and the scores of each step."""
    options = {"do_sample": False, **dict(case.options)}
    found = model.generate(
        **prompt_of(case), max_new_tokens=case.new, return_dict_in_generate=True, output_scores=True, **options
    )
    return found.sequences, torch.stack(found.scores)


def served(here: Here, model: Any, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same of a cache over ranks."""
    cp = here.cp(transport=here.transport("shm"), schedule="direct-kv", layout=case.layout)
    with serve_with_tokenring(model, cp, page=case.page, chunk=case.chunk):
        return generated(model, case)


def beams_of(case: Case) -> int:
    """Return how many beams a search keeps."""
    return int(str(dict(case.options).get("num_beams", 1)))


def scores_error(found: torch.Tensor, wanted: torch.Tensor, case: Case) -> float:
    """Return how far scores [steps, rows, vocabulary] are apart at most; -inf in one of them alone is infinitely far.

    Of beams those with the same tokens are compared, since which of two that are as good comes first is rounding;
    searches that part are infinitely far apart.
    """
    if (beams := beams_of(case)) == 1:
        return float(apart(found, wanted).max())
    rows = [replayed(*each) for each in zip(rows_of(found, beams), rows_of(wanted, beams), strict=True)]
    return max(row.error if row.tied is row.parted is None else math.inf for row in rows)
