"""What differs between versions of JAX, read from a traced program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from unitscale.core._compat import scan_counts


@pytest.mark.parametrize("carried", [0, 1, 3])
def test_a_scan_has_constants_then_what_it_carries(carried: int) -> None:
    def program(first: jax.Array, second: jax.Array, items: jax.Array) -> tuple:
        def turn(state: tuple, item: jax.Array) -> tuple:
            return tuple(x + first for x in state), item * second

        return lax.scan(turn, (jnp.ones(2),) * carried, items)

    closed = jax.make_jaxpr(program)(jnp.ones(2), jnp.ones(2), jnp.ones((4, 2)))
    (loop,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan")
    assert scan_counts(loop.params) == (1 + bool(carried), carried)
