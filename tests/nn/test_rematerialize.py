"""The same results and gradients, from arguments alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ops
from unitscale.core import ScaledArray, batch_over
from unitscale.nn._mlp import rematerialize

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


def saved(f: Callable[..., Any], *args: Any) -> list[Any]:
    """The arrays that the backward of f holds."""
    return jax.tree.leaves(jax.vjp(f, *args)[1])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "re"])
def test_results_and_gradients(wrap: Any) -> None:
    weight = jnp.arange(4.0)

    def plain(weight, x, tree):
        y = jnp.sin(x) @ weight + tree["a"].value.sum()
        return {"y": y, "count": tree["count"] + 1}

    tree = {"a": ScaledArray(X[0], 4.0), "count": jnp.int32(2)}

    def loss(weight, x, a, again):
        f = rematerialize if again else (lambda f: f)
        return wrap(f(lambda x, t: plain(weight, x, t)))(x, tree | {"a": a})["y"].sum()

    grads = [jax.grad(loss, (0, 1, 2))(weight, X, tree["a"], again) for again in (True, False)]
    jax.tree.map(np.testing.assert_array_equal, *grads)
    np.testing.assert_array_equal(grads[0][0], np.sin(X).sum(0))
    assert rematerialize(plain)(weight, X, tree)["count"] == 3


def test_under_vmap_and_scan() -> None:
    """Data over a leading axis, and a loop, whose backward is a loop of its own."""

    def f(x):
        return rematerialize(lambda x: jnp.exp(jnp.sin(x)))(x)

    expected = jax.grad(lambda x: jnp.exp(jnp.sin(x)).sum())(X)
    each = jax.vmap(jax.grad(lambda x: f(x).sum()))(X)
    np.testing.assert_allclose(each, expected, rtol=1e-6)
    rows = jax.grad(lambda x: jax.lax.scan(lambda c, row: (c + f(row).sum(), None), 0.0, x)[0])(X)
    np.testing.assert_allclose(rows, expected, rtol=1e-6)


def test_arguments_alone_are_saved() -> None:
    def f(x):
        return jnp.sin(jnp.exp(x))

    (own,) = saved(rematerialize(f), X)
    np.testing.assert_array_equal(own, X)
    assert len(saved(f, X)) > 1


def test_what_is_known_while_tracing_stays_known() -> None:
    """The backward is traced after the parts of a batch were told, and has their factors."""

    def gradient(f: Callable[..., Any]) -> jax.Array:
        def part(w, x):
            with batch_over("parts"):
                y, pull = jax.vjp(f(lambda w, x: ops.dense(x, w).value), w, x)
            return pull(jnp.ones_like(y))[0]

        return jax.vmap(part, (None, 0), axis_name="parts")(jnp.ones((4, 2)), X[:, None])

    np.testing.assert_array_equal(gradient(rematerialize), gradient(lambda f: f))


def test_forward_mode_is_explained() -> None:
    with pytest.raises(TypeError, match="rematerialized defines its backward pass only"):
        jax.jvp(rematerialize(jnp.sin), (1.0,), (1.0,))
