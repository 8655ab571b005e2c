"""Windows of tokens in a seeded order, as a grain pipeline whose position can be saved.

Training draws windows that start at any token, each once per epoch in an order that the seed
decides. Validation reads the end of the text once, in windows that do not overlap.
"""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..config import DataConfig
from ..errors import RecipeError
from ..recipe import Data, Examples
from ._sources import cache_key, cached, documents
from ._tokenizer import ByteTokenizer, Tokenizer, open_tokenizer, save_tokenizer, token_dtype

_BATCH = 4 * 2**20  # characters that are encoded together
_MEASURED = 2**20  # tokens whose text is measured


def tokenize(config: DataConfig, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens (tokens,) of a config's documents, mapped from a file of the cache.

    Each document ends with the tokenizer's `eos`; without one, rows end with a newline, and files
    follow one another as they are. The ids are uint8, uint16 or uint32.
    """
    dtype = token_dtype(tokenizer.vocab)
    end = np.array([] if tokenizer.eos is None else [tokenizer.eos], dtype)

    def build(path: Path) -> None:
        with path.open("wb") as file:
            for texts in _batches(config, tokenizer):
                for ids in tokenizer.encode_many(texts):
                    file.write(np.append(ids, end).astype(dtype).tobytes())

    key = cache_key(config, {"tokenizer": tokenizer.identity})
    path = cached(config, f"tokens-{key}", build)
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def _batches(config: DataConfig, tokenizer: Tokenizer) -> Iterator[list[str]]:
    texts: list[str] = []
    characters = 0
    for text, is_row in documents(config):
        texts.append(f"{text}\n" if is_row and tokenizer.eos is None else text)
        characters += len(text)
        if characters >= _BATCH:
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts


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
    """Tokens (tokens,) for training and validation, and the batches of windows cut from them."""

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

    def examples(self, *, training: bool) -> Sequence[Examples]:
        """Windows; those to measure on do not overlap."""
        tokens = self.train_tokens if training else self.validation_tokens
        # Grain shuffles at most 2**32 elements.
        stride = 1 + tokens.size // 2**32 if training else self.sequence_length
        return [Examples(_Windows(tokens, self.sequence_length, stride))]


@dataclass(frozen=True)
class Mixture(Data):
    """Several texts, of which a batch has windows in the shares of their weights.

    Validation reads all their windows, whatever the shares.
    """

    corpora: Sequence[Corpus]
    weights: Sequence[float]

    @property
    def batch_size(self) -> int:
        return self.corpora[0].batch_size

    @property
    def tokenizer(self) -> Tokenizer:
        """Digest of the ids."""
        return self.corpora[0].tokenizer

    @property
    def summary(self) -> str:
        sizes = [corpus.train_tokens.size for corpus in self.corpora]
        return f"{sum(sizes):,} training tokens of {len(sizes)} texts"

    @functools.cached_property
    def token_size(self) -> float | None:
        sizes = [corpus.token_size for corpus in self.corpora]
        counts = [corpus.validation_tokens.size for corpus in self.corpora]
        return None if None in sizes else float(np.average(np.array(sizes, float), weights=counts))

    @functools.cached_property
    def digest(self) -> str:
        pairs = zip(self.corpora, self.weights, strict=True)
        parts = "\n".join(f"{corpus.digest} {weight}" for corpus, weight in pairs)
        return hashlib.sha256(parts.encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        self.corpora[0].save(folder)

    def examples(self, *, training: bool) -> Sequence[Examples]:
        """Digests of the texts with their weights."""
        return [
            examples._replace(weight=weight)
            for corpus, weight in zip(self.corpora, self.weights, strict=True)
            for examples in corpus.examples(training=training)
        ]


def load_corpus(config: DataConfig, tokenizer: Tokenizer | None = None) -> Corpus | Mixture:
    """Tokenizes the text or the mixture of a config, or finds its tokens in the cache.

    Validation is the last `validation_fraction` of the tokens of each text.
    """
    tokenizer = open_tokenizer(config) if tokenizer is None else tokenizer
    corpora = [_load_text(text, tokenizer) for text in config.texts]
    if config.mixture is None:
        return corpora[0]
    return Mixture(corpora, list(config.mixture.values()))


def _load_text(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    tokens = tokenize(config, tokenizer)
    split = tokens.size - round(tokens.size * config.validation_fraction)
    parts, length = (tokens[:split], tokens[split:]), config.sequence_length
    source = config.path or "the Python standard library"
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
    return Corpus(*parts, length, config.batch_size, tokenizer)
