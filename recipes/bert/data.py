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

_CONTINUED = "##"  # what WordPiece begins a token with that goes on with a word


class Vocabulary(NamedTuple):
    """Ids of [CLS], [SEP] and [MASK], and which ids are special or begin a word, (vocab,) bool."""

    first: int
    end: int
    mask: int
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
        ids = first, end, mask = [tokenizer.id(token) for token in ("[CLS]", "[SEP]", "[MASK]")]
        special[ids] = True
        return cls(first, end, mask, special, begins)


class Masked(NamedTuple):
    """Ids (time,) with hidden tokens; where and what these are (predictions,), and which count."""

    ids: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    counts: np.ndarray


def mask_tokens(
    ids: np.ndarray,
    words: np.ndarray,
    rng: np.random.Generator,
    *,
    predictions: int,
    mask: int,
    ordinary: np.ndarray,
) -> Masked:
    """Hides at most `predictions` tokens of a sequence, as BERT does: 80% become `mask`, 10% any.

    `words` (time,) numbers the word of each token, rising; -1 is a token that is never hidden. A
    word is hidden whole or not at all; one that no longer fits is passed over. `ordinary` are the
    ids that a token may be replaced by at random.
    """
    places = np.flatnonzero(words >= 0)
    _, starts, sizes = np.unique(words[places], return_index=True, return_counts=True)
    hidden = [np.empty(0, np.intp)]
    left = predictions
    for word in rng.permutation(starts.size):
        if sizes[word] <= left:
            hidden.append(places[starts[word] : starts[word] + sizes[word]])
            left -= sizes[word]
    chosen = np.sort(np.concatenate(hidden))
    seen = ids.astype(np.int32)
    counts = np.arange(predictions) < chosen.size
    positions, targets = np.zeros((2, predictions), np.int32)
    positions[: chosen.size], targets[: chosen.size] = chosen, seen[chosen]
    draw = rng.random(chosen.size)
    strangers = rng.choice(ordinary, chosen.size)
    seen[chosen] = np.select(
        [draw < 0.8, draw < 0.9],
        [np.full(chosen.size, mask), strangers],
        seen[chosen],
    )
    return Masked(seen, positions, targets, counts)


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
        # Cut where a word begins: the pieces of a cut word would tell the order.
        places = np.flatnonzero(vocabulary.begins[window[1:]]) + 1
        place = rng.choice(places) if places.size else window.size // 2
        left, right = window[:place], window[place:]
        answer = int(rng.integers(2)) if config.pairs != "none" else 0
        if answer and config.pairs == "sentence_order":
            left, right = right, left
        elif answer:
            right = self.windows[int(rng.integers(len(self.windows)))][: right.size]
        first, end = [vocabulary.first], [vocabulary.end]
        ids = np.concatenate([first, left, end, right, end])
        segments = np.repeat(np.arange(2, dtype=np.int32), [left.size + 2, right.size + 1])
        begins = vocabulary.begins[ids] | (not config.masking.whole_words)
        begins[[1, left.size + 2]] = True  # a word is not hidden in one segment for another's sake
        masked = mask_tokens(
            ids,
            np.where(vocabulary.special[ids], -1, np.cumsum(begins)),
            rng,
            predictions=config.predictions,
            mask=vocabulary.mask,
            ordinary=np.flatnonzero(~vocabulary.special),
        )
        inputs = (masked.ids, segments, *masked[1:])
        return inputs if config.pairs == "none" else (*inputs, np.asarray(answer, np.int32))


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
    least = 2 * config.sequence_length
    for part in ("train", "validation"):
        if (size := getattr(corpus, f"{part}_tokens").size) < least:
            raise RecipeError(
                f"data.sequence_length: expected a {part} part of at least {least} tokens, two "
                f"sequences; got {size}; use more text or a shorter sequence_length"
            )
    return MaskedCorpus(**vars(corpus), config=config)
