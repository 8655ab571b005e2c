"""Windows of tokens in a seeded order, as a grain pipeline whose position can be saved.

Training draws windows that start at any token, each once per epoch in an order that the seed
decides. Validation reads the end of the text once, in windows that do not overlap.
"""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..batches import Data, Draw
from ..config import DataConfig
from ..errors import RecipeError
from ._sources import describe_sources
from ._tokenizer import ByteTokenizer, Tokenizer
from ._tokens import tokenize
from ._vocabulary import open_tokenizer, save_tokenizer

_MEASURED = 2**20  # tokens whose text is measured


@dataclass(frozen=True)
class _Windows:
    """Window i is `length + 1` tokens from token i * stride: inputs and, one further, targets."""

    tokens: np.ndarray
    length: int
    stride: int

    def __len__(self) -> int:
        return max(0, (self.tokens.size - 1 - self.length) // self.stride + 1)

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.stride
        return self.tokens[start : start + self.length + 1].astype(np.int32)


@dataclass(frozen=True)
class Corpus(Data):
    """Tokens for training and validation, and the batches cut from them.

    Args:
      train_tokens: Ids (tokens,).
      validation_tokens: Ids (tokens,).
      sequence_length: Inputs of a window; it has one token more.
      batch_size: Windows of a batch, over all processes.
      tokenizer: Of the ids.
    """

    train_tokens: np.ndarray
    validation_tokens: np.ndarray
    sequence_length: int
    batch_size: int
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)

    @property
    def summary(self) -> str:
        return f"{self.train_tokens.size:,} training tokens"

    @functools.cached_property
    def token_size(self) -> float | None:
        if isinstance(self.tokenizer, ByteTokenizer):
            return None
        tokens = self.validation_tokens[:_MEASURED]
        return len(self.tokenizer.decode(tokens).encode("utf-8")) / tokens.size

    @functools.cached_property
    def digest(self) -> str:
        digest = hashlib.sha256(self.train_tokens.data)
        digest.update(b"|")
        digest.update(self.validation_tokens.data)
        return digest.hexdigest()[:16]

    def save(self, folder: Path) -> None:
        save_tokenizer(self.tokenizer, folder)

    def examples(self, *, training: bool) -> tuple[Any, Draw | None]:
        """Windows; those to measure on do not overlap."""
        tokens = self.train_tokens if training else self.validation_tokens
        # Grain shuffles at most 2**32 elements.
        stride = 1 + tokens.size // 2**32 if training else self.sequence_length
        return _Windows(tokens, self.sequence_length, stride), None


def load_corpus(
    config: DataConfig,
    tokenizer: Tokenizer | None = None,
    say: Callable[[str], None] = print,
) -> Corpus:
    """Tokenizes the text of a config, or finds its tokens in the cache, and splits them.
    Returns:
      The corpus. Validation is the last `validation_fraction` of the tokens.

    Raises:
      RecipeError: The text is missing, empty, not UTF-8, malformed, shorter than one sequence, or
        has fewer sequences than a batch; or the cache cannot be written.
    """
    tokenizer = open_tokenizer(config, say) if tokenizer is None else tokenizer
    tokens = tokenize(config, tokenizer, say)
    split = tokens.size - round(tokens.size * config.validation_fraction)
    parts = tokens[:split], tokens[split:]
    corpus = Corpus(*parts, config.sequence_length, config.batch_size, tokenizer)
    source = describe_sources(config)
    length = config.sequence_length
    for part, part_tokens in zip(("training", "validation"), parts, strict=True):
        if part_tokens.size < length + 1:
            raise RecipeError(
                f"data.sequence_length: one sequence needs {length + 1} tokens, its targets "
                f"included; the {part} part of {source} has {part_tokens.size} of the "
                f"{tokens.size} tokens; use more text, a shorter data.sequence_length, or another "
                f"data.validation_fraction ({config.validation_fraction})"
            )
    sequences = (split - 1) // length
    if sequences < config.batch_size:
        raise RecipeError(
            f"data.batch_size: expected at most the {sequences} sequences of {length} tokens that "
            f"{source} has for training; got {config.batch_size}; use more text or a smaller batch"
        )
    return corpus
