"""A GPT as `recipes.train` sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from ..config import Config
from ..data import Corpus, Tokenizer, load_corpus, open_tokenizer, require_vocab
from ..errors import RecipeError
from ..generate import sample_text
from ..pretrained import load, save
from . import _build
from ._build import GPT


def build(config: Config) -> GPT:
    """The GPT that a config describes, with the weights of `config.init` or drawn ones.

    Raises:
      RecipeError: `config.init` is no folder of that GPT.
    """
    if config.init is None:
        return _build.build(config)
    pretrained = load(
        config.init,
        "lm",
        dropout=config.model.dropout,
        dtype=jnp.dtype(config.policy),
        param_dtype=jnp.float32,
        scalify=config.scalify,
        seed=config.seed,
    )
    if pretrained.config != config.model:
        raise RecipeError(
            f"model: expected the shape of init {config.init}; got another; read the config with "
            "recipes.configfile, which fills it in"
        )
    return cast(GPT, pretrained.model)


def abstract_batch(config: Config) -> jax.ShapeDtypeStruct:
    """Windows (batch, length + 1) of ids."""
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def load_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of the config.

    Raises:
      RecipeError: It has more ids than the model.
    """
    tokenizer = open_tokenizer(config.data)
    require_vocab(tokenizer, config.model.vocab)
    return tokenizer


def load_data(config: Config) -> Corpus:
    """The text of the config, in windows."""
    return load_corpus(config.data, load_tokenizer(config))


def closing(config: Config, data: Corpus, model: GPT, folder: Path) -> Iterator[str]:
    """A sample of the model's own text; with `config.init`, the tuned model in such a folder."""
    if config.train.sample_tokens:
        text = sample_text(
            model,
            data.tokenizer,
            "\n",
            tokens=config.train.sample_tokens,
            seed=config.seed,
            context=config.data.sequence_length,
        )
        yield f"sample:{text}"
    if config.init is not None:
        save(load(config.init, "lm"), folder / "pretrained", nnx.state(model, nnx.Param))
        yield f"the tuned model as a Hugging Face folder is in {folder / 'pretrained'}"
