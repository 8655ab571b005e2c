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
    ],
)
def test_known(fn, args, expected) -> None:
    found = rules.closed_form(fn, args)
    assert found is not None
    np.testing.assert_allclose([found.fwd, *found.bwd], [expected.fwd, *expected.bwd], rtol=1e-5)


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
    ],
)
def test_unknown(fn, args) -> None:
    assert rules.closed_form(fn, args) is None
