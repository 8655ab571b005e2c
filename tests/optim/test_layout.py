"""The layout of gradients: set on one device, left alone where arrays are sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from unitscale.optim._layout import row_major

X = np.arange(64.0, dtype=np.float32).reshape(8, 8)


def text(*args: jax.Array) -> tuple[str, str]:
    lowered = jax.jit(lambda x: row_major(x @ x.T) + 1).lower(*args)
    return lowered.as_text(), lowered.compile().as_text() or ""


def test_one_device_has_the_constraint() -> None:
    assert "LayoutConstraint" in text(jnp.asarray(X))[0]


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_sharded_arrays_are_not_gathered() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    program = jax.jit(lambda x: row_major(2 * x), out_shardings=sharding)
    compiled = program.lower(jax.device_put(X, sharding)).compile().as_text() or ""
    assert "all-gather" not in compiled


def test_it_is_the_identity_under_every_transformation() -> None:
    np.testing.assert_array_equal(row_major(X), X)
    np.testing.assert_array_equal(jax.vmap(jax.jit(row_major), 1, 1)(X), X)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(row_major(x) * X))(X), X)
    assert jax.make_jaxpr(row_major)(X).out_avals[0].shape == X.shape
