"""A BERT's pretraining as `recipes.train` sees it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from unitscale import to_array

from ..recipe import no_scores
from ..run.folder import earlier_run
from ..run.state import make_policy, take_weights
from ..text import Corpus, Mixture
from .config import BertConfig
from .data import load_data as load_data
from .model import Bert, PlainBert

BERT = Bert | PlainBert
scores = no_scores


def build(config: BertConfig) -> BERT:
    """The BERT that a config describes, with the weights of `config.init` or drawn ones."""
    shape, pairs = config.model.model_copy(update={"context": config.context}), config.data.pairs
    rngs, is_plain = nnx.Rngs(config.seed), config.model.library == "plain"
    if is_plain:
        bert: BERT = PlainBert(shape, dtype=jnp.dtype(config.precision.policy), rngs=rngs)
    else:
        bert = Bert(shape, pairs, policy=make_policy(config.precision), rngs=rngs)
    if config.init is not None:
        run = earlier_run(config.init, BertConfig)
        needed = None if is_plain else ("encoder", "dense", "norm", "readout")
        # What tells pairs apart is drawn where the run was asked something else.
        kept = ("pooler", "pair_readout") if pairs == run.data.pairs else ("pooler",)
        take_weights(bert, run, needed, kept)
    return bert


def abstract_batch(config: BertConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of ids, segments, positions, targets, counts, and answers if asked."""
    size, data = config.data.batch_size, config.data
    tokens = jax.ShapeDtypeStruct((size, data.sequence_length), jnp.int32)
    hidden = jax.ShapeDtypeStruct((size, data.predictions), jnp.int32)
    counts = jax.ShapeDtypeStruct(hidden.shape, jnp.bool_)
    answers = jax.ShapeDtypeStruct((size,), jnp.int32)
    inputs = (tokens, tokens, hidden, hidden, counts)
    return inputs if data.pairs == "none" else (*inputs, answers)


def closing(config: BertConfig, data: Corpus | Mixture, model: BERT, folder: Path) -> Iterator[str]:
    """A validation text with hidden tokens, and what the model puts in their place."""
    if not config.train.sample_tokens:
        return
    batch = next(data.validation(1))
    ids, segments, positions, targets, counts = (jnp.asarray(part[:1]) for part in batch[:5])
    logits = to_array(cast(Any, model).predict(model.encoder(ids, segments), positions))
    guesses, decode = logits.argmax(-1)[0], data.tokenizer.decode
    pairs = zip(guesses, targets[0], counts[0], strict=True)
    told = [f"{decode([guess])} ({decode([target])})" for guess, target, count in pairs if count]
    yield f"guesses (truth): {', '.join(told)}"
