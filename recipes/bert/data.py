"""Pairs of segments with hidden tokens, as a grain pipeline whose position can be saved.

Training draws a window for every token of the text, once per epoch in an order that the seed
decides. It starts at the first word from there on, so windows that follow a word of several tokens
come several times; what is hidden is drawn anew each time. Validation reads the end of the text
once, in windows side by side but for the rest of a word, and always hides the same tokens.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np

from ..batches import Examples
from ..errors import RecipeError
from ..text import (
    Corpus,
    Mixture,
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
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Asks a tokenizer."""
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
class MaskedCorpus(Corpus):
    """A corpus as `Bert.loss` takes it; what is hidden of a window is drawn."""

    config: BertDataConfig = field(default_factory=BertDataConfig)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's special tokens and beginnings of words."""
        return Vocabulary.of(self.tokenizer)

    def examples(self, *, training: bool) -> Sequence[Examples]:
        """Windows and what makes sequences of them; those to measure on lie side by side."""
        tokens = self.train_tokens if training else self.validation_tokens
        stride = 1 if training else self.config.sequence_length
        length = self.config.sequence_length - SPECIAL
        windows = _Windows(tokens, self.vocabulary.begins, length, stride)
        return [Examples(windows, _Sequences(self.config, self.vocabulary, windows))]


def load_data(config: BertConfig) -> MaskedCorpus | Mixture:
    """The text of the config, or its mixture of texts, in pairs of segments with hidden tokens."""
    tokenizer = open_tokenizer(config.data)
    require_vocab(tokenizer, config.model.vocab)
    found = load_corpus(config.data, tokenizer)
    if isinstance(found, Corpus):
        return _masked(found, config.data)
    return replace(found, corpora=[_masked(corpus, config.data) for corpus in found.corpora])


def _masked(corpus: Corpus, config: BertDataConfig) -> MaskedCorpus:
    length = config.sequence_length
    for part, tokens in (
        ("training", corpus.train_tokens),
        ("validation", corpus.validation_tokens),
    ):
        if tokens.size < 2 * length:
            raise RecipeError(
                f"data.sequence_length: expected a {part} part of at least {2 * length} tokens, "
                f"two sequences; got {tokens.size}; use more text or a shorter sequence_length"
            )
    return MaskedCorpus(**vars(corpus), config=config)
