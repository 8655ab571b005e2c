"""What a fine-tuning run takes from a pretraining run: shape, tokenizer and weights."""

from pathlib import Path

import jax.numpy as jnp
from tokenizers import Tokenizer, processors

from ..config import TOKENIZER_FILE
from ..errors import RecipeError
from ..hf import Pretrained, labels_in, load, shape_of_bert
from ..text import SubwordTokenizer
from .config import FinetuneConfig, pretraining_of


def limits_of(config: FinetuneConfig) -> tuple[int, int | None]:
    """How many ids the pretrained model has, and how many positions it learned; None for rope."""
    if config.plain:
        shape = shape_of_bert(config.init)
        return shape.vocab, shape.longest
    pretraining = pretraining_of(config.init)
    return pretraining.model.vocab, pretraining.longest


def labels_of(config: FinetuneConfig) -> tuple[str, ...]:
    """Names of the labels that a Hugging Face folder has, in the order of their ids."""
    return labels_in(config.init) if config.plain else ()


def tokenizer_of(config: FinetuneConfig) -> Tokenizer:
    """The pretrained model's tokenizer, which lays texts out as [CLS] text [SEP] pair [SEP]."""
    vocab, _ = limits_of(config)
    tokenizer = SubwordTokenizer.read(Path(config.init) / TOKENIZER_FILE, key="init")
    if tokenizer.vocab > vocab:
        raise RecipeError(
            f"init: expected a tokenizer of at most the {vocab} ids of the model in {config.init}; "
            f"got {tokenizer.vocab}; put the tokenizer back that it was trained with"
        )
    if tokenizer.inner.post_processor is None:
        tokenizer.inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(name, tokenizer.id(name)) for name in ("[CLS]", "[SEP]")],
        )
    return tokenizer.inner


def read_plain(config: FinetuneConfig, classes: int | None) -> Pretrained:
    """The folder that a config names, with a new head where it has none of the task."""
    return load(
        config.init,
        "question_answering" if config.task == "squad" else "classification",
        new_head=True,
        classes=classes,
        dropout=config.dropout,
        param_dtype=jnp.float32,
        scalify=config.scalify,
        seed=config.seed,
    )
