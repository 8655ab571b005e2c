"""Factors of a function are known wherever an op of it is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from unitscale import rules
from unitscale.rules._elementwise import compile_time, correlation_kernel

# By itself each of these calls evaluates a function on arrays.
EVALUATE = {
    "sum": lambda f: float(jnp.sum(f(jnp.arange(3.0)))),
    "elementwise": lambda f: rules.elementwise(f).fwd,
    "simulate": lambda f: rules.simulate(f, [jnp.zeros(8)], seeds=2).factors.fwd,
    "correlation_kernel": lambda f: correlation_kernel(f)[1],
}


@pytest.mark.parametrize("name", EVALUATE)
def test_inside_of_shard_map_over_some_axes(name) -> None:
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((2, 2), ("data", "expert"), (AxisType.Auto,) * 2, devices=devices)

    def number() -> float:
        def f(x):  # another function in each trace, which nothing remembers
            return jnp.sin(x) ** 3

        if name == "sum":
            with compile_time():
                return EVALUATE[name](f)
        return EVALUATE[name](f)

    traced = jax.shard_map(
        lambda x: x * number(), in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    with jax.set_mesh(mesh):
        found = jax.jit(traced)(jnp.ones(4))
    np.testing.assert_allclose(found, number(), rtol=1e-6)
