"""Branches agree on the scale of each result."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify
from unitscale.transforms._interpreter import Interpreter

from .law import law
from .table_control import CONDS

test_value_and_gradient = law(CONDS)


@pytest.mark.parametrize("value", [1.0, -1.0])
def test_each_branch_leaves_with_its_own_scale(value: float) -> None:
    x = ScaledArray(jnp.full(4, value, jnp.float16), jnp.float32(1.0))
    result = scalify(lambda a: lax.cond(a[0] > 0, lambda b: b * 2**20, lambda b: b / 2**20, a))(x)
    assert float(result.scale) == (2.0**20 if value > 0 else 2.0**-20)
    np.testing.assert_array_equal(np.abs(result.data), 1)


def test_branches_in_branches_are_interpreted_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = [], Interpreter.run
    monkeypatch.setattr(Interpreter, "run", lambda *args: runs.append(1) or run(*args))

    def nested(depth: int, x: jax.Array) -> jax.Array:
        if depth == 0:
            return jnp.sin(x)
        inner = functools.partial(nested, depth - 1)
        return lax.cond(x[0] > depth, inner, lambda y: y * y + 1, x * 1.5)

    x, f = jnp.linspace(0.5, 2, 4), functools.partial(nested, 6)
    np.testing.assert_allclose(to_array(scalify(f)(as_scaled(x))), f(x), rtol=1e-6)
    assert len(runs) == 1 + 2 * 6
