"""Calls of inner programs, and transformations inside and outside."""

import jax
import jax.numpy as jnp
import numpy as np

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify

from .law import law
from .table_control import CALLS

test_value_and_gradient = law(CALLS)


def test_jit_keeps_its_name_and_donation() -> None:
    def named(x: jax.Array) -> jax.Array:
        return x * 2 + 1

    x = ScaledArray(jnp.ones(3), jnp.float32(2.0))
    inner = jax.jit(named, donate_argnums=0)
    equations = jax.make_jaxpr(scalify(lambda a: inner(a)))(x).eqns
    (call,) = [e for e in equations if e.primitive.name == "jit"]
    assert call.params["name"] == "named"
    assert call.params["donated_invars"][0]


def test_vmap_outside_gives_every_item_a_scale() -> None:
    x = ScaledArray(jnp.ones((2, 3)), jnp.asarray([1.0, 4.0]).reshape(2, 1))
    items = jax.vmap(lambda d, s: scalify(lambda a: a * a)(ScaledArray(d, s[0])))(x.data, x.scale)
    np.testing.assert_array_equal(to_array(items), np.square(x.value))
    assert items.scale.size == 2


def test_an_inner_program_is_scaled_once() -> None:
    calls = []

    @jax.jit
    def layer(x: jax.Array) -> jax.Array:
        calls.append(1)
        return jnp.tanh(x)

    scalify(lambda x: layer(layer(layer(x))))(as_scaled(jnp.ones(3)))
    assert len(calls) == 1
