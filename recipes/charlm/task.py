"""A character model as `recipes.train` sees it."""

import jax
import jax.numpy as jnp
from flax import nnx

from ..run.monitor import monitored
from ..run.recipe import no_closing, no_scores
from ..text import Corpus, Mixture, load_corpus
from .config import CharlmConfig
from .model import RegularModel, UnitModel

scores = no_scores
closing = no_closing


def build(config: CharlmConfig) -> UnitModel | RegularModel:
    """The model that a config describes, its parameters drawn from `config.seed`."""
    length, rngs = config.data.sequence_length, nnx.Rngs(params=jax.random.key(config.seed))
    if config.model.library == "plain":
        return RegularModel(config.model, length, dtype=jnp.dtype(config.policy), rngs=rngs)
    return UnitModel(config.model, length, policy=monitored(config), rngs=rngs)


def abstract_batch(config: CharlmConfig) -> jax.ShapeDtypeStruct:
    """Windows (batch, length + 1) of bytes."""
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def load_data(config: CharlmConfig) -> Corpus | Mixture:
    """The text of the config, in windows."""
    return load_corpus(config.data)
