"""Character models in `unitscale.nn`, and the same in plain `flax.nnx` as a baseline."""

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
from ..text import Corpus, abstract_batch as abstract_batch, load_corpus
from .config import CharlmConfig, CharlmModelConfig

scores = no_scores
closing = no_closing


def branch_taus(config: CharlmModelConfig) -> list[float]:
    """The tau of every residual branch: one that mixes characters and an MLP in each layer."""
    mixing = config.attention_ratio if config.kind == "attention" else 1.0
    own = rules.residual_taus(config.residual, 2 * config.layers, tau=config.tau)
    return [tau if index % 2 else tau * mixing for index, tau in enumerate(own)]


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
        branches = [
            nn.MLP(width, config.mlp_ratio * width, **options)
            if index % 2
            else _mixer(config, length, options)
            for index in range(len(taus))
        ]
        norms = [nn.LayerNorm(width, policy=policy) for _ in range(len(taus) + 1)]
        if config.norm == "pre":
            branches = [nnx.Sequential(*pair) for pair in zip(norms, branches, strict=False)]
        self.branches = nnx.List(
            [nn.Residual(b, tau=t, depth=len(taus)) for b, t in zip(branches, taus, strict=True)]
        )
        self.norms = nnx.List({"pre": norms[-1:], "post": norms[:-1], "none": []}[config.norm])
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


class Recurrent(nnx.Module):
    """A plain RNN whose carry is in the dtype of its activations."""

    def __init__(self, cell: nnx.GRUCell | nnx.OptimizedLSTMCell):
        self.rnn = nnx.RNN(cell, rngs=False)

    def __call__(self, x: jax.Array) -> Any:
        zeros = jnp.zeros_like(x[:, 0])
        lstm = isinstance(self.rnn.cell, nnx.OptimizedLSTMCell)
        return self.rnn(x, initial_carry=(zeros, zeros) if lstm else zeros)


class Attention(nnx.Module):
    """Plain causal self-attention."""

    def __init__(self, width: int, heads: int, options: dict[str, Any]):
        self.heads, self.qkv = heads, nnx.Linear(width, 3 * width, **options)
        self.out = nnx.Linear(width, width, **options)

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
        self.weights = tuple((w.branch, w.skip) for w in weights)
        self.branches = nnx.List(
            [
                MLP(width, config.mlp_ratio * width, options)
                if index % 2
                else _mixer(config, length, options)
                for index in range(len(weights))
            ]
        )
        norms = {"pre": len(weights) + 1, "post": len(weights), "none": 0}[config.norm]
        self.norms = nnx.List([nnx.LayerNorm(width, **options) for _ in range(norms)])
        self.readout = nnx.Linear(width, BYTES, use_bias=False, **options)

    def loss(self, ids: jax.Array, targets: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Mean cross entropy of targets (batch, time), in nats per character; nothing is random."""
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(jnp.arange(ids.shape[1]))
        for index, (branch, (own, skip)) in enumerate(
            zip(self.branches, self.weights, strict=True)
        ):
            x = own * branch(self.norms[index](x) if self.norm == "pre" else x) + skip * x
            if self.norm == "post":
                x = self.norms[index](x)
        if self.norm == "pre":
            x = self.norms[-1](x)
        logits = self.readout(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _mixer(config: CharlmModelConfig, length: int, options: dict[str, Any]) -> Any:
    """The branch in which characters see one another, of either library."""
    width, unit = config.width, config.library == "unitscale"
    layers: Any = nn if unit else nnx
    if config.kind == "conv":
        conv = layers.Conv(width, width, config.kernel, padding="CAUSAL", **options)
        dense = (nn.Dense if unit else nnx.Linear)(width, width, **options)
        return ConvBlock(conv, dense, ops.gelu if unit else jax.nn.gelu)
    if config.kind == "rnn":
        names = {"gru": "GRUCell", "lstm": "OptimizedLSTMCell", "rhn": "RHNCell"}
        cell = getattr(layers, names[config.cell])(width, width, **options)
        return nn.RNN(cell) if unit else Recurrent(cell)
    if unit:
        sizes: Any = {"is_causal": True, "max_length": length}
        return nn.MultiHeadAttention(config.heads, width, **sizes, **options)
    return Attention(width, config.heads, options)


def build(config: CharlmConfig) -> UnitModel | RegularModel:
    """The model that a config describes, its parameters drawn from `config.seed`."""
    length, rngs = config.data.sequence_length, nnx.Rngs(params=jax.random.key(config.seed))
    if config.model.library == "plain":
        dtype = jnp.dtype(config.precision.policy)
        return RegularModel(config.model, length, dtype=dtype, rngs=rngs)
    return UnitModel(config.model, length, policy=make_policy(config.precision), rngs=rngs)


def load_data(config: CharlmConfig) -> Corpus:
    """The text of the config, in windows."""
    return load_corpus(config.data)
