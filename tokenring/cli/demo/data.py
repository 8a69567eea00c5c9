"""The text that the demo learns: the language reference which Python itself carries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import tokenring as tr
from tokenring.errors import ConfigurationError

VOCABULARY = 256  # tokens are bytes


@dataclass(frozen=True)
class TextBatch:
    """Tokens [1, T], the token after each of them [1, T], and the position of each in the whole sequence [T]."""

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor

    def shard(self, cp: tr.ContextParallel) -> TextBatch:
        """Return this rank's part of a whole batch.

        Targets are cut like tokens: the token after a rank's last one is another rank's.
        """
        length = self.tokens.shape[1]
        return TextBatch(tr.shard(self.tokens, cp), tr.shard(self.targets, cp), tr.positions(cp, length))


class Text:
    """Random windows of the text; equal seeds give equal windows, so that all ranks cut the same ones."""

    def __init__(self, tokens: torch.Tensor, length: int, seed: int) -> None:
        if tokens.numel() <= length:
            raise ConfigurationError(
                f"a sequence of {length:,} tokens is longer than the text, {tokens.numel():,} bytes: take a shorter one"
            )
        self.tokens, self.length = tokens, length
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self) -> TextBatch:
        """Return the next window, whole."""
        start = int(torch.randint(self.tokens.numel() - self.length, (), generator=self._generator))
        window = self.tokens[None, start : start + self.length + 1]
        return TextBatch(window[:, :-1], window[:, 1:], torch.arange(self.length))


def text_tokens() -> torch.Tensor:
    """Return the help topics of this Python, some 500 kB of English: int64 [bytes]."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
