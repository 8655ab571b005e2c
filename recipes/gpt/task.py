"""The GPT in `unitscale.nn`, and what `recipes.train` asks of the recipe.

Plain models and Hugging Face folders are imported where a config asks for them.
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
TEMPERATURE = 0.7  # of a sample: mostly words, where 1 shows all that a short training left open
scores = no_scores


class GPT(nnx.Module):
    """A decoder-only language model: pre-norm, unit scaled, in any format of a policy."""

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
            use_bias=config.bias,
            **config.stack_options,
            **options,
        )
        self.norm = (nn.RMSNorm if config.norm == "rms" else nn.LayerNorm)(width, policy=policy)
        self.readout = None if config.tied_readout else nn.Readout(width, config.vocab, **padded)

    def __call__(self, ids: jax.Array, *, deterministic: bool = True, cache: Cache | None = None):
        """Logits (batch, time, vocab) of the next token, a ScaledArray; with `cache` a new one."""
        x, cache = self._states(self.embed(ids), ids, deterministic=deterministic, cache=cache)
        logits = self.embed.attend(x) if self.readout is None else self.readout(x)
        return logits if cache is None else (logits, cache)

    def _states(
        self, x: Any, ids: jax.Array, *, deterministic: bool, cache: Cache | None = None
    ) -> tuple[Any, Cache | None]:
        """Compute the readout's inputs (batch, time, width) of embedded ids, and the new cache.

        A cache holds one document: `document_end` in `ids` separates none there.
        """
        if self.positions is not None:
            start = 0 if cache is None else cache[0].length
            x = self.positions(x, start + jnp.arange(ids.shape[1]))
        x = self.dropout(x, deterministic=deterministic)
        if cache is None:
            mask, end = None, self.config.document_end
            if end is not None:
                # Pairs of ids in one document, the id that ends it included.
                ends = (ids == end).astype(jnp.int32)
                document = jnp.cumsum(ends, axis=1) - ends
                mask = (document[:, :, None] == document[:, None, :])[:, None]
            x = self.stack(x, mask=mask, deterministic=deterministic)
        else:
            x, cache = self.stack.decode(x, cache)
        return self.norm(x), cache

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty cache for `length` tokens of each of `batch` sequences."""
        return self.stack.init_cache(batch, length)

    def loss(self, ids: jax.Array, targets: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Mean cross entropy of targets (batch, time), a float32 scalar in nats per token."""
        own = self.readout
        x, readout = self.embed.tied(ids) if own is None else (self.embed(ids), own)
        x, _ = self._states(x, ids, deterministic=deterministic)
        return readout.cross_entropy(x, targets)


def build(config: GPTConfig) -> Any:
    """The GPT that a config describes, with the weights of `config.init` or drawn ones."""
    shape = config.model.model_copy(update={"context": config.context})
    if shape.library == "plain":
        gpt = _plain(config, shape)
    else:
        gpt = GPT(shape, policy=make_policy(config.precision), rngs=nnx.Rngs(config.seed))
    if config.init is not None and config.pretrained is None:
        take_weights(gpt, earlier_run(config.init, GPTConfig))
    return gpt


def _plain(config: GPTConfig, shape: GPTModelConfig) -> Any:
    """The plain GPT of `config.pretrained` or a drawn one, with its FP8 matmuls and LoRA."""
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
            on_host=config.lora is not None,
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
    """The matmuls that `convert` takes, by qwix: E4M3, cotangents E5M2, scales by channel."""
    qwix: Any = importlib.import_module("qwix")  # optional
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    # The path of a layer with a weight: attention's own matmuls are left alone.
    rule = qwix.QtRule(
        module_path=r"layers/\d+/\w+/\w+", weight_qtype=e4m3, act_qtype=e4m3, bwd_qtype=e5m2
    )
    return qwix.quantize_model(gpt, qwix.QtProvider([rule]), jnp.zeros((1, length), jnp.int32))


def load_data(config: GPTConfig) -> Corpus:
    """The text of the config, in windows."""
    corpus, end = load_corpus(config.data, config.model.vocab), config.model.document_end
    if end not in (None, corpus.tokenizer.eos):
        raise RecipeError(
            f"model.document_end: expected the id with which the tokenizer ends a document, "
            f"{corpus.tokenizer.eos}; got {end}; set it to that id, or null where there is none"
        )
    return corpus


def closing(config: GPTConfig, data: Corpus, model: Any, folder: Path) -> Iterator[str]:
    """A sample of the model's own text; of a Hugging Face folder, the tuned one or its adapter."""
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
        yield f"the adapter, in files as PEFT has them, is in {folder / 'adapter'}"
    else:
        save(load(pretrained, "lm"), folder / "pretrained", nnx.state(model, nnx.Param))
        yield f"the tuned model as a Hugging Face folder is in {folder / 'pretrained'}"
