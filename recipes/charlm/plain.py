"""The same character models in plain `flax.nnx`, as they are initialised there, unscaled."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from unitscale import rules

from ..config import BYTES
from ..hf.plain import attend
from .config import CharlmModelConfig
from .residual import branch_taus

CELLS = {"gru": nnx.GRUCell, "lstm": nnx.OptimizedLSTMCell}


class ConvBlock(nnx.Module):
    """A causal convolution (zeros on the left), gelu, and a dense layer."""

    def __init__(self, width: int, kernel: int, *, dtype, rngs: nnx.Rngs):
        self.conv = nnx.Conv(width, width, kernel, padding="CAUSAL", dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, time, width) to the same shape."""
        return self.out(jax.nn.gelu(self.conv(x)))


class Recurrent(nnx.Module):
    """An RNN whose carry is in the dtype of its activations."""

    def __init__(self, cell: nnx.GRUCell | nnx.OptimizedLSTMCell, width: int, dtype):
        self.rnn, self.width, self.dtype = nnx.RNN(cell, rngs=False), width, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, time, width) to the same shape."""
        zeros = jnp.zeros((x.shape[0], self.width), self.dtype)
        lstm = isinstance(self.rnn.cell, nnx.OptimizedLSTMCell)
        y = self.rnn(x, initial_carry=(zeros, zeros) if lstm else zeros)
        assert isinstance(y, jax.Array), "the carry is not asked for"
        return y


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, *, dtype, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        self.heads, self.qkv, self.out = heads, linear(width, 3 * width), linear(width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        parts = jnp.split(self.qkv(x), 3, axis=-1)
        q, k, v = (p.reshape(batch, time, self.heads, width // self.heads) for p in parts)
        return self.out(attend(q, k, v, is_causal=True).reshape(x.shape))


class MLP(nnx.Module):
    """gelu between two dense layers."""

    def __init__(self, width: int, hidden: int, *, dtype, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(hidden, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, time, width) to the same shape."""
        return self.down(jax.nn.gelu(self.up(x)))


class RegularModel(nnx.Module):
    """A character model in the usual parametrization, without loss scaling."""

    def __init__(self, config: CharlmModelConfig, length: int, *, dtype, rngs: nnx.Rngs):
        width = config.width
        self.norm = config.norm
        self.embed = nnx.Embed(BYTES, width, dtype=dtype, rngs=rngs)
        self.positions = (
            nnx.Embed(length, width, dtype=dtype, rngs=rngs) if config.kind == "attention" else None
        )
        weights = [rules.residual(tau) for tau in branch_taus(config)]
        count = len(weights)
        self.weights = tuple((w.branch, w.skip) for w in weights)
        hidden = config.mlp_ratio * width
        self.branches = nnx.List(
            [
                MLP(width, hidden, dtype=dtype, rngs=rngs)
                if index % 2
                else make_mixer(config, dtype, rngs)
                for index in range(count)
            ]
        )
        norms = {"pre": count + 1, "post": count, "none": 0}[config.norm]
        self.norms = nnx.List([nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(norms)])
        self.readout = nnx.Linear(width, BYTES, use_bias=False, dtype=dtype, rngs=rngs)

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


def make_mixer(config: CharlmModelConfig, dtype, rngs: nnx.Rngs) -> nnx.Module:
    """The branch in which characters see one another."""
    width = config.width
    if config.kind == "conv":
        return ConvBlock(width, config.kernel, dtype=dtype, rngs=rngs)
    if config.kind == "rnn":
        return Recurrent(CELLS[config.cell](width, width, dtype=dtype, rngs=rngs), width, dtype)
    return Attention(width, config.heads, dtype=dtype, rngs=rngs)
