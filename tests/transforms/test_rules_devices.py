"""Programs of many devices: operands agree on a scale first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
COLLECTIVES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "psum": (lambda x: lax.psum(x, "d"), P()),
    "pmean": (lambda x: lax.pmean(x * 2, "d"), P()),
    "pmax": (lambda x: lax.pmax(x, "d"), P()),
    "ppermute": (lambda x: lax.ppermute(x, "d", [(0, 1), (1, 0)]), P("d")),
    "all_gather": (lambda x: jnp.sum(lax.all_gather(x, "d"), 0), P("d")),
    "reduce_scatter": (lambda x: lax.psum_scatter(x, "d", tiled=True), P("d")),
    "all_to_all": (lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True), P("d")),
    "index": (lambda x: x * (1 + lax.axis_index("d")), P("d")),
}


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_inside_shard_map(name: str, mesh: Mesh) -> None:
    function, out = COLLECTIVES[name]
    program = jax.shard_map(function, mesh=mesh, in_specs=P("d"), out_specs=out, check_vma=False)
    expected = program(X)
    for scale in (1.0, 2.0**12, 2.0**-12):
        actual = to_array(jax.jit(scalify(program))(ScaledArray(X / scale, jnp.float32(scale))))
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_a_float16_sum_over_devices_does_not_overflow(mesh: Mesh) -> None:
    x = as_scaled(jnp.full((2, 4), 60000.0), dtype=jnp.float16)
    program = jax.shard_map(
        lambda v: lax.psum(v * 2, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()
    )
    result = jax.jit(scalify(program))(x)
    assert result.dtype == jnp.float16
    np.testing.assert_allclose(result.value, 240000.0, rtol=1e-3)


SPREADING: dict[str, Callable[[Any], Any]] = {
    "where": lambda x: jnp.where(x > 1, 2 * x, 9.0),
    "where zero": lambda x: jnp.where(x > 1, x, 0.0),
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "layer norm": lambda x: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1),
    "scan from zeros": lambda x: lax.scan(lambda c, _: (c / 2 + x, 0), jnp.zeros_like(x), length=3)[
        0
    ],
    "gradient": jax.grad(lambda x: jnp.sum(jax.nn.softmax(jax.nn.relu(x)) ** 2)),
}


@pytest.mark.parametrize("name", SPREADING)
def test_shardings_that_are_part_of_the_type(name: str) -> None:
    program = jax.jit(SPREADING[name])
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        expected = program(x)
        for scale in (1.0, 2.0**12, 2.0**-12):
            actual = to_array(jax.jit(scalify(program))(ScaledArray(x / scale, jnp.float32(scale))))
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
            assert jax.typeof(actual).sharding == jax.typeof(expected).sharding
