"""One case for every layer of `unitscale.nn`, and a small language model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.modules import build
from unitscale import nn, ops, to_array


class Layer(NamedTuple):
    make: Callable[..., Any]  # of policy and rngs
    shape: tuple[int, ...]  # of its input, without the batch

    def input(self, batch: int = 2, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
        x = np.random.default_rng(seed).normal(size=(batch, *self.shape))
        return jnp.asarray(x, dtype)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


WIDTH = 8
CELLS = {
    "gru": nn.GRUCell,
    "simple": nn.SimpleCell,
    "lstm": nn.OptimizedLSTMCell,
    "rhn": nn.RHNCell,
}

LAYERS: dict[str, Layer] = {
    "dense": Layer(lambda **k: nn.Dense(WIDTH, 6, **k), (WIDTH,)),
    "readout": Layer(lambda **k: nn.Readout(WIDTH, 6, use_bias=True, **k), (WIDTH,)),
    "einsum": Layer(lambda **k: nn.Einsum("bd,dhk->bhk", (WIDTH, 2, 3), (2, 3), **k), (WIDTH,)),
    "lora": Layer(lambda **k: nn.LoRALinear(WIDTH, 6, lora_rank=2, **k), (WIDTH,)),
    "conv": Layer(lambda **k: nn.Conv(4, 6, (3,), 2, **k), (7, 4)),
    "conv transpose": Layer(lambda **k: nn.ConvTranspose(4, 6, (4,), 2, **k), (3, 4)),
    "layer_norm": Layer(lambda **k: nn.LayerNorm(WIDTH, **k), (WIDTH,)),
    "rms_norm": Layer(lambda **k: nn.RMSNorm(WIDTH, **k), (WIDTH,)),
    "group_norm": Layer(lambda **k: nn.GroupNorm(WIDTH, 2, **k), (3, WIDTH)),
    "positions": Layer(lambda **k: nn.PositionalEmbed(6, WIDTH, **k), (5, WIDTH)),
    "mlp": Layer(lambda **k: nn.MLP(WIDTH, 12, **k), (WIDTH,)),
    "gated": Layer(lambda **k: nn.MLP(WIDTH, 12, activation="silu_glu", **k), (WIDTH,)),
    "moe": Layer(lambda **k: nn.MoE(WIDTH, 12, experts=3, load_balancing=0.1, **k), (WIDTH,)),
    "attention": Layer(
        lambda **k: nn.MultiHeadAttention(4, WIDTH, num_kv_heads=2, is_causal=True, **k), (5, WIDTH)
    ),
    "residual": Layer(
        lambda **k: nn.Residual(nn.Dense(WIDTH, WIDTH, **k), tau=0.5, depth=6), (WIDTH,)
    ),
    "layer": Layer(
        lambda **k: nn.TransformerLayer(WIDTH, 2, 12, depth=6, rotary_base=100.0, **k), (5, WIDTH)
    ),
    **{
        name: Layer(lambda cell=cell, **k: nn.RNN(cell(WIDTH, 6, **k)), (4, WIDTH))
        for name, cell in CELLS.items()
    },
    "stack": Layer(
        lambda **k: nn.TransformerStack(
            1, WIDTH, 2, 12, remat="layer", norm="layer", norm_placement="post", **k
        ),
        (5, WIDTH),
    ),
}


def make(name: str, policy: Any = "float32", seed: int = 0) -> tuple[Any, Layer]:
    layer = LAYERS[name]
    return build(lambda: layer.make(policy=policy, rngs=nnx.Rngs(0)), seed), layer


def value_of(model: nnx.Module, *args: Any) -> jax.Array:
    return model(*args).value


def functional(model: nnx.Module, call: Any = value_of) -> tuple[Any, Any]:
    """Return `apply(params, *args) -> call(model, *args)` and the parameters.

    All other state, such as random keys, is the same in every call.
    """
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params, *args: call(nnx.merge(graphdef, params, rest, copy=True), *args), params


def loss_and_value(model: nnx.Module, *args: Any) -> tuple[jax.Array, jax.Array]:
    """Return a loss that depends on all outputs of a model, and these."""
    y = to_array(model(*args))
    return jnp.sum(jnp.sin(y.astype(jnp.float32))), y


def sine_loss(model: nnx.Module, *args: Any) -> jax.Array:
    return loss_and_value(model, *args)[0]


def of(kind: Any, *args: Any, **options: Any) -> Any:
    return kind(*args, **options, rngs=nnx.Rngs(0))


def parameters(model: nnx.Module) -> dict[str, nnx.Param]:
    """Return parameters by dotted path."""
    return {
        ".".join(map(str, path)): variable
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


class Decoder(nnx.Module):
    """A causal stack between an embedding and a readout; `options` go to the stack."""

    def __init__(
        self,
        width: int,
        *,
        policy: Any = "float32",
        vocab: int = 11,
        layers: int = 2,
        context: int = 8,
        hidden: int | None = None,
        tied: bool = False,
        learned: bool = False,
        **options: Any,
    ) -> None:
        rngs = nnx.Rngs(0)
        options = {"use_bias": False, "max_length": context} | options
        self.embed = nn.Embed(vocab, width, policy=policy, rngs=rngs)
        self.positions = (
            nn.PositionalEmbed(context, width, policy=policy, rngs=rngs) if learned else None
        )
        options |= {"policy": policy, "rngs": rngs, "is_causal": True}
        self.stack = nn.TransformerStack(layers, width, 4, hidden or 2 * width, **options)
        self.norm = nn.RMSNorm(width, policy=policy)
        self.readout = None if tied else nn.Readout(width, vocab, policy=policy, rngs=rngs)

    def __call__(self, ids: jax.Array) -> Any:
        x = self.embed(ids)
        x = self.norm(self.stack(x if self.positions is None else self.positions(x)))
        return self.embed.attend(x) if self.readout is None else self.readout(x)

    def loss(self, ids: jax.Array, targets: jax.Array) -> jax.Array:
        return ops.softmax_cross_entropy(self(ids), targets)
