"""Norms: gradients from the saved statistics, and what is saved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ops
from unitscale.core import ScaledArray

X = np.random.default_rng(0).normal(0.5, 2, (6, 8)).astype(np.float32)
X[2] = 3.0  # without variance
DY = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)
MEAN, VAR = np.float32([X.mean(0), X.var(0) + 1])


def plain(x, scale, groups, centered, eps):
    """The formula, in values."""
    shape = x.shape
    x = (x * scale).reshape(6, groups, -1)
    x = x - x.mean(-1, keepdims=True) if centered else x
    return (x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps)).reshape(shape)


NORMS = {
    "layer": (ops.layer_norm, 1, True),
    "rms": (ops.rms_norm, 1, False),
    "group": (functools.partial(ops.group_norm, num_groups=2), 2, True),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_gradient(name, scale, eps) -> None:
    norm, groups, centered = NORMS[name]
    y, own = jax.vjp(lambda x: norm(ScaledArray(x, scale), eps=eps).data, X)
    with jax.enable_x64(True):
        f = lambda x: plain(x, scale or 1.0, groups, centered, eps)  # noqa: E731
        expected, vjp = jax.vjp(f, jnp.float64(X))
        (dx,) = vjp(jnp.float64(DY))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(own(DY)[0], dx, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("scale", [None, 2.0])
def test_gradient_with_given_statistics(scale) -> None:
    def norm(x, gain, bias):
        statistics = MEAN, VAR
        return ops.batch_norm(ScaledArray(x, scale), gain, bias, statistics=statistics, eps=1e-3)

    def formula(x, gain, bias):
        return (x * (scale or 1.0) - MEAN) / jnp.sqrt(VAR + 1e-3) * gain + bias

    gain, bias = MEAN + 2, VAR - 3
    y, own = jax.vjp(lambda *args: norm(*args).data, X, gain, bias)
    expected, vjp = jax.vjp(formula, X, gain, bias)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    # Gradients of gain and bias are divided by the root of the rows.
    for found, wanted, rows in zip(own(DY), vjp(DY), (1, 6, 6), strict=True):
        np.testing.assert_allclose(found, wanted / rows**0.5, rtol=1e-4, atol=1e-5)


def test_statistics_are_computed_once_and_kept() -> None:
    """The backward takes no root; beside operands it has mean and inverse of each row."""
    x, ones = jnp.bfloat16(X), jnp.ones(8, jnp.float16)
    y, vjp = jax.vjp(lambda *args: ops.layer_norm(*args).data, x, ones, 0 * ones)
    kept = sorted((leaf.dtype.name, leaf.size) for leaf in jax.tree.leaves(vjp))
    assert kept == [("bfloat16", 48), *[("float16", 8)] * 2, *[("float32", 6)] * 2]
    assert "rsqrt" not in str(jax.make_jaxpr(vjp)(y))


def test_a_second_derivative_knows_the_statistics_too() -> None:
    def twice(f):
        return jax.grad(lambda x: jnp.vdot(jax.grad(lambda x: jnp.vdot(f(x), DY))(x), DY))(X)

    expected = twice(lambda x: plain(x, 1.0, 1, True, 0.5))
    found = twice(lambda x: ops.layer_norm(x, eps=0.5).data)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
