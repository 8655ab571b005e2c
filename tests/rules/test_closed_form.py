import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import rules

A, B = np.zeros((4, 16), np.float32), np.zeros((16, 8), np.float32)


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (jnp.matmul, [A, B], rules.matmul(4, 16, 8, constraint=None)),
        (jax.nn.softmax, [A], rules.softmax(16, constraint=None)),
        (jnp.add, [A, A], rules.add(constraint=None)),
        (jax.nn.gelu, [A], rules.elementwise(jax.nn.gelu, constraint=None)),
        (jax.nn.relu, [A], rules.elementwise(jax.nn.relu, constraint=None)),
        (lambda x: jnp.sin(x) + 1, [A], rules.elementwise(jnp.sin, constraint=None)),
        (lambda x: jnp.where(x > 0, x, 0), [A], rules.elementwise(jax.nn.relu, constraint=None)),
        (lambda x: jnp.ones_like(x) - x, [A], rules.elementwise(jnp.negative, constraint=None)),
    ],
)
def test_known(fn, args, expected) -> None:
    found = rules.closed_form(fn, args)
    assert found is not None
    np.testing.assert_allclose([found.fwd, *found.bwd], [expected.fwd, *expected.bwd], rtol=1e-5)


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


# Only its slope knows the shape.
sine.defjvp(lambda xs, changes: (sine(*xs), changes[0] * jnp.cos(xs[0]) / xs[0].size))


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (jnp.matmul, [np.zeros((2, 3, 4)), np.zeros((4, 2))]),
        (jnp.add, [A, A[:1]]),
        (lambda x: x - jnp.mean(x), [A]),
        (lambda x: x[::-1], [A]),
        (lambda x: x * np.arange(16.0), [A]),
        (lambda x: x.T, [A]),
        (lambda x: jnp.cumsum(x, axis=0), [A]),
        (lambda x: jnp.exp(jnp.exp(x)), [A]),
        (lambda x: x + 1, [np.arange(3)]),
        (lambda x: x / x.size, [A]),
        (lambda x: x * x.shape[-1] ** -0.5, [A]),
        (lambda x: x / (1 + x.ndim), [A]),
        (lambda x: x ** (1 + 2 * x.ndim), [A]),
        (lambda x: jnp.sin(x) if x.ndim else jnp.cos(x), [A]),
        (sine, [A]),
        (lambda x: x * (2.0 if x.shape == A.shape else 1.0), [A]),
        (jnp.matmul, [np.ones((4, 16), int), B]),
        (jnp.add, [A, np.ones_like(A, int)]),
        (jax.nn.softmax, [np.ones_like(A, int)]),
    ],
)
def test_unknown(fn, args) -> None:
    assert rules.closed_form(fn, args) is None


@pytest.mark.parametrize("outer", [np.float32(2), jnp.asarray(2.0)])
def test_numbers_from_outside_are_those_of_the_function(outer) -> None:
    found = rules.closed_form(lambda x: outer * jax.jit(lambda y: outer * y)(x), [A])
    assert found is not None
    np.testing.assert_allclose([found.fwd, *found.bwd], [0.25, 0.25], rtol=1e-5)
