"""The recipe bert: pretraining on pairs of segments with hidden tokens, redrawn every epoch."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from unitscale import to_array

from ..recipe import Examples, no_scores
from ..run.folder import earlier_run
from ..run.state import make_policy, take_weights
from ..text import Corpus, SubwordTokenizer, load_corpus, windows
from .config import SPECIAL, BertConfig, BertDataConfig
from .model import Bert, PlainBert

scores = no_scores


class Vocabulary(NamedTuple):
    """Ids of [CLS], [SEP] and [MASK], and masks (vocab,) of ids that are special or begin words."""

    first: int
    end: int
    mask: int
    special: np.ndarray
    begins: np.ndarray

    @classmethod
    def of(cls, tokenizer: SubwordTokenizer) -> Self:
        """Read the ids of special tokens, and of tokens that begin a word (without ##)."""
        special, begins = np.zeros(tokenizer.vocab, bool), np.ones(tokenizer.vocab, bool)
        for token, index in tokenizer.inner.get_vocab(with_added_tokens=True).items():
            begins[index] = not token.startswith("##")
        for index, token in tokenizer.inner.get_added_tokens_decoder().items():
            special[index] = token.special
        ids = first, end, mask = [tokenizer.id(token) for token in ("[CLS]", "[SEP]", "[MASK]")]
        special[ids] = True
        return cls(first, end, mask, special, begins)

    def hide(
        self, ids: np.ndarray, words: np.ndarray, predictions: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        """Replace up to `predictions` tokens: 80% by [MASK], 10% by random tokens, 10% unchanged.

        `words` (time,) numbers each token's word, in order; words are replaced as a whole.
        Returns ids (time,) with replacements, and positions, targets and counts (predictions,).
        """
        places = np.flatnonzero(~self.special[ids])
        _, starts, sizes = np.unique(words[places], return_index=True, return_counts=True)
        hidden, left = [np.empty(0, np.intp)], predictions
        for word in rng.permutation(starts.size):
            if sizes[word] <= left:
                hidden.append(places[starts[word] : starts[word] + sizes[word]])
                left -= sizes[word]
        chosen = np.sort(np.concatenate(hidden))
        positions, targets = np.zeros((2, predictions), np.int32)
        positions[: chosen.size], targets[: chosen.size] = chosen, ids[chosen]
        draw = rng.random(chosen.size)
        others = rng.choice(np.flatnonzero(~self.special), chosen.size)
        seen = ids.astype(np.int32)
        seen[chosen] = np.select([draw < 0.8, draw < 0.9], [self.mask, others], seen[chosen])
        return seen, positions, targets, np.arange(predictions) < chosen.size


@dataclass(frozen=True)
class MaskedCorpus(Corpus):
    """A corpus in the form that `Bert.loss` takes, with randomly hidden tokens."""

    config: BertDataConfig = field(default_factory=BertDataConfig)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        assert isinstance(self.tokenizer, SubwordTokenizer)  # as the config has checked
        return Vocabulary.of(self.tokenizer)

    def examples(self, *, training: bool) -> Sequence[Examples]:
        """Return windows, and the function that makes a training example of a window."""
        length, begins = self.sequence_length - SPECIAL, self.vocabulary.begins

        def cut(window: np.ndarray) -> np.ndarray:
            start = int(np.argmax(begins[window[:length]]))  # 0 if no word begins here
            return window[start : start + length]

        found = []
        for text in self.texts:
            tokens = text.train if training else text.validation
            source = windows(tokens, 2 * length, 1 if training else self.sequence_length).map(cut)
            draw = functools.partial(self._sequence, source)
            found.append(Examples(source, draw, text.weight))
        return found

    def _sequence(
        self, others: Any, window: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        """Make the arguments of `Bert.loss`; `others` are all windows of the same text."""
        config, vocabulary = self.config, self.vocabulary
        # Cut where a word begins, because pieces of a cut word would reveal the order.
        places = np.flatnonzero(vocabulary.begins[window[1:]]) + 1
        place = rng.choice(places) if places.size else window.size // 2
        left, right = window[:place], window[place:]
        answer = int(rng.integers(2)) if config.pairs != "none" else 0
        if answer and config.pairs == "sentence_order":
            left, right = right, left
        elif answer:
            right = others[int(rng.integers(len(others)))][: right.size]
        first, end = [vocabulary.first], [vocabulary.end]
        ids = np.concatenate([first, left, end, right, end])
        segments = np.repeat(np.arange(2, dtype=np.int32), [left.size + 2, right.size + 1])
        begins = vocabulary.begins[ids] | (not config.masking.whole_words)
        begins[[1, left.size + 2]] = True  # no word spans both segments
        seen, *hidden = vocabulary.hide(ids, np.cumsum(begins), config.predictions, rng)
        inputs = (seen, segments, *hidden)
        return inputs if config.pairs == "none" else (*inputs, np.asarray(answer, np.int32))


def load_data(config: BertConfig) -> MaskedCorpus:
    """Read the texts of a config."""
    corpus = load_corpus(config.data, config.model.vocab)
    return MaskedCorpus(**vars(corpus), config=config.data)


def build(config: BertConfig) -> Bert | PlainBert:
    """Build the BERT that a config describes, with weights from `config.init` or random ones."""
    shape, pairs = config.model.model_copy(update={"context": config.context}), config.data.pairs
    rngs, is_plain = nnx.Rngs(config.seed), config.model.library == "plain"
    if is_plain:
        bert: Any = PlainBert(shape, dtype=jnp.dtype(config.precision.policy), rngs=rngs)
    else:
        bert = Bert(shape, pairs, policy=make_policy(config.precision), rngs=rngs)
    if config.init is not None:
        run = earlier_run(config.init, BertConfig)
        needed = None if is_plain else ("encoder", "dense", "norm", "readout")
        # Copy the readout of pairs only if the run had the same task for pairs.
        kept = ("pooler", "pair_readout") if pairs == run.data.pairs else ("pooler",)
        take_weights(bert, run, needed, kept)
    return bert


def abstract_batch(config: BertConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of the arguments of `Bert.loss`."""
    size, data = config.data.batch_size, config.data
    tokens = jax.ShapeDtypeStruct((size, data.sequence_length), jnp.int32)
    hidden = jax.ShapeDtypeStruct((size, data.predictions), jnp.int32)
    inputs = (tokens, tokens, hidden, hidden, jax.ShapeDtypeStruct(hidden.shape, jnp.bool_))
    answers = jax.ShapeDtypeStruct((size,), jnp.int32)
    return inputs if data.pairs == "none" else (*inputs, answers)


def closing(config: BertConfig, data: MaskedCorpus, model: Any, folder: Path) -> Iterator[str]:
    """Yield the model's guesses for the hidden tokens of a validation text."""
    if config.train.sample_tokens:
        ids, segments, positions, targets, counts = next(data.validation(1))[:5]
        logits = to_array(model.predict(model.encoder(ids[:1], segments[:1]), positions[:1]))
        guesses, decode = np.asarray(logits).argmax(-1)[0], data.tokenizer.decode
        pairs = zip(guesses[counts[0]], targets[0][counts[0]], strict=True)
        told = ", ".join(f"{decode([guess])} ({decode([target])})" for guess, target in pairs)
        yield f"guesses (truth): {told}"
