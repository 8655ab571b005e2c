import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.table import parameters
from unitscale import nn, rules
from unitscale.core import ScaledArray


def test_the_weighted_sum() -> None:
    branch = nn.Dense(8, 8, rngs=nnx.Rngs(0))
    layer = nn.Residual(branch, tau=0.75)
    x = jax.random.normal(jax.random.key(0), (3, 8))
    np.testing.assert_allclose(layer(x).value, 0.6 * branch(x).value + 0.8 * x, atol=1e-6)


def test_the_gradients_of_the_branch_are_unit_whatever_its_weight() -> None:
    x, dy = jax.random.normal(jax.random.key(0), (2, 64, 32))

    def kernel_gradient(tau):
        branch = nn.Dense(32, 32, use_bias=False, rngs=nnx.Rngs(0))
        graphdef, params = nnx.split(nn.Residual(branch, tau=tau))
        (g,) = jax.vjp(lambda p: nnx.merge(graphdef, p)(x).data, params)[1](dy)
        return jax.tree.leaves(g)[0]

    small, large = kernel_gradient(1e-3), kernel_gradient(10.0)
    np.testing.assert_array_equal(small, large)
    assert abs(float(jnp.mean(small**2)) - 1) < 5 * (2 / small.size) ** 0.5


def test_the_input_gradient_is_the_true_one() -> None:
    kernel = jax.random.normal(jax.random.key(1), (8, 8))
    layer = nn.Residual(lambda h: ScaledArray(h.value @ kernel, 1), tau=0.3)
    x, dy = jax.random.normal(jax.random.key(0), (2, 3, 8))
    (dx,) = jax.vjp(lambda x: layer(x).value, x)[1](dy)
    weights = rules.residual(0.3)
    np.testing.assert_allclose(
        dx, weights.branch * dy @ kernel.T + weights.skip * dy, rtol=1e-4, atol=1e-5
    )


def test_unit_scale(assert_rms) -> None:
    assert_rms(lambda rngs: nn.Residual(nn.Dense(32, 32, rngs=rngs), tau=0.7), (32, 32))


def test_depth_is_recorded_on_the_branch() -> None:
    layer = nn.Residual(nn.MLP(4, 8, rngs=nnx.Rngs(0)), tau=1.0, depth=10)
    assert {p.depth for p in parameters(layer).values()} == {10}


def test_further_arguments_go_to_the_branch() -> None:
    layer = nn.Residual(nn.MLP(4, 8, dropout_rate=0.5, rngs=nnx.Rngs(0)), tau=1.0)
    x = jnp.ones((2, 4))
    once, again = (layer(x, deterministic=True).value for _ in range(2))
    np.testing.assert_array_equal(once, again)


def test_the_stream_keeps_its_dtype() -> None:
    layer = nn.Residual(nn.Dense(4, 4, policy="float16", rngs=nnx.Rngs(0)), tau=1.0)
    assert layer(jnp.ones((2, 4))).dtype == jnp.float32


def test_errors() -> None:
    branch = nn.Dense(4, 5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="tau must be positive and finite; got 0"):
        nn.Residual(branch, tau=0)
    with pytest.raises(ValueError, match=r"branch and skip must have the same shape.*\(2, 5\)"):
        nn.Residual(branch, tau=1.0)(jnp.ones((2, 4)))
