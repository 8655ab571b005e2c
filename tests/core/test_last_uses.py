"""Which variables an interpreter may forget, and when."""

import jax
import jax.numpy as jnp

from unitscale.core import last_uses


def test_every_variable_but_results_is_forgotten_once() -> None:
    def fn(x, unused):
        y = jnp.sin(x)
        z = y * x
        return z + 1, y

    jaxpr = jax.make_jaxpr(fn)(1.0, 2.0).jaxpr
    x, _ = jaxpr.invars
    sin, mul, _ = jaxpr.eqns
    assert last_uses(jaxpr) == {1: [x], 2: [mul.outvars[0]]}
    assert sin.outvars[0] is jaxpr.outvars[1]
