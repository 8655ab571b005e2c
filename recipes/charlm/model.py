"""Character models in `unitscale.nn`: embedding, residual branches, readout."""

import jax
from flax import nnx

from unitscale import nn, ops

from ..config import BYTES
from .config import CharlmModelConfig
from .residual import branch_taus

CELLS = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell, "rhn": nn.RHNCell}


class ConvBlock(nnx.Module):
    """A causal convolution (zeros on the left), gelu, and a dense layer."""

    def __init__(self, width: int, kernel: int, *, policy: nn.Policy, rngs: nnx.Rngs):
        self.conv = nn.Conv(width, width, kernel, padding="CAUSAL", policy=policy, rngs=rngs)
        self.out = nn.Dense(width, width, policy=policy, rngs=rngs)

    def __call__(self, x):
        """Maps (batch, time, width) to the same shape."""
        return self.out(ops.gelu(self.conv(x)))


class UnitModel(nnx.Module):
    """A unit-scaled character model."""

    def __init__(
        self, config: CharlmModelConfig, length: int, *, policy: nn.Policy, rngs: nnx.Rngs
    ):
        width = config.width
        self.norm = config.norm
        self.embed = nn.Embed(BYTES, width, policy=policy, rngs=rngs)
        self.positions = (
            nn.PositionalEmbed(length, width, policy=policy, rngs=rngs)
            if config.kind == "attention"
            else None
        )
        taus = branch_taus(config)
        count = len(taus)
        branches = [
            nn.MLP(width, config.mlp_ratio * width, policy=policy, rngs=rngs)
            if index % 2
            else make_mixer(config, length, policy, rngs)
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
        self.readout = nn.Readout(width, BYTES, policy=policy, rngs=rngs)

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


def make_mixer(
    config: CharlmModelConfig, length: int, policy: nn.Policy, rngs: nnx.Rngs
) -> nnx.Module:
    """The branch in which characters see one another."""
    width = config.width
    if config.kind == "conv":
        return ConvBlock(width, config.kernel, policy=policy, rngs=rngs)
    if config.kind == "rnn":
        return nn.RNN(CELLS[config.cell](width, width, policy=policy, rngs=rngs))
    return nn.MultiHeadAttention(
        config.heads, width, is_causal=True, max_length=length, policy=policy, rngs=rngs
    )
