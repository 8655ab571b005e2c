"""The layout of gradients: set on one device, left alone where arrays are sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.optimizers import scaled

X = np.arange(64.0, dtype=np.float32).reshape(8, 8)
TX = scaled(optax.sgd(1.0), weights=None)


def update(grads: jax.Array) -> jax.Array:
    return TX.update(grads, TX.init(X), X)[0]


def test_one_device_has_the_constraint() -> None:
    lowered = jax.jit(lambda x: update(x @ x.T)).lower(jnp.asarray(X))
    assert "LayoutConstraint" in lowered.as_text()


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_sharded_arrays_are_not_gathered() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    program = jax.jit(lambda x: update(2 * x), out_shardings=sharding)
    compiled = program.lower(jax.device_put(X, sharding)).compile().as_text() or ""
    assert "all-gather" not in compiled


def test_it_is_the_identity_under_every_transformation() -> None:
    np.testing.assert_array_equal(update(X), -X)
    np.testing.assert_array_equal(jax.vmap(jax.jit(update), 1, 1)(np.stack([X, X], 1))[:, 0], -X)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(update(x) * X))(X), -X)
