"""The recipe charlm: character models in `unitscale.nn`, and in plain `flax.nnx` as a baseline."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from unitscale import nn, ops, rules

from ..config import BYTES
from ..hf.plain import attend
from ..recipe import no_closing, no_scores
from ..run.state import make_policy
from ..text import Corpus, abstract_batch as abstract_batch, load_corpus
from .config import CharlmConfig, CharlmModelConfig

scores = no_scores
closing = no_closing


def branch_taus(config: CharlmModelConfig) -> list[float]:
    """Return the tau of every residual branch; each layer has a mixer and an MLP branch."""
    scheme, count, own = config.residual.scheme, 2 * config.layers, config.residual
    ratio = own.attention_ratio if config.kind == "attention" else 1.0
    if scheme == "depth":
        return list(rules.residual_taus(scheme, count, mult=own.mult, attn_ratio=ratio))
    taus = rules.residual_taus(scheme, count, tau=own.tau)
    return [tau if index % 2 else tau * ratio for index, tau in enumerate(taus)]


class ConvBlock(nnx.Module):
    """A causal convolution, gelu and a dense layer, from either library."""

    def __init__(self, conv: Any, out: Any, gelu: Any):
        self.conv, self.out, self.gelu = conv, out, gelu

    def __call__(self, x: Any) -> Any:
        return self.out(self.gelu(self.conv(x)))


class Recurrent(nnx.Module):
    """A plain RNN whose carry has the dtype of its input."""

    def __init__(self, cell: nnx.GRUCell | nnx.OptimizedLSTMCell):
        self.rnn = nnx.RNN(cell, rngs=False)

    def __call__(self, x: jax.Array) -> Any:
        zeros = jnp.zeros_like(x[:, 0])
        lstm = isinstance(self.rnn.cell, nnx.OptimizedLSTMCell)
        return self.rnn(x, initial_carry=(zeros, zeros) if lstm else zeros)


class Attention(nnx.Module):
    """Plain causal self-attention."""

    def __init__(self, width: int, heads: int, **options: Any):
        self.heads, self.qkv = heads, nnx.Linear(width, 3 * width, **options)
        self.out = nnx.Linear(width, width, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = (part.reshape(heads) for part in jnp.split(self.qkv(x), 3, axis=-1))
        return self.out(attend(q, k, v, is_causal=True).reshape(x.shape))


class MLP(nnx.Module):
    """Two plain dense layers with gelu in between."""

    def __init__(self, width: int, hidden: int, **options: Any):
        self.up = nnx.Linear(width, hidden, **options)
        self.down = nnx.Linear(hidden, width, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class CharModel(nnx.Module):
    """A character model: unit scaled, or in plain `flax.nnx` with Flax's initializers."""

    def __init__(self, config: CharlmModelConfig, length: int, options: dict[str, Any]):
        width, taus, unit = config.width, branch_taus(config), config.library == "unitscale"
        self.unit, self.norm, count = unit, config.norm, len(taus)
        layers: Any = nn if unit else nnx
        self.embed = layers.Embed(BYTES, width, **options)
        positions: Any = nn.PositionalEmbed if unit else nnx.Embed
        attends = config.kind == "attention"
        self.positions = positions(length, width, **options) if attends else None
        mlp = nn.MLP if unit else MLP
        branches: list[Any] = [
            mlp(width, config.mlp_ratio * width, **options)
            if index % 2
            else _mixer(config, length, options)
            for index in range(count)
        ]
        own = {"policy": options["policy"]} if unit else options
        number = {"pre": count + 1, "post": count, "none": 0}[config.norm]
        norms = [layers.LayerNorm(width, **own) for _ in range(number)]
        if unit and config.norm == "pre":
            branches = [nnx.Sequential(*pair) for pair in zip(norms, branches, strict=False)]
            norms = norms[-1:]
        if unit:
            pairs = zip(branches, taus, strict=True)
            branches = [nn.Residual(branch, tau=tau, depth=count) for branch, tau in pairs]
            readout: Any = nn.Readout(width, BYTES, **options)
        else:
            weights = map(rules.residual, taus)
            self.weights = tuple((weight.branch, weight.skip) for weight in weights)
            readout = nnx.Linear(width, BYTES, use_bias=False, **options)
        self.branches, self.norms, self.readout = nnx.List(branches), nnx.List(norms), readout

    def loss(self, ids: jax.Array, targets: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Return the mean cross entropy of targets (batch, time), in nats per character."""
        x = self.embed(ids)
        if self.positions is not None:
            places = jnp.arange(ids.shape[1])
            x = self.positions(x) if self.unit else x + self.positions(places)
        for index, branch in enumerate(self.branches):
            if self.unit:
                x = branch(x)
            else:
                own, skip = self.weights[index]
                x = own * branch(self.norms[index](x) if self.norm == "pre" else x) + skip * x
            if self.norm == "post":
                x = self.norms[index](x)
        if self.norm == "pre":
            x = self.norms[-1](x)
        if self.unit:
            return self.readout.cross_entropy(x, targets)
        logits = self.readout(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _mixer(config: CharlmModelConfig, length: int, options: dict[str, Any]) -> Any:
    """Make the branch that mixes information across characters, from either library."""
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
        return nn.MultiHeadAttention(
            config.heads, width, is_causal=True, max_length=length, **options
        )
    return Attention(width, config.heads, **options)


def build(config: CharlmConfig) -> CharModel:
    """Build the model that a config describes, with parameters drawn from `config.seed`."""
    options: dict[str, Any] = {"rngs": nnx.Rngs(params=jax.random.key(config.seed))}
    if config.model.library == "plain":
        options["dtype"] = jnp.dtype(config.precision.policy)
    else:
        options["policy"] = make_policy(config.precision)
    return CharModel(config.model, config.data.sequence_length, options)


def load_data(config: CharlmConfig) -> Corpus:
    """Read the text of a config."""
    return load_corpus(config.data)
