"""Which layers a model has, and the shapes of their products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from unitscale.nn import convert, restore
from unitscale.nn._convert import (
    Hook,
    features_of,
    hook_of,
    kernel_rank,
    layers_of,
)
from unitscale.quant import Delayed, MatmulConfig

RNGS = nnx.Rngs(0)


class Nested(nnx.Module):
    def __init__(self) -> None:
        layer = nnx.Linear(4, 4, rngs=RNGS)
        self.z = nnx.List([layer, *(nnx.Linear(4, 4, rngs=RNGS) for _ in range(11))])
        self.a = nnx.Dict(deep=nnx.Dict(conv=nnx.Conv(4, 4, (1,), rngs=RNGS)), again=layer)
        self.norm = nnx.LayerNorm(4, rngs=RNGS)


@pytest.mark.parametrize("merged", [False, True])
def test_layers_have_one_order(merged: bool) -> None:
    model = Nested()
    model = nnx.merge(*nnx.split(model)) if merged else model
    paths = [path for path, _ in layers_of(model)]
    # The layer that is in two places is found in the first.
    assert paths == ["a.again", "a.deep.conv", *(f"z.{i}" for i in range(1, 12))]


def test_a_layer_alone_has_no_path() -> None:
    assert [path for path, _ in layers_of(nnx.Linear(4, 4, rngs=RNGS))] == [""]
    assert list(layers_of(nnx.LayerNorm(4, rngs=RNGS))) == []


@pytest.mark.parametrize(
    ("layer", "features", "rank"),
    [
        (nnx.Linear(8, 16, rngs=RNGS), (8, 16), 2),
        (nnx.LinearGeneral((2, 4), (3, 5), axis=(-2, -1), rngs=RNGS), (8, 15), 4),
        (nnx.LinearGeneral(8, 5, axis=2, batch_axis={0: 3}, rngs=RNGS), (8, 5), 3),
        (nnx.Einsum("btk,khd->bthd", (8, 2, 5), rngs=RNGS), (8, 10), 3),
        (nnx.Einsum("...hd,hdk->...k", (2, 5, 8), rngs=RNGS), (10, 8), 3),
        (nnx.Einsum("bk,bkn->bn", (3, 8, 5), rngs=RNGS), (8, 5), 3),
    ],
)
def test_shapes(layer, features: tuple[int, int], rank: int) -> None:
    assert features_of(layer) == features
    assert kernel_rank(layer) == rank == layer.kernel.get_value().ndim


def test_layers_without_a_hook() -> None:
    conv = nnx.Conv(4, 4, (1,), rngs=RNGS)
    assert (hook_of(conv), features_of(conv)) == (None, ())
    assert hook_of(nnx.Linear(4, 4, rngs=RNGS)) is None


def test_a_hook_keeps_scales_for_each_layer_of_a_stack() -> None:
    hook = Hook(MatmulConfig(strategy=Delayed(history=2)), None, (5,))
    assert hook.state is not None
    assert hook.state.get_value().history.shape == (5, 3, 2)
    assert Hook(MatmulConfig(), None).state is None


def test_a_hook_multiplies_in_the_promoted_or_preferred_dtype() -> None:
    hook = Hook(MatmulConfig(), None)
    x, w = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((8, 3))
    numbers = (((1,), (0,)), ((), ()))
    assert hook(x, w, numbers).dtype == jnp.float32
    assert hook(x, w, numbers, preferred_element_type=jnp.float16).dtype == jnp.float16
    np.testing.assert_array_equal(hook(x, w, numbers), np.full((2, 3), 8.0))


def test_out_sharding_is_obeyed() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    hook = Hook(MatmulConfig(), None)
    numbers = (((1,), (0,)), ((), ()))
    y = jax.jit(lambda x: hook(x, x.T, numbers, out_sharding=sharding))(jnp.ones((8, 4)))
    assert y.sharding.is_equivalent_to(sharding, 2)


def test_layers_may_be_stacked_along_another_axis_than_the_first() -> None:
    """There is no place for a scale of each then."""
    axes = nnx.StateAxes({nnx.Param: 1, ...: 0})
    make = nnx.vmap(lambda key: nnx.Linear(16, 32, rngs=nnx.Rngs(key)), out_axes=axes)
    model = make(jax.random.split(jax.random.key(0), 3))
    assert convert(model, "fp8_dynamic").converted == ("",)
    restore(model)
    assert convert(model, "fp8_delayed").skipped == {
        "": "nnx.vmap has stacked it along an axis that is not the first"
    }
