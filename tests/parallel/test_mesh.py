"""Meshes, and where batches and parameters lie on them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.parallel.devices import mesh_of
from unitscale.core import amax, as_scaled, rescale
from unitscale.parallel import batch_axes, make_mesh, param_shardings, shard_batch


def test_mesh_over_all_devices() -> None:
    count = len(jax.devices())
    mesh = make_mesh({"data": count // 2, "tensor": 2})
    assert dict(mesh.shape) == {"data": count // 2, "tensor": 2}
    assert {d.id for d in mesh.devices.flat} == {d.id for d in jax.devices()}


def test_wrong_number_of_devices() -> None:
    with pytest.raises(
        ValueError, match=r"got data 4 x fsdp 3 = 12 and 8 devices\. Change an axis"
    ):
        make_mesh({"data": 4, "fsdp": 3}, devices=jax.devices()[:8])


@pytest.mark.parametrize("axes", [{}, {"data": 0}, {"data": -1}, {"data": 2.0}])
def test_wrong_sizes(axes: dict) -> None:
    with pytest.raises(ValueError, match="each axis a positive number of devices"):
        make_mesh(axes)


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, ("fsdp", "data")),
        ({"fsdp": 4}, ("fsdp",)),
        ({"tensor": 2}, ()),
    ],
)
def test_batches(axes: dict[str, int], names: tuple[str, ...]) -> None:
    mesh = mesh_of(**axes)
    assert batch_axes(mesh) == names
    batch = {"x": np.arange(24.0).reshape(8, 3), "y": np.arange(8)}
    placed = shard_batch(batch, mesh)
    ways = math.prod(axes[n] for n in names)
    for name, x in placed.items():
        np.testing.assert_array_equal(x, batch[name])
        assert {s.data.shape[0] for s in x.addressable_shards} == {8 // ways}


@pytest.mark.parametrize("shape", [(6, 2), ()])
def test_batches_that_cannot_be_divided(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be divisible by the 4 devices of fsdp and data"):
        shard_batch(np.zeros(shape), mesh_of(data=2, fsdp=2))


SHAPES = [
    ((64, 32), P("fsdp", "tensor")),
    ((64, 33), P("fsdp", None)),
    ((33, 64), P(None, "tensor")),
    ((33, 35), P(None, None)),
    ((12, 64, 32), P(None, "fsdp", "tensor")),
    ((4096,), P(None)),
    ((8, 8), P(None, None)),
    ((), P()),
]


@pytest.mark.parametrize(("shape", "spec"), SHAPES)
def test_parameters(shape: tuple[int, ...], spec: P) -> None:
    sharding = param_shardings(jnp.zeros(shape), mesh_of(data=2, fsdp=2, tensor=2))
    assert sharding.spec == spec


def test_parameters_without_tensor_axis() -> None:
    assert param_shardings(jnp.zeros((32, 64)), mesh_of(fsdp=4)).spec == P(None, "fsdp")
    assert param_shardings(jnp.zeros((32, 64)), mesh_of(data=4)).spec == P(None, None)


def test_amax_of_a_sharded_array_is_that_of_the_whole() -> None:
    """The largest entry lies on one device alone; its scale is that of all, ScaledArrays too."""
    mesh = mesh_of(fsdp=2, tensor=2)
    x = np.full((64, 32), 0.5, np.float32)
    x[3, 5] = 100.0
    scaled = as_scaled(jnp.asarray(x), scale=2.0)
    placed = jax.device_put(scaled, param_shardings(scaled, mesh))
    assert placed.data.sharding.spec == P("fsdp", "tensor")
    assert float(jax.jit(amax)(placed.value)) == 100
    rescaled = jax.jit(lambda x: rescale(x, "amax", dtype="float8_e4m3fn"))(placed)
    assert float(rescaled.scale) == 0.25  # 100 / 0.25 is 400, 100 / 0.125 above 448
    np.testing.assert_array_equal(rescaled.value, x)
