"""Functions with a derivative of the user's own."""

import jax
import jax.numpy as jnp
import numpy as np

from unitscale import ScaledArray, to_array
from unitscale.transforms import scalify

from .law import law
from .table_control import CUSTOM, clipped_gradient, steep

test_value_and_gradient = law(CUSTOM)


def test_the_users_rule_is_used_outside_too() -> None:
    """Differentiated outside of scalify, with respect to data: the scales are constants."""
    x = ScaledArray(jnp.asarray([0.3, 2.0]), jnp.float32(4.0))

    def outside(data: jax.Array) -> jax.Array:
        return jnp.sum(to_array(scalify(clipped_gradient)(ScaledArray(data, x.scale))))

    expected = 4.0 * jax.grad(lambda v: jnp.sum(clipped_gradient(v)))(x.value)
    np.testing.assert_allclose(jax.grad(outside)(x.data), expected, rtol=1e-6)

    def tangent(data: jax.Array) -> jax.Array:
        return to_array(scalify(steep)(ScaledArray(data, x.scale)))

    _, slope = jax.jvp(tangent, (x.data,), (jnp.ones(2),))
    np.testing.assert_allclose(slope, 12.0, rtol=1e-6)
