"""Attention over tokens that a mesh divides is that of one device, by some heads on each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from recipes.bench.wire import collectives
from tests.parallel.devices import mesh_of
from unitscale import ops
from unitscale.ops._attention import move_shards
from unitscale.ops._attention_path import tracing, whole_heads

TIME, HEADS, SIZE = 16, 4, 8


def operands(kv_heads: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    counts = (HEADS, kv_heads, kv_heads)
    return [jax.random.normal(key, (4, TIME, n, SIZE)) for key, n in zip(keys, counts, strict=True)]


def gradients(implementation: Any, *args: jax.Array) -> Any:
    def loss(*args: jax.Array) -> Any:
        y = ops.dot_product_attention(*args, is_causal=True, implementation=implementation).value
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*args)


@pytest.mark.parametrize("implementation", ["plain", "chunked"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "axes", [{"context": 4}, {"data": 2, "context": 2}, {"context": 2, "tensor": 2}], ids=str
)
def test_value_and_gradients_are_those_of_one_device(
    axes: dict[str, int], kv_heads: int, implementation: str
) -> None:
    args = operands(kv_heads)
    expected = gradients(implementation, *args)
    mesh = mesh_of(**axes)
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, P("data" if "data" in axes else None, "context"))
        found = gradients(implementation, *(jax.device_put(x, place) for x in args))
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)


def test_heads_are_moved_where_devices_divide_them() -> None:
    assert whole_heads(8, 8) is None
    with jax.set_mesh(mesh_of(data=4)):
        assert whole_heads(8, 8) is None
    mesh = mesh_of(context=2, tensor=2)
    with jax.set_mesh(mesh):
        assert [whole_heads(8, n) for n in (8, 4, 2)] == [True, True, False]
        x = jax.device_put(jnp.ones((2, 8, 4, 3)), NamedSharding(mesh, P(None, "context")))
        y = jax.jit(lambda x: move_shards(x, True) + 0)(x)
        back = jax.jit(lambda y: move_shards(y, False) + 0)(y)
        found = collectives(
            jax.jit(lambda x: move_shards(move_shards(x, True) + 1, False)).lower(x).compile()
        )
    heads = NamedSharding(mesh, P(None, None, ("tensor", "context")))
    assert y.sharding.is_equivalent_to(heads, 4)
    assert back.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "context", "tensor")), 4)
    assert {c.kind for c in found} == {"all-to-all"}


def test_the_kernel_is_not_taken_for_parts_of_a_head() -> None:
    shape = (2, 64, 6, 64)
    with tracing(target="gpu"), jax.set_mesh(mesh_of(context=4)):
        path = ops.attention_path(shape, shape, jnp.bfloat16, is_causal=True)
        assert path.implementation != "cudnn"
        assert "context and tensor do not divide 6 heads" in path.reason
        with pytest.raises(ValueError, match="do not divide 6 heads and 6 of keys"):
            ops.attention_path(shape, shape, jnp.bfloat16, implementation="cudnn")
