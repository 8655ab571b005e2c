"""Operations of a program, counted in its jaxpr."""

import jax
import jax.numpy as jnp

from recipes.bench._operations import operations


def test_operations_are_counted_through_calls_and_by_shape() -> None:
    def program(x: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, y: (c + y * n, None), x[0], jax.jit(jnp.tanh)(x))[0]

    # In the loop a product and a sum, of scalars; outside a tanh, and x[0], in two steps or more.
    found = operations(program, jnp.ones(3), jnp.float32(2))
    assert found.scalars == 2
    assert found.arrays >= 3
