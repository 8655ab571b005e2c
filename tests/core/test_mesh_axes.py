"""Where an array lies, by the names of a mesh's axes that are left to the compiler."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.parallel.devices import explicit_mesh, mesh_of
from unitscale.core import BATCH_AXES, CONTEXT_AXES, axes_size, constrain_sharding

X = np.arange(8 * 4 * 6, dtype=np.float32).reshape(8, 4, 6)


def primitives(f: Any, *args: Any) -> list[str]:
    return [equation.primitive.name for equation in jax.make_jaxpr(f)(*args).eqns]


@pytest.mark.parametrize(
    ("axes", "dimensions", "spec"),
    [
        ({"data": 4}, (BATCH_AXES,), P("data")),
        ({"data": 2, "fsdp": 2}, (BATCH_AXES,), P(("fsdp", "data"))),
        ({"fsdp": 2, "context": 2}, (BATCH_AXES, CONTEXT_AXES), P("fsdp", "context")),
        ({"fsdp": 2, "tensor": 2}, (BATCH_AXES, CONTEXT_AXES), P("fsdp")),
        ({"data": 2, "context": 2}, (None, ("context",)), P(None, "context")),
        ({"context": 8}, (BATCH_AXES, CONTEXT_AXES), None),  # 8 does not divide 4
        ({"tensor": 2}, (BATCH_AXES,), None),
        ({"tensor": 2}, ((),), P(None)),
        ({"data": 1}, (BATCH_AXES,), None),
    ],
    ids=str,
)
def test_dimensions_lie_over_the_axes_that_divide_them(axes: Any, dimensions: Any, spec: Any):
    mesh = mesh_of(**axes)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P()))
        y = jax.jit(lambda x: constrain_sharding(x, *dimensions) + 0)(x)
        asked = primitives(lambda x: constrain_sharding(x, *dimensions), x)
    np.testing.assert_array_equal(y, X)
    assert asked == ([] if spec is None else ["sharding_constraint"])
    if spec is not None:
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)


def test_a_dimension_may_be_whole() -> None:
    mesh = mesh_of(data=2, context=2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data", "context")))
        y = jax.jit(lambda x: constrain_sharding(x, BATCH_AXES, (), CONTEXT_AXES) + 0)(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None, "context")), 3)


def test_the_gradient_lies_there_too() -> None:
    mesh = mesh_of(data=4)
    with jax.set_mesh(mesh):
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(constrain_sharding(x, BATCH_AXES))))
        found = primitives(gradient, X)
        value = jax.jit(gradient)(X)
    assert found.count("sharding_constraint") == 2
    np.testing.assert_allclose(value, np.cos(X), rtol=1e-6, atol=1e-6)


def test_mapped_functions() -> None:
    """Under vmap the mapped dimension is left to the compiler; manual axes divide already."""
    mesh = mesh_of(data=2, fsdp=2)
    with jax.set_mesh(mesh):
        each = jax.jit(jax.vmap(lambda x: constrain_sharding(x, ("data",)) * 2))(X)
        local = jax.jit(
            jax.shard_map(
                lambda x: constrain_sharding(x, BATCH_AXES) * axes_size(BATCH_AXES),
                in_specs=P("fsdp"),
                out_specs=P("fsdp"),
                axis_names={"fsdp"},
            )
        )(X)
    np.testing.assert_array_equal(each, 2 * X)
    np.testing.assert_array_equal(local, 2 * X)


@pytest.mark.parametrize("explicit", [False, True])
def test_what_is_left_alone(explicit: bool) -> None:
    assert constrain_sharding(jnp.asarray(X), BATCH_AXES) is not None
    assert primitives(lambda x: constrain_sharding(x, BATCH_AXES), X) == []
    mesh = (explicit_mesh if explicit else mesh_of)(data=2)
    with jax.set_mesh(mesh):
        x = jnp.asarray(X)
        assert constrain_sharding(x, BATCH_AXES) is x  # not traced
        assert axes_size(BATCH_AXES) == (1 if explicit else 2)
        if explicit:
            assert primitives(lambda x: constrain_sharding(x, BATCH_AXES), x) == []


def test_a_dimension_that_is_not_named_stays_where_it_lies() -> None:
    mesh = mesh_of(data=2, context=2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        y = jax.jit(lambda x: constrain_sharding(x, None, ("context",)) + 0)(x)
    assert y.sharding.spec == P("data", "context")
