"""What a fine-tuning run takes from a pretraining run: shape, tokenizer and weights."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, processors

from unitscale import to_array

from ..config import TOKENIZER_FILE
from ..errors import RecipeError
from ..hf import Pretrained, labels_in, load, shape_of_bert
from ..run.state import load_trained
from ..text import SubwordTokenizer
from .config import FinetuneConfig, pretraining_of

TAKEN = "encoder", "pooler"
"""Parts of a pretrained model that a task's model has too."""


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


def take_weights(model: nnx.Module, init: str) -> None:
    """Sets the parameters of a model that a pretraining run has too, by their paths."""
    # Numbers are read from the disk also where a caller asks for shapes alone.
    with jax.ensure_compile_time_eval():
        _, state = load_trained(pretraining_of(init), lambda message: None)
        # Arrays of a checkpoint are bound to a device, and those that are made are not: a step that
        # is given both returns all of them bound, and compiles again for what it returned.
        found = {path: np.asarray(value) for path, value in _values(state.params).items()}
    own = nnx.state(model, nnx.Param)
    wrong = [
        f"{'.'.join(map(str, path))} {value.shape}, the run has "
        f"{found[path].shape if path in found else 'none'}"
        for path, value in _values(own).items()
        if path[0] == "encoder" and (path not in found or found[path].shape != value.shape)
    ]
    if wrong:
        raise RecipeError(
            f"init: the weights in {init} do not fit: expected {'; '.join(wrong)}; give the run of "
            "a model of this shape"
        )
    for path, variable in nnx.to_flat_state(own):
        if path in found and path[0] in TAKEN:
            variable.set_value(jnp.asarray(found[path], variable.get_value().dtype))
    nnx.update(model, own)


def _values(state: Any) -> dict[tuple[Any, ...], jax.Array]:
    return {path: to_array(leaf.get_value()) for path, leaf in nnx.to_flat_state(state)}


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
