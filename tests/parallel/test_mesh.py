"""Meshes, and the sharding of batches and parameters."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.parallel.devices import mesh_of
from unitscale.core import as_scaled
from unitscale.parallel import batch_axes, make_mesh, param_shardings, shard_batch
from unitscale.quant import Block, quantize


def test_mesh_over_all_devices() -> None:
    count = len(jax.devices())
    mesh = make_mesh({"data": count // 2, "tensor": 2})
    assert dict(mesh.shape) == {"data": count // 2, "tensor": 2}
    assert {d.id for d in mesh.devices.flat} == {d.id for d in jax.devices()}
    for axes in ({}, {"data": 0}, {"data": -1}, {"data": 2.0}, {"data": 4, "fsdp": 3}):
        with pytest.raises(ValueError, match=r"ax[ei]s"):
            make_mesh(axes, devices=jax.devices()[:8])


def test_batches() -> None:
    batch = {"x": np.arange(24.0).reshape(8, 3), "y": np.arange(8)}
    for axes, names in (
        ({"data": 2, "fsdp": 2, "tensor": 2}, ("fsdp", "data")),
        ({"fsdp": 4}, ("fsdp",)),
        ({"tensor": 2}, ()),
    ):
        mesh = mesh_of(**axes)
        assert batch_axes(mesh) == names
        ways = math.prod(axes[n] for n in names)
        for name, x in shard_batch(batch, mesh).items():
            np.testing.assert_array_equal(x, batch[name])
            assert {s.data.shape[0] for s in x.addressable_shards} == {8 // ways}
    for shape in ((6, 2), ()):
        with pytest.raises(ValueError, match="divisible by the 4 devices of fsdp and data"):
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


def test_parameters() -> None:
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    for shape, spec in SHAPES:
        assert param_shardings(jnp.zeros(shape), mesh).spec == spec, shape
    assert param_shardings(jnp.zeros((32, 64)), mesh_of(fsdp=4)).spec == P(None, "fsdp")
    assert param_shardings(jnp.zeros((32, 64)), mesh_of(data=4)).spec == P(None, None)


def test_the_second_matrix_of_a_block_is_cut_along_its_inputs() -> None:
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    block = {"up": jnp.zeros((64, 128)), "down": jnp.zeros((128, 64)), "bias": jnp.zeros(2048)}
    kernel = as_scaled(jnp.zeros((3, 64, 64)), scale=2.0)
    params = [{"mlp": block, "attention": {"out": {"kernel": kernel}}}]
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): sharding.spec
        for path, sharding in jax.tree_util.tree_leaves_with_path(
            param_shardings({"mu": params}, mesh)
        )
    }
    assert found == {
        "mu.0.mlp.up": P("fsdp", "tensor"),
        "mu.0.mlp.down": P("tensor", "fsdp"),
        "mu.0.mlp.bias": P(None),
        "mu.0.attention.out.kernel.data": P(None, "tensor", "fsdp"),
        "mu.0.attention.out.kernel.scale": P(),
    }
    named = param_shardings(block, mesh, rows={"up"})
    assert named["up"].spec == P("tensor", "fsdp")
    assert named["down"].spec == P("fsdp", "tensor")


def test_experts_are_divided_among_devices() -> None:
    layer = {"up": {"kernel": jnp.zeros((4, 64, 128)), "bias": jnp.zeros((4, 512))}}
    params = {"experts": layer, "down": {"kernel": jnp.zeros((4, 64, 128))}}
    found = param_shardings(params, mesh_of(expert=2, tensor=2, fsdp=2))
    assert found["experts"]["up"]["kernel"].spec == P("expert", "fsdp", "tensor")
    assert found["experts"]["up"]["bias"].spec == P("expert", None)
    assert found["down"]["kernel"].spec == P(None, "tensor", "fsdp")
    mesh = mesh_of(expert=4)
    for params, spec in (
        ({"experts": jnp.zeros((3, 4, 64, 128))}, P(None, "expert", None, None)),  # of a scan
        ({"experts": {"bias": jnp.zeros((3, 4, 512))}}, P(None, "expert", None)),
        ({"experts": jnp.zeros((3, 64, 128))}, P(None, None, None)),
    ):
        assert [x.spec for x in jax.tree.leaves(param_shardings(params, mesh))] == [spec]
    own = param_shardings({"moe": jnp.zeros((4, 64, 128))}, mesh, experts={"moe"})
    assert own["moe"].spec == P("expert", None, None)


@pytest.mark.slow
def test_scales_are_cut_as_their_data() -> None:
    x = jnp.ones((64, 256))
    blocks = quantize(x, "float8_e4m3fn", Block(32, 2))
    one, each = as_scaled(x), as_scaled(x, scale=jnp.ones((64, 1)))
    mesh = mesh_of(fsdp=4)
    for scaled, data, scale in (
        (blocks, P(None, "fsdp"), P(None, "fsdp")),
        (quantize(x, "float8_e4m3fn", Block(128)), P(None, "fsdp"), P(None, None)),
        (one, P(None, "fsdp"), P()),
        (each, P(None, "fsdp"), P(None, None)),
    ):
        found = param_shardings({"w": scaled}, mesh)
        assert jax.tree.structure(found) == jax.tree.structure({"w": scaled})
        assert [x.spec for x in jax.tree.leaves(found)] == [data, scale]
        placed = jax.device_put(scaled, found["w"])
        np.testing.assert_array_equal(placed.value, scaled.value)
