"""A model with delayed scales, its steps, and what they see of the scales."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from unitscale import nn, quant
from unitscale.nn import DotGeneral
from unitscale.quant import Delayed, Dynamic, MatmulConfig

CONFIG = MatmulConfig(cotangent="e5m2", strategy=Delayed(history=4))
X = jax.random.normal(jax.random.key(0), (16, 8)) * 1000


class Net(nnx.Module):
    """A plain Flax model."""

    def __init__(self, config: MatmulConfig | None = CONFIG, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        dot = jax.lax.dot_general
        a, b = (dot if config is None else DotGeneral(config) for _ in range(2))
        self.first = nnx.Linear(8, 8, dot_general=a, rngs=rngs)
        self.second = nnx.Linear(8, 4, dot_general=b, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(jnp.tanh(self.first(x))))


def loss(model, x):
    return jnp.mean(jnp.square(model(x)))


# Compiled once for all tests of the same structure of model.
STEP = nnx.jit(nn.value_and_grad(loss))
ACCUMULATE = nnx.jit(nn.value_and_grad(loss, advance=False))
# It does not move the scales, and says so: `tests/quant/test_state.py`.
PLAIN = nnx.jit(nnx.value_and_grad(loss))


def states(model) -> dict[str, quant.QuantState]:
    return {path: v.get_value() for path, v in nn.amax_states(model)}


def scales(model) -> dict[str, list[float]]:
    return {path: np.ravel(s.scale).tolist() for path, s in states(model).items()}


def same(a, b) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        np.array_equal(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
            jax.random.key_data(y) if jnp.issubdtype(y.dtype, jax.dtypes.prng_key) else y,
        )
        for x, y in leaves
    )


def scale_of(x, dtype: str = "e4m3fn") -> float:
    return float(quant.quantize(x, dtype, Dynamic()).scale)
