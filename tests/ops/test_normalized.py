"""The primitive of norms: gradients by the kept statistics, and what is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import rules
from unitscale.ops._normalized import Affine, Normalize, Standardize, normalized

X = np.random.default_rng(0).normal(0.5, 2, (6, 8)).astype(np.float32)
X[2] = 3.0  # of no variance
DY = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)
MEAN, VAR = np.float32([X.mean(0), X.var(0) + 1])


def plain(x, scale, groups, centered, eps):
    """The formula, in values."""
    shape = x.shape
    x = (x * scale).reshape(6, groups, -1)
    x = x - x.mean(-1, keepdims=True) if centered else x
    return (x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps)).reshape(shape)


@pytest.mark.parametrize("centered", [True, False], ids=["mean", "rms"])
@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_gradient(centered, groups, scale, eps) -> None:
    how = Normalize(eps, centered, groups=groups)
    traced = None if scale is None else jnp.float32(scale)
    statistics = how.statistics(X, traced)
    y = how.apply(X, statistics)
    with jax.enable_x64(True):
        f = lambda x: plain(x, scale or 1.0, groups or 1, centered, eps)  # noqa: E731
        expected, vjp = jax.vjp(f, jnp.float64(X))
        (dx,) = vjp(jnp.float64(DY))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(how.gradient(DY, y, statistics), dx, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("scale", [None, 2.0])
def test_gradient_with_given_statistics(scale) -> None:
    how = Standardize(1e-3)
    statistics = how.statistics(X, scale, MEAN, VAR)
    _, vjp = jax.vjp(lambda x: how.apply(x, statistics), X)
    y = how.apply(X, statistics)
    np.testing.assert_allclose(how.gradient(DY, y, statistics), vjp(DY)[0], rtol=1e-6)


def test_statistics_are_computed_once_and_kept() -> None:
    """The backward takes no root; beside operands it has mean and inverse of each row."""
    factors = rules.norm(8, X.size)
    affine = Affine(np.float16(np.ones(8)), np.float16(np.zeros(8)))
    constants = None, Affine(), ()

    def norm(x, affine):
        return normalized(Normalize(1e-6, True), factors, x.dtype, x, affine, constants)

    x = jnp.bfloat16(X)
    y, vjp = jax.vjp(norm, x, affine)
    kept = sorted((leaf.dtype.name, leaf.size) for leaf in jax.tree.leaves(vjp))
    assert kept == [("bfloat16", 48), *[("float16", 8)] * 2, *[("float32", 6)] * 2]
    assert "rsqrt" not in str(jax.make_jaxpr(vjp)(y))


def test_a_second_derivative_knows_the_statistics_too() -> None:
    factors, constants = rules.norm(8, X.size), (None, Affine(), ())

    def own(x):
        return normalized(Normalize(0.5, True), factors, x.dtype, x, Affine(), constants)

    def twice(f):
        return jax.grad(lambda x: jnp.vdot(jax.grad(lambda x: jnp.vdot(f(x), DY))(x), DY))(X)

    expected = twice(lambda x: plain(x, 1.0, 1, True, 0.5))
    np.testing.assert_allclose(twice(own), expected, rtol=1e-4, atol=1e-4)
