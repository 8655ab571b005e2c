"""The square root as a way to store what is not negative."""

import jax
import jax.numpy as jnp
import numpy as np

from unitscale.core import ScaledArray
from unitscale.optim import SquareRoot


def test_the_value_is_the_square_with_the_sign_of_the_root() -> None:
    stored = SquareRoot(ScaledArray(jnp.asarray([3.0, -0.5, 0.0], jnp.float8_e4m3fn), 2.0))
    np.testing.assert_array_equal(stored.value, [36.0, -1.0, 0.0])
    assert stored.value.dtype == jnp.float32
    assert (stored.shape, stored.nbytes) == ((3,), 3 + 4)


def test_a_tree_of_one_array() -> None:
    stored = SquareRoot(ScaledArray(jnp.ones((2, 3)), jnp.full((2, 1), 4.0)))
    ((path, data), _), structure = jax.tree_util.tree_flatten_with_path(stored)
    assert jax.tree_util.keystr(path) == ".root.data"
    again = jax.tree.unflatten(structure, [2 * data, stored.root.scale])
    np.testing.assert_array_equal(again.value, 4 * stored.value)
    items = jax.lax.scan(lambda c, x: (c, x.value), 0, stored)[1]
    np.testing.assert_array_equal(items, stored.value)
