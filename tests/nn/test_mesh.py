"""Layers on meshes: sharding of activations, and gradients with sharded batches."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from recipes.bench.wire import collectives
from tests.nn.table import functional, loss_and_value
from tests.parallel.devices import explicit_mesh, mesh_of, relative_error
from unitscale import nn, value_and_grad
from unitscale.parallel import exchange_gradients, param_shardings

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6, 8)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "scan"),
    [
        ({"fsdp": 4}, True),
        ({"fsdp": 2, "context": 2}, False),
        ({"fsdp": 4}, False),
        ({"fsdp": 2, "tensor": 2}, True),
    ],
    ids=str,
)
def test_a_stack_brings_weights_to_activations(axes: dict[str, int], scan: bool) -> None:
    """Value and gradients equal those of one device; each device has its part of the stream."""
    model = nn.TransformerStack(2, 16, 4, is_causal=True, scan=scan, rngs=nnx.Rngs(0))
    loss, params = functional(model, loss_and_value)
    gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    x = np.random.default_rng(0).normal(size=(4, 8, 16)).astype(np.float32)

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
    chex.assert_trees_all_close((y, found), (whole, expected), rtol=1e-3, atol=1e-4)
    if set(axes) == {"fsdp"}:  # the input comes, and its gradient goes
        assert sum(c.kind == "all-to-all" for c in collectives(text)) <= 2


@pytest.mark.slow
def test_weights_and_gradients_travel_in_few_bits() -> None:
    """FP8 weights are gathered once, and their gradients are summed in the format asked for."""
    layers = {"activation": "silu_glu", "norm": "rms", "use_bias": False, "policy": "fp8"}
    model = nn.TransformerStack(1, 32, 4, 64, is_causal=True, **layers, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    x = np.random.default_rng(0).normal(size=(8, 4, 32)).astype(np.float32)
    matrices = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 2)

    def gradients(dtype: Any, params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.sum(jnp.sin(nnx.merge(graphdef, params, rest, copy=True)(x).value))

        with exchange_gradients(dtype):
            return value_and_grad(loss)(params)

    value, expected = jax.jit(partial(gradients, None))(params, x)
    mesh = mesh_of(fsdp=8)
    places = param_shardings(params, mesh)
    placed = jax.device_put((params, x), (places, NamedSharding(mesh, P("fsdp"))))
    for dtype, kind, size, error in (
        ("bfloat16", "u16", 2, 2**-8),
        ("float8_e4m3fn", "u8", 1, 2**-4),
    ):
        with jax.set_mesh(mesh):
            run = jax.jit(partial(gradients, dtype), out_shardings=(None, places))
            program = run.lower(*placed).compile()
        large = Counter()
        for c in collectives(program):
            large[c.kind, c.dtype] += c.size if c.size > 1000 or c.kind == "all-to-all" else 0
        sent = {("all-gather", "u8"): matrices, ("all-to-all", kind): size * matrices}
        assert +large == sent
        found, grads = program(*placed)
        np.testing.assert_allclose(found, value, rtol=1e-5)
        for a, e in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
            assert relative_error(a, e) < error
    with jax.set_mesh(mesh_of(data=2, fsdp=2)), pytest.raises(ValueError, match="only axis"):
        jax.eval_shape(partial(gradients, "bfloat16"), params, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "stacks"),
    [
        ("float32", 0),
        ("float32", 1),
        ("fp8_delayed", 1),
    ],
)
def test_a_language_model_on_explicit_axes(policy: str, stacks: int) -> None:
    @nnx.jit
    def gradients(model: Any, ids: Any) -> Any:
        def loss(model: Any) -> Any:
            return model.layers[0].cross_entropy(model(ids[:, :-1]), ids[:, 1:])

        return nn.value_and_grad(loss)(model)

    def run(ids: Any) -> Any:
        options = {"policy": policy, "rngs": nnx.Rngs(0)}
        recurrent = nn.RNN(nn.OptimizedLSTMCell(8, 8, **options))
        stack = nn.TransformerStack(1, 8, 2, 16, use_bias=False, **options)
        model = nnx.Sequential(nn.Embed(16, 8, **options), recurrent, *[stack] * stacks)
        results = gradients(model, ids)
        return results, [state.get_value().scale for _, state in nn.amax_states(model)]

    ids = RNG.integers(0, 16, (8, 7))
    expected = run(jnp.asarray(ids))
    with jax.set_mesh(explicit_mesh(data=4)):
        found = run(jax.device_put(ids, P("data")))
    # In another order, sums may round an element to the next number of E4M3; 0.05 was measured.
    near = 2**-16 if policy == "float32" else 2**-3
    for ours, whole in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.linalg.norm(ours - whole) <= near * np.linalg.norm(whole) + 1e-6


LAYERS: dict[str, Callable[..., Any]] = {
    "Dense": lambda rngs: nn.Dense(8, 8, rngs=rngs),
    "Readout": lambda rngs: nn.Readout(8, 8, rngs=rngs),
    "Conv": lambda rngs: nn.Conv(8, 8, (3,), rngs=rngs),
    "Einsum": lambda rngs: nn.Einsum("bti,io->bto", (8, 8), (8,), rngs=rngs),
    "Embed.attend": lambda rngs: nn.Embed(8, 8, rngs=rngs).attend,
    "LoRALinear": lambda rngs: nn.LoRALinear(8, 8, lora_rank=2, rngs=rngs),
    "MultiHeadAttention": lambda rngs: nn.MultiHeadAttention(2, 8, rngs=rngs),
}


def on_explicit_axes(run: Callable[..., Any]) -> tuple[Any, Any]:
    """The results of ``run(x)`` on a mesh with explicit axes, and on one device."""
    with jax.set_mesh(explicit_mesh(data=2, model=2)):
        found = run(jax.device_put(X, P("data")))
    return found, run(jnp.asarray(X))


@pytest.mark.parametrize(
    ("names", "place"),
    [
        (tuple(LAYERS), P("data", None, "model")),
        (("Dense",), P(None, None, None)),
        (("Conv",), P(None, "data", None)),
    ],
    ids=["all", "Dense", "Conv"],
)
def test_outputs_lie_where_a_call_asks(names: tuple[str, ...], place: P) -> None:
    def run(x: Any) -> Any:
        options = {} if jax.typeof(x).sharding.mesh.empty else {"out_sharding": place}
        layers = [LAYERS[name](nnx.Rngs(0)) for name in names]

        def loss(x: Any) -> Any:
            ys = [layer(x, **options).value for layer in layers]
            return sum(jnp.sum(jnp.sin(y)) for y in ys), ys

        return jax.jit(jax.grad(loss, has_aux=True))(x)

    (dx, ys), (whole, expected) = on_explicit_axes(run)
    np.testing.assert_allclose(dx, whole, rtol=1e-5, atol=1e-5 * len(names))
    for y, wanted in zip(ys, expected, strict=True):
        assert jax.typeof(y).sharding.spec == place
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


def test_attention_and_dropout() -> None:
    """Dropout masks equal those of one device; parameters and gradients are not sharded."""
    attention = nn.MultiHeadAttention(2, 8, dropout_rate=0.5, is_causal=True, rngs=nnx.Rngs(0))
    dropout, key = nn.Dropout(0.5, rngs=nnx.Rngs(0)), jax.random.key(1)
    heads = P("data", None, "model", None)

    def run(x: Any) -> Any:
        options = {} if jax.typeof(x).sharding.mesh.empty else {"qkv_sharding": heads}

        def call(layer: Any, x: Any) -> Any:
            y = dropout(layer(x, rngs=key, **options), rngs=key).value
            return jnp.sum(jnp.sin(y)), y

        loss, params = functional(attention, call)
        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)

    found, expected = on_explicit_axes(run)
    assert 0 < np.mean(np.asarray(found[1]) == 0) < 1
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_and_a_converted_layer_lie_where_a_call_asks() -> None:
    table, place = nn.Embed(8, 4, rngs=nnx.Rngs(0)), P("data", None, "model")
    ids = np.arange(24).reshape(4, 6) % 8
    with jax.set_mesh(explicit_mesh(data=2, model=2)):
        y = table(jax.device_put(ids, P("data")), out_sharding=place)
        layer = nnx.Linear(X.shape[-1], 8, rngs=nnx.Rngs(0))
        nn.convert(layer, "fp8_dynamic")
        converted = layer(jax.device_put(X, P("data")), out_sharding=place)
    assert jax.typeof(y.data).sharding.spec == jax.typeof(converted).sharding.spec == place
    np.testing.assert_array_equal(y.value, table(jnp.asarray(ids)).value)
