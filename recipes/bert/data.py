"""Pairs of segments with hidden tokens, as a grain pipeline whose position can be saved.

Training draws windows of text that start at any token, each once per epoch in an order that the
seed decides; what is hidden of a window is drawn anew each time. Validation reads the end of the
text once, in windows that do not overlap, and always hides the same tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..batches import Batches, training_batches, validation_batches
from ..errors import RecipeError
from ..text import (
    Corpus,
    SubwordTokenizer,
    Tokenizer,
    load_corpus,
    open_tokenizer,
    require_vocab,
)
from .config import SPECIAL, BertConfig, BertDataConfig
from .masking import mask_tokens

_CONTINUED = "##"  # what WordPiece begins a token with that goes on with a word


class Vocabulary(NamedTuple):
    """What making sequences needs of a tokenizer.

    Attributes:
      first: The id of [CLS].
      end: The id of [SEP].
      mask: The id of [MASK].
      ordinary: Ids of all tokens that are not special.
      special: Whether an id is special, (vocab,) bool.
      begins: Whether an id begins a word, (vocab,) bool.
    """

    first: int
    end: int
    mask: int
    ordinary: np.ndarray
    special: np.ndarray
    begins: np.ndarray

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Asks a tokenizer.

        Raises:
          RecipeError: It has not the tokens [CLS], [SEP] and [MASK].
        """
        if not isinstance(tokenizer, SubwordTokenizer):
            raise RecipeError(
                "data.tokenizer: expected one with the tokens [CLS], [SEP] and [MASK]; got bytes; "
                "use kind wordpiece"
            )
        special, begins = np.zeros(tokenizer.vocab, bool), np.ones(tokenizer.vocab, bool)
        for token, index in tokenizer.inner.get_vocab(with_added_tokens=True).items():
            begins[index] = not token.startswith(_CONTINUED)
        for index, token in tokenizer.inner.get_added_tokens_decoder().items():
            special[index] = token.special
        first, end, mask = (tokenizer.id(token) for token in ("[CLS]", "[SEP]", "[MASK]"))
        special[[first, end, mask]] = True
        return cls(first, end, mask, np.flatnonzero(~special), special, begins)


@dataclass(frozen=True)
class _Windows:
    """Window i is `length` tokens from the first word that begins at token i * stride or later.

    Of a text with no word that begins within `length` tokens, it is those at i * stride.
    """

    tokens: np.ndarray
    begins: np.ndarray
    length: int
    stride: int

    def __len__(self) -> int:
        return max(0, (self.tokens.size - 2 * self.length) // self.stride + 1)

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.stride
        tokens = self.tokens[start : start + 2 * self.length]
        offset = int(np.argmax(self.begins[tokens[: self.length]]))
        return tokens[offset : offset + self.length].astype(np.int32)


@dataclass(frozen=True)
class _Sequences:
    """Makes what `Bert.loss` takes of a window, by draws from a generator."""

    config: BertDataConfig
    vocabulary: Vocabulary
    windows: _Windows

    def __call__(self, window: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        config, vocabulary = self.config, self.vocabulary
        left, right = self._cut(window, rng)
        answer = int(rng.integers(2)) if config.pairs != "none" else 0
        if answer and config.pairs == "sentence_order":
            left, right = right, left
        elif answer:
            elsewhere = self.windows[int(rng.integers(len(self.windows)))]
            right = elsewhere[: right.size]
        first, end = [vocabulary.first], [vocabulary.end]
        ids = np.concatenate([first, left, end, right, end])
        segments = np.repeat(np.arange(2, dtype=np.int32), [left.size + 2, right.size + 1])
        begins = vocabulary.begins[ids] | (not config.masking.whole_words)
        begins[[1, left.size + 2]] = True  # a word is not hidden in one segment for another's sake
        words = np.where(vocabulary.special[ids], -1, np.cumsum(begins))
        masked = mask_tokens(
            ids,
            words,
            rng,
            predictions=config.predictions,
            mask=vocabulary.mask,
            ordinary=vocabulary.ordinary,
            config=config.masking,
        )
        inputs = (masked.ids, segments, masked.positions, masked.targets, masked.counts)
        return inputs if config.pairs == "none" else (*inputs, np.asarray(answer, np.int32))

    def _cut(self, window: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A window in two, where a word begins: the pieces of a cut word would tell the order."""
        places = np.flatnonzero(self.vocabulary.begins[window[1:]]) + 1
        place = rng.choice(places) if places.size else window.size // 2
        return window[:place], window[place:]


@dataclass(frozen=True)
class MaskedCorpus:
    """A corpus as `Bert.loss` takes it.

    Args:
      corpus: The tokens.
      config: The `data` section.
    """

    corpus: Corpus
    config: BertDataConfig

    @property
    def summary(self) -> str:
        """How much there is to learn from, in words."""
        return self.corpus.summary

    @property
    def digest(self) -> str:
        """Tells whether two corpora hold the same tokens, split in the same place."""
        return self.corpus.digest

    def save(self, folder: Path) -> None:
        """Leaves the tokenizer in the run's folder."""
        self.corpus.save(folder)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's special tokens and beginnings of words."""
        return Vocabulary.of(self.corpus.tokenizer)

    def _windows(self, tokens: np.ndarray, stride: int) -> _Windows:
        length = self.config.sequence_length - SPECIAL
        return _Windows(tokens, self.vocabulary.begins, length, stride)

    def training(self, seed: int, *, process: int = 0, processes: int = 1) -> Batches:
        """Shuffled batches for ever, reshuffled and masked anew every epoch.

        Args:
          seed: Decides the order and what is drawn.
          process: Which of the processes asks, from 0.
          processes: Number of processes that share each batch; divides `batch_size`.
        """
        windows = self._windows(self.corpus.train_tokens, 1)
        return training_batches(
            windows,
            seed,
            self.config.batch_size,
            draw=_Sequences(self.config, self.vocabulary, windows),
            process=process,
            processes=processes,
        )

    def validation(self, batches: int | None = None) -> Iterator[Any]:
        """Validation batches, the same ones with the same tokens hidden each time.

        Args:
          batches: How many; None for all.
        """
        windows = self._windows(self.corpus.validation_tokens, self.config.sequence_length)
        draw = _Sequences(self.config, self.vocabulary, windows)
        return validation_batches(windows, self.config.batch_size, batches, draw=draw)


def load_masked_corpus(config: BertConfig) -> MaskedCorpus:
    """Tokenizes the text of a config, or finds its tokens in the cache.

    Raises:
      RecipeError: As `recipes.text.load_corpus`; or the tokenizer has more ids than the model, or
        has not BERT's special tokens; or the validation part is shorter than two sequences.
    """
    tokenizer = open_tokenizer(config.data)
    require_vocab(tokenizer, config.model.vocab)
    data = MaskedCorpus(load_corpus(config.data, tokenizer), config.data)
    length = data.config.sequence_length
    for part, tokens in (
        ("training", data.corpus.train_tokens),
        ("validation", data.corpus.validation_tokens),
    ):
        if tokens.size < 2 * length:
            raise RecipeError(
                f"data.sequence_length: expected a {part} part of at least {2 * length} tokens, "
                f"two sequences; got {tokens.size}; use more text or a shorter sequence_length"
            )
    return data
