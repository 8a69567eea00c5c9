"""The text that the demo learns: the language reference which Python itself carries."""

from __future__ import annotations

import torch

VOCABULARY = 256  # tokens are bytes


def text_tokens() -> torch.Tensor:
    """The help topics of this Python, some 500 kB of English: int64 [bytes]."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def windows(tokens: torch.Tensor, length: int, seed: int) -> torch.Generator:
    """The generator that `window` draws from: equal on all ranks, so that all cut the same windows."""
    if tokens.numel() <= length:
        raise ValueError(f"the text has {tokens.numel():,} bytes: too few for a sequence of {length:,}")
    return torch.Generator().manual_seed(seed)


def window(tokens: torch.Tensor, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The next random window: inputs [1, length] and the token after each of them [1, length].

    Targets are taken before anything is cut: a rank's last token is followed by a token of another rank.
    """
    start = int(torch.randint(tokens.numel() - length, (), generator=generator))
    whole = tokens[start : start + length + 1]
    return whole[None, :-1], whole[None, 1:]
