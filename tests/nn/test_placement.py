"""Where activations lie on a mesh: as a call asks on explicit axes, else as the batch does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from recipes.bench.wire import collectives
from tests.parallel.devices import explicit_mesh, mesh_of
from unitscale import nn
from unitscale.parallel import param_shardings

X = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
IDS = np.arange(24).reshape(4, 6) % 8
LAYERS: dict[str, Callable[..., Any]] = {
    "Dense": lambda rngs: nn.Dense(8, 8, rngs=rngs),
    "Readout": lambda rngs: nn.Readout(8, 8, rngs=rngs),
    "Conv": lambda rngs: nn.Conv(8, 8, (3,), rngs=rngs),
    "Einsum": lambda rngs: nn.Einsum("bti,io->bto", (8, 8), (8,), rngs=rngs),
    "Embed.attend": lambda rngs: nn.Embed(8, 8, rngs=rngs).attend,
    "LoRALinear": lambda rngs: nn.LoRALinear(8, 8, lora_rank=2, rngs=rngs),
    "MultiHeadAttention": lambda rngs: nn.MultiHeadAttention(2, 8, rngs=rngs),
}
PLACES = [P("data", None, "model"), P(None, None, None), P(None, "data", None)]


@pytest.fixture
def mesh() -> Any:
    return explicit_mesh(data=2, model=2)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_lie_where_a_call_asks(mesh: Any, name: str, place: P) -> None:
    def gradient(x: Any, **options: Any) -> Any:
        layer = LAYERS[name](nnx.Rngs(0))

        def loss(x: Any) -> Any:
            y = layer(x, **options).value
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(x)

    (_, expected), whole = gradient(jnp.asarray(X))
    with jax.set_mesh(mesh):
        (_, y), dx = gradient(jax.device_put(X, P("data")), out_sharding=place)
    assert jax.typeof(y).sharding.spec == place
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("converted", [False, True])
def test_a_layer_of_flax_in_fp8(mesh: Any, *, converted: bool) -> None:
    with jax.set_mesh(mesh):
        layer = nnx.Linear(X.shape[-1], 8, rngs=nnx.Rngs(0))
        if converted:
            nn.convert(layer, "fp8_dynamic")
        y = layer(jax.device_put(X, P("data")), out_sharding=P(*[None] * (X.ndim - 1), "model"))
    assert jax.typeof(y).sharding.spec == P(*[None] * (X.ndim - 1), "model")


def test_a_model_that_was_made_before_the_mesh(mesh: Any) -> None:
    """Its parameters lie on no mesh, and their gradients are not moved there."""
    layer = nn.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(layer(x).value)))
    with jax.set_mesh(mesh):
        found = jax.jit(gradient)(jax.device_put(X, P("data")))
    np.testing.assert_allclose(found, gradient(X), rtol=1e-5, atol=1e-5)


def test_heads_lie_where_a_call_asks(mesh: Any) -> None:
    layer, seen = nn.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0)), []
    attend = layer._attend

    def spied(*heads: Any, **options: Any) -> Any:
        seen.extend(jax.typeof(x.data).sharding.spec for x in heads)
        return attend(*heads, **options)

    expected = layer(X).value
    place = P("data", None, "model", None)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("data"))
        object.__setattr__(layer, "_attend", spied)
        y = layer(x, qkv_sharding=place)
    assert seen == [place] * 3
    np.testing.assert_allclose(y.value, expected, rtol=1e-5, atol=1e-6)


def test_rows_lie_where_a_call_asks(mesh: Any) -> None:
    table = nn.Embed(8, 4, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh):
        y = table(jax.device_put(IDS, P("data")), out_sharding=P("data", None, "model"))
    assert jax.typeof(y.data).sharding.spec == P("data", None, "model")
    np.testing.assert_array_equal(y.value, table(jnp.asarray(IDS)).value)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
    "axes", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2}], ids=str
)
def test_a_stack_brings_weights_to_activations(axes: dict[str, int], scan: bool) -> None:
    """Value and gradients are those of one device, and so is each device's part of the stream."""
    model = nn.TransformerStack(2, 16, 4, is_causal=True, scan=scan, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    x = np.random.default_rng(0).normal(size=(4, 8, 16)).astype(np.float32)

    def gradients(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            y = nnx.merge(graphdef, params, rest, copy=True)(x).value
            return jnp.sum(jnp.sin(y)), y

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    (_, whole), expected = jax.jit(gradients)(params, x)
    mesh = mesh_of(**axes)
    with jax.set_mesh(mesh):
        program = jax.jit(gradients)
        # As rows of a table come that is divided over features.
        place = NamedSharding(mesh, P(None, None, "fsdp"))
        placed = jax.device_put((params, x), (param_shardings(params, mesh), place))
        (_, y), found = program(*placed)
        text = program.lower(*placed).compile()
    context = axes.get("context", 1)
    assert y.sharding.shard_shape(y.shape)[:2] == (4 // axes["fsdp"], 8 // context)
    for a, e in zip(jax.tree.leaves((y, found)), jax.tree.leaves((whole, expected)), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-4)
    if set(axes) == {"fsdp"}:  # the input comes, and its gradient goes
        assert sum(c.kind == "all-to-all" for c in collectives(text)) <= 2
