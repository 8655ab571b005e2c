"""A GPT as `recipes.train` sees it.

Plain models and Hugging Face folders are imported where a config asks for them.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx

from unitscale.nn import convert

from ..errors import RecipeError
from ..recipe import no_scores
from ..run.folder import earlier_run
from ..run.state import make_policy, take_weights
from ..text import Corpus, Mixture, Tokenizer, load_corpus, open_tokenizer, require_vocab
from . import model
from .config import GPTConfig
from .generate import Writer

if TYPE_CHECKING:
    from ..hf import plain

GPT: TypeAlias = "model.GPT | plain.GPT"
TEMPERATURE = 0.7  # of a sample: mostly words, where 1 shows all that a short training left open
scores = no_scores


def build(config: GPTConfig) -> GPT:
    """The GPT that a config describes, with the weights of `config.init` or drawn ones."""
    folder = config.pretrained
    gpt = _drawn(config) if folder is None else _loaded(config, folder)
    if config.init is not None and folder is None:
        take_weights(gpt, earlier_run(config.init, GPTConfig))
    if config.lora is not None:
        from ..hf import adapt, start_from

        updated = cast("plain.GPT", gpt)
        adapt(updated, config.lora, frozen=config.precision.frozen, seed=config.seed)
        if folder is not None and config.lora.init is not None:
            start_from(updated, config.lora, config.lora.init)
    return gpt


def _loaded(config: GPTConfig, folder: str) -> GPT:
    from ..hf import load

    pretrained = load(
        folder,
        "lm",
        dropout=config.model.dropout,
        dtype=jnp.dtype(config.precision.policy),
        param_dtype=jnp.float32 if config.lora is None else None,
        precision=config.precision,
        remat=config.model.remat,
        on_host=config.lora is not None,
        seed=config.seed,
    )
    if pretrained.config != config.model:
        raise RecipeError(
            f"model: expected the shape of init {folder}; got another; read the config with "
            "recipes.registry, which fills it in"
        )
    return _with_matmuls(cast("plain.GPT", pretrained.model), config)


def _drawn(config: GPTConfig) -> GPT:
    rngs = nnx.Rngs(config.seed)
    shape = config.model.model_copy(update={"context": config.context})
    if config.model.library != "plain":
        return model.GPT(shape, policy=make_policy(config.precision), rngs=rngs)
    from ..hf import plain

    precision = config.precision
    dtype = jnp.dtype(precision.policy)
    gpt = plain.GPT(shape, dtype=dtype, precision=precision, rngs=rngs)
    return _with_matmuls(gpt, config)


def _with_matmuls(gpt: plain.GPT, config: GPTConfig) -> Any:
    """The plain model with the FP8 matmuls of `config.precision.matmuls` in its layers."""
    matmuls = config.precision.matmuls
    if matmuls == "qwix":
        return _through_qwix(gpt, config.data.sequence_length)
    if matmuls is not None and not config.precision.scalify:
        convert(gpt, {"layers.*": matmuls})
    return gpt


def _through_qwix(gpt: plain.GPT, length: int) -> Any:
    """The products that `convert` takes, by qwix: E4M3, cotangents E5M2, scales by channel."""
    try:
        qwix: Any = importlib.import_module("qwix")  # optional
    except ModuleNotFoundError as error:
        raise RecipeError(
            "precision.matmuls: expected qwix to be installed; it is not; pip install qwix, or set "
            "precision.matmuls fp8_dynamic"
        ) from error
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    rule = qwix.QtRule(
        # The path of a layer with a weight: attention's own products are left alone.
        module_path=r"layers/\d+/\w+/\w+",
        weight_qtype=e4m3,
        act_qtype=e4m3,
        bwd_qtype=e5m2,
    )
    return qwix.quantize_model(gpt, qwix.QtProvider([rule]), jnp.zeros((1, length), jnp.int32))


def abstract_batch(config: GPTConfig) -> jax.ShapeDtypeStruct:
    """Windows (batch, length + 1) of ids."""
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def load_tokenizer(config: GPTConfig) -> Tokenizer:
    """The tokenizer of the config."""
    tokenizer = open_tokenizer(config.data)
    require_vocab(tokenizer, config.model.vocab)
    end = config.model.document_end
    if end is not None and end != tokenizer.eos:
        raise RecipeError(
            f"model.document_end: expected the id with which the tokenizer ends a document, "
            f"{tokenizer.eos}; got {end}; set it to that id, or null where there is none"
        )
    return tokenizer


def load_data(config: GPTConfig) -> Corpus | Mixture:
    """The text of the config, in windows."""
    return load_corpus(config.data, load_tokenizer(config))


def closing(config: GPTConfig, data: Corpus | Mixture, model: GPT, folder: Path) -> Iterator[str]:
    """A sample of the model's own text; of a Hugging Face folder, the tuned one or its adapter."""
    settings = config.train
    if settings.sample_tokens:
        writer = Writer.of_run(model, data.tokenizer, config.data.sequence_length)
        text = writer(
            settings.sample_prompt,
            tokens=settings.sample_tokens,
            seed=config.seed,
            temperature=TEMPERATURE,
        )
        yield f"sample: {text}"
    pretrained = config.pretrained
    if pretrained is None:
        return
    from ..hf import load, save, save_adapter

    if config.lora is not None:
        save_adapter(cast("plain.GPT", model), config.lora, folder / "adapter", pretrained)
        yield f"the adapter, in files as PEFT has them, is in {folder / 'adapter'}"
    else:
        save(load(pretrained, "lm"), folder / "pretrained", nnx.state(model, nnx.Param))
        yield f"the tuned model as a Hugging Face folder is in {folder / 'pretrained'}"
