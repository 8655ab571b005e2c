"""Character models in `unitscale.nn`, and the same in plain `flax.nnx` as a baseline."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from unitscale import nn, ops, rules

from ..config import BYTES
from ..hf.plain import attend
from ..run.precision import make_policy
from ..run.recipe import no_closing, no_scores
from ..text import Corpus, Mixture, load_corpus
from .config import CharlmConfig, CharlmModelConfig

scores = no_scores
closing = no_closing


def branch_taus(config: CharlmModelConfig) -> list[float]:
    """The tau of every residual branch: one that mixes characters and an MLP in each layer."""
    scheme, count, own = config.residual.scheme, 2 * config.layers, config.residual
    ratio = own.attention_ratio if config.kind == "attention" else 1.0
    if scheme == "depth":
        return list(rules.residual_taus(scheme, count, mult=own.mult, attn_ratio=ratio))
    taus = rules.residual_taus(scheme, count, tau=own.tau)
    return [tau if index % 2 else tau * ratio for index, tau in enumerate(taus)]


class ConvBlock(nnx.Module):
    """A causal convolution (zeros on the left), gelu, and a dense layer, of either library."""

    def __init__(self, conv: Any, out: Any, gelu: Any):
        self.conv, self.out, self.gelu = conv, out, gelu

    def __call__(self, x: Any) -> Any:
        return self.out(self.gelu(self.conv(x)))


class UnitModel(nnx.Module):
    """A unit-scaled character model."""

    def __init__(
        self, config: CharlmModelConfig, length: int, *, policy: nn.Policy, rngs: nnx.Rngs
    ):
        width, options = config.width, {"policy": policy, "rngs": rngs}
        self.norm = config.norm
        self.embed = nn.Embed(BYTES, width, **options)
        attends = config.kind == "attention"
        self.positions = nn.PositionalEmbed(length, width, **options) if attends else None
        taus = branch_taus(config)
        count = len(taus)
        branches = [
            nn.MLP(width, config.mlp_ratio * width, **options)
            if index % 2
            else _unit_mixer(config, length, options)
            for index in range(count)
        ]
        norms = [nn.LayerNorm(width, policy=policy) for _ in range(count + 1)]
        if config.norm == "pre":
            branches = [nnx.Sequential(n, b) for n, b in zip(norms[:-1], branches, strict=True)]
        self.branches = nnx.List(
            [nn.Residual(b, tau=t, depth=count) for b, t in zip(branches, taus, strict=True)]
        )
        kept = {"pre": norms[-1:], "post": norms[:-1], "none": []}[config.norm]
        self.norms = nnx.List(kept)
        self.readout = nn.Readout(width, BYTES, **options)

    def loss(self, ids: jax.Array, targets: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Mean cross entropy of targets (batch, time), in nats per character; nothing is random."""
        x = self.embed(ids)
        if self.positions is not None:
            x = self.positions(x)
        for index, branch in enumerate(self.branches):
            x = branch(x)
            if self.norm == "post":
                x = self.norms[index](x)
        if self.norm == "pre":
            x = self.norms[0](x)
        return self.readout.cross_entropy(x, targets)


def _unit_mixer(config: CharlmModelConfig, length: int, options: dict[str, Any]) -> nnx.Module:
    """The branch in which characters see one another."""
    width = config.width
    if config.kind == "conv":
        conv = nn.Conv(width, width, config.kernel, padding="CAUSAL", **options)
        return ConvBlock(conv, nn.Dense(width, width, **options), ops.gelu)
    if config.kind == "rnn":
        cells = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell, "rhn": nn.RHNCell}
        return nn.RNN(cells[config.cell](width, width, **options))
    return nn.MultiHeadAttention(config.heads, width, is_causal=True, max_length=length, **options)


class Recurrent(nnx.Module):
    """A plain RNN whose carry is in the dtype of its activations."""

    def __init__(self, cell: nnx.GRUCell | nnx.OptimizedLSTMCell, width: int, dtype: Any):
        self.rnn, self.width, self.dtype = nnx.RNN(cell, rngs=False), width, dtype

    def __call__(self, x: jax.Array) -> Any:
        zeros = jnp.zeros((x.shape[0], self.width), self.dtype)
        lstm = isinstance(self.rnn.cell, nnx.OptimizedLSTMCell)
        return self.rnn(x, initial_carry=(zeros, zeros) if lstm else zeros)


class Attention(nnx.Module):
    """Plain causal self-attention."""

    def __init__(self, width: int, heads: int, options: dict[str, Any]):
        linear = functools.partial(nnx.Linear, **options)
        self.heads, self.qkv, self.out = heads, linear(width, 3 * width), linear(width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = (part.reshape(heads) for part in jnp.split(self.qkv(x), 3, axis=-1))
        return self.out(attend(q, k, v, is_causal=True).reshape(x.shape))


class MLP(nnx.Module):
    """gelu between two plain dense layers."""

    def __init__(self, width: int, hidden: int, options: dict[str, Any]):
        self.up = nnx.Linear(width, hidden, **options)
        self.down = nnx.Linear(hidden, width, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class RegularModel(nnx.Module):
    """A character model in plain `flax.nnx`, as it is initialised there, without loss scaling."""

    def __init__(self, config: CharlmModelConfig, length: int, *, dtype: Any, rngs: nnx.Rngs):
        width, options = config.width, {"dtype": dtype, "rngs": rngs}
        self.norm = config.norm
        self.embed = nnx.Embed(BYTES, width, **options)
        self.positions = nnx.Embed(length, width, **options) if config.kind == "attention" else None
        weights = [rules.residual(tau) for tau in branch_taus(config)]
        count = len(weights)
        self.weights = tuple((w.branch, w.skip) for w in weights)
        self.branches = nnx.List(
            [
                MLP(width, config.mlp_ratio * width, options)
                if index % 2
                else _regular_mixer(config, options)
                for index in range(count)
            ]
        )
        norms = {"pre": count + 1, "post": count, "none": 0}[config.norm]
        self.norms = nnx.List([nnx.LayerNorm(width, **options) for _ in range(norms)])
        self.readout = nnx.Linear(width, BYTES, use_bias=False, **options)

    def loss(self, ids: jax.Array, targets: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Mean cross entropy of targets (batch, time), in nats per character; nothing is random."""
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(jnp.arange(ids.shape[1]))
        for index, branch in enumerate(self.branches):
            own, skip = self.weights[index]
            inside = self.norms[index](x) if self.norm == "pre" else x
            x = own * branch(inside) + skip * x
            if self.norm == "post":
                x = self.norms[index](x)
        if self.norm == "pre":
            x = self.norms[-1](x)
        logits = self.readout(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _regular_mixer(config: CharlmModelConfig, options: dict[str, Any]) -> nnx.Module:
    """The branch in which characters see one another."""
    width = config.width
    if config.kind == "conv":
        conv = nnx.Conv(width, width, config.kernel, padding="CAUSAL", **options)
        return ConvBlock(conv, nnx.Linear(width, width, **options), jax.nn.gelu)
    if config.kind == "rnn":
        cell = {"gru": nnx.GRUCell, "lstm": nnx.OptimizedLSTMCell}[config.cell]
        return Recurrent(cell(width, width, **options), width, options["dtype"])
    return Attention(width, config.heads, options)


def build(config: CharlmConfig) -> UnitModel | RegularModel:
    """The model that a config describes, its parameters drawn from `config.seed`."""
    length, rngs = config.data.sequence_length, nnx.Rngs(params=jax.random.key(config.seed))
    if config.model.library == "plain":
        dtype = jnp.dtype(config.precision.policy)
        return RegularModel(config.model, length, dtype=dtype, rngs=rngs)
    return UnitModel(config.model, length, policy=make_policy(config.precision), rngs=rngs)


def abstract_batch(config: CharlmConfig) -> jax.ShapeDtypeStruct:
    """Windows (batch, length + 1) of bytes."""
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def load_data(config: CharlmConfig) -> Corpus | Mixture:
    """The text of the config, in windows."""
    return load_corpus(config.data)
