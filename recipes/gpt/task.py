"""A GPT as `recipes.train` sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from ..errors import RecipeError
from ..hf import load, save
from ..text import Corpus, Tokenizer, load_corpus, open_tokenizer, require_vocab
from . import _build
from ._build import GPT
from .config import GPTConfig
from .generate import Writer

START = "\n"  # what a sample begins with


def build(config: GPTConfig) -> GPT:
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
            "recipes.registry, which fills it in"
        )
    return cast(GPT, pretrained.model)


def abstract_batch(config: GPTConfig) -> jax.ShapeDtypeStruct:
    """Windows (batch, length + 1) of ids."""
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def load_tokenizer(config: GPTConfig) -> Tokenizer:
    """The tokenizer of the config.

    Raises:
      RecipeError: It has more ids than the model.
    """
    tokenizer = open_tokenizer(config.data)
    require_vocab(tokenizer, config.model.vocab)
    return tokenizer


def load_data(config: GPTConfig) -> Corpus:
    """The text of the config, in windows."""
    return load_corpus(config.data, load_tokenizer(config))


def scores(config: GPTConfig, data: Corpus, model: GPT, folder: Path) -> dict[str, float]:
    """None: the loss says it all."""
    return {}


def closing(config: GPTConfig, data: Corpus, model: GPT, folder: Path) -> Iterator[str]:
    """A sample of the model's own text; with `config.init`, the tuned model in such a folder."""
    if config.train.sample_tokens:
        writer = Writer(model, data.tokenizer, config.data.sequence_length)
        yield f"sample:{writer(START, tokens=config.train.sample_tokens, seed=config.seed)}"
    if config.init is not None:
        save(load(config.init, "lm"), folder / "pretrained", nnx.state(model, nnx.Param))
        yield f"the tuned model as a Hugging Face folder is in {folder / 'pretrained'}"
