"""The recipe gpt: a GPT in `unitscale.nn`, a plain one, or a decoder from a Hugging Face folder.

Imports for plain models and Hugging Face folders are deferred until a config needs them.
"""
# ruff: noqa: PLC0415

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from unitscale import nn

from ..config import GPTModelConfig
from ..errors import RecipeError
from ..recipe import no_scores
from ..run.folder import earlier_run
from ..run.state import make_policy, take_weights
from ..text import Corpus, abstract_batch as abstract_batch, load_corpus
from .config import GPTConfig

Cache = tuple[nn.KVCache, ...]
TEMPERATURE = 0.7  # of samples; after a short training, 1 gives few whole words
scores = no_scores


class GPT(nnx.Module):
    """A unit-scaled, pre-norm, decoder-only language model, in the formats of a policy."""

    def __init__(self, config: GPTModelConfig, *, policy: str | nn.Policy, rngs: nnx.Rngs):
        assert config.context is not None, "a recipe fills in the longest sequence"
        width, options = config.width, {"policy": policy, "rngs": rngs}
        padded = {"pad_to_multiple_of": config.vocab_multiple, **options}
        learned = config.positions == "learned"
        self.config = config
        self.embed = nn.Embed(config.vocab, width, **padded)
        self.positions = nn.PositionalEmbed(config.context, width, **options) if learned else None
        self.dropout = nn.Dropout(config.dropout, rngs=rngs)
        self.stack = nn.TransformerStack(
            config.layers,
            width,
            config.heads,
            config.hidden,
            num_kv_heads=config.kv_heads,
            norm=config.norm,
            activation="gelu" if config.mlp == "plain" else "silu_glu",
            is_causal=True,
            local_window_size=None if config.window is None else config.window - 1,
            use_bias=config.bias,
            **config.stack_options,
            **options,
        )
        self.norm = (nn.RMSNorm if config.norm == "rms" else nn.LayerNorm)(width, policy=policy)
        self.readout = None if config.tied_readout else nn.Readout(width, config.vocab, **padded)

    def __call__(self, ids: jax.Array, *, deterministic: bool = True, cache: Cache | None = None):
        """Return logits (batch, time, vocab), a ScaledArray; with `cache`, also a new one."""
        x, cache = self._states(self.embed(ids), ids, deterministic=deterministic, cache=cache)
        logits = self.embed.attend(x) if self.readout is None else self.readout(x)
        return logits if cache is None else (logits, cache)

    def _states(
        self, x: Any, ids: jax.Array, *, deterministic: bool, cache: Cache | None = None
    ) -> tuple[Any, Cache | None]:
        """Compute the readout's inputs (batch, time, width) from embeddings, and the new cache."""
        if self.positions is not None:
            start = 0 if cache is None else cache[0].length
            x = self.positions(x, start + jnp.arange(ids.shape[1]))
        x = self.dropout(x, deterministic=deterministic)
        if cache is None:  # else all ids are in one document
            documents, end = None, self.config.document_end
            if end is not None:
                ends = (ids == end).astype(jnp.int32)  # these ids belong to the document they end
                documents = jnp.cumsum(ends, axis=1) - ends
            x = self.stack(x, segment_ids=documents, deterministic=deterministic)
        else:
            x, cache = self.stack.decode(x, cache)
        return self.norm(x), cache

    def init_cache(self, batch: int, length: int) -> Cache:
        """Make an empty cache for `length` tokens of each of `batch` sequences."""
        return self.stack.init_cache(batch, length)

    def loss(self, ids: jax.Array, targets: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Return the mean cross entropy of targets (batch, time), float32, in nats per token."""
        readout = self.readout
        x, readout = self.embed.tied(ids) if readout is None else (self.embed(ids), readout)
        x, _ = self._states(x, ids, deterministic=deterministic)
        return readout.cross_entropy(x, targets)


def build(config: GPTConfig) -> Any:
    """Build the GPT that a config describes, with the weights in `config.init` or random ones."""
    shape = config.model.model_copy(update={"context": config.context})
    if shape.library == "plain":
        gpt = _plain(config, shape)
    else:
        gpt = GPT(shape, policy=make_policy(config.precision), rngs=nnx.Rngs(config.seed))
    if config.init is not None and config.pretrained is None:
        take_weights(gpt, earlier_run(config.init, GPTConfig))
    return gpt


def _plain(config: GPTConfig, shape: GPTModelConfig) -> Any:
    """Load or draw a plain GPT, and add the FP8 matmuls and LoRA updates of the config."""
    from ..hf import adapt, load, plain, start_from

    precision = config.precision
    options: dict[str, Any] = {"dtype": jnp.dtype(precision.policy), "precision": precision}
    if config.pretrained is None:
        gpt: Any = plain.GPT(shape, rngs=nnx.Rngs(config.seed), **options)
    else:
        gpt = load(
            config.pretrained,
            "lm",
            dropout=shape.dropout,
            param_dtype=jnp.float32 if config.lora is None else None,
            remat=shape.remat,
            lazy=config.lora is not None,
            keep_fp8=config.keeps_fp8,
            seed=config.seed,
            **options,
        ).model
    if precision.matmuls == "qwix":
        return _through_qwix(gpt, config.data.sequence_length)
    if precision.matmuls is not None and not precision.scalify:
        nn.convert(gpt, {"layers.*": precision.matmuls})
    if config.lora is not None:
        adapt(gpt, config.lora, frozen=precision.frozen, seed=config.seed)
        if config.pretrained is not None and config.lora.init is not None:
            start_from(gpt, config.lora, config.lora.init)
    return gpt


def _through_qwix(gpt: Any, length: int) -> Any:
    """Use qwix for the matmuls that `convert` would convert: E4M3, with E5M2 cotangents."""
    qwix: Any = importlib.import_module("qwix")  # optional
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    # Paths of layers with weights: the matmuls of attention scores are not quantized.
    rule = qwix.QtRule(
        module_path=r"layers/\d+/\w+/\w+", weight_qtype=e4m3, act_qtype=e4m3, bwd_qtype=e5m2
    )
    return qwix.quantize_model(gpt, qwix.QtProvider([rule]), jnp.zeros((1, length), jnp.int32))


def load_data(config: GPTConfig) -> Corpus:
    """Read the text of a config, and check `model.document_end`."""
    corpus, end = load_corpus(config.data, config.model.vocab), config.model.document_end
    if end not in (None, corpus.tokenizer.eos):
        wanted = f"expected null or the tokenizer's end of text, {corpus.tokenizer.eos}; got {end}"
        raise RecipeError(f"model.document_end: {wanted}; correct it")
    return corpus


def closing(config: GPTConfig, data: Corpus, model: Any, folder: Path) -> Iterator[str]:
    """Yield a sample of generated text, and write a tuned Hugging Face folder or adapter."""
    settings, pretrained = config.train, config.pretrained
    if settings.sample_tokens:
        from .generate import Writer

        writer = Writer.of_run(model, data.tokenizer, config.data.sequence_length)
        options: dict[str, Any] = {"tokens": settings.sample_tokens, "seed": config.seed}
        yield f"sample: {writer(settings.sample_prompt, temperature=TEMPERATURE, **options)}"
    if pretrained is None:
        return
    from ..hf import load, save, save_adapter

    if config.lora is not None:
        save_adapter(model, config.lora, folder / "adapter", pretrained)
        yield f"the adapter (PEFT format) is in {folder / 'adapter'}"
    else:
        save(load(pretrained, "lm", lazy=True), folder / "pretrained", nnx.state(model, nnx.Param))
        yield f"the tuned model (Hugging Face format) is in {folder / 'pretrained'}"
