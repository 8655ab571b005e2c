"""MLPs and mixtures of experts."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.gradients import jit
from tests.modules import build
from tests.nn.table import functional, normal, sine_loss
from tests.parallel.devices import explicit_mesh
from tests.refusals import refuses
from unitscale import batch_over, nn, ops, rules

WIDTH, HIDDEN, TOKENS = 16, 24, 40


def test_values_of_an_mlp() -> None:
    layers = {
        name: nn.MLP(8, 12, 5, activation=name, mult=1.5, rngs=nnx.Rngs(0))
        for name in ("gelu", "silu", "relu", "tanh", "silu_glu", "gelu_glu")
    }

    def by_parts(name, layer, x):
        gate = () if layer.gate is None else (layer.gate(x),)
        return layer.down(getattr(ops, name)(layer.up(x), *gate, mult=1.5))

    run = jit(lambda x: [(m(x).value, by_parts(n, m, x).value) for n, m in layers.items()])
    for found, expected in run(normal(0, 3, 8)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("policy", "activation"),
    [
        ("fp8", "gelu"),
        pytest.param("fp8", "silu_glu", marks=pytest.mark.slow),
        ("fp8_dynamic", "gelu"),
    ],
)
def test_hidden_units_in_8_bits_are_computed_again(policy: str, activation: str) -> None:
    """The backward pass keeps inputs of activations and recomputes their outputs."""
    layer = nn.MLP(8, 12, activation=activation, policy=policy, rngs=nnx.Rngs(0))

    def by_parts(layer, x):
        f, gate = getattr(ops, activation), layer.gate
        return layer.down(f(layer.up(x)) if gate is None else f(layer.up(x), gate(x))).value

    def run(f, params, x):
        y, back = jax.vjp(f, params, x)
        return y, back(y)

    (own, params), (plain, _) = functional(layer), functional(layer, by_parts)
    x = normal(0, 3, 5, 8)
    kept = jax.eval_shape(lambda *args: jax.vjp(own, *args)[1], params, x)
    hidden = [a for a in jax.tree.leaves(kept) if a.ndim > 2 and a.shape[-1] == 12]
    assert len(hidden) == 1 + (layer.gate is not None) + (policy != "fp8")
    assert sum(a.dtype.itemsize == 1 for a in hidden) == (policy == "fp8_dynamic")
    found, expected = jit(lambda *args: [run(f, *args) for f in (own, plain)])(params, x)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_recomputation_under_vmap_and_scan_and_of_parts_of_a_batch() -> None:
    """The backward pass, traced outside of `batch_over`, still has its factors."""
    layer = nn.MLP(8, 12, policy="fp8", rngs=nnx.Rngs(0))
    x = normal(0, 3, 5, 8)

    def gradients(call):
        loss, params = functional(layer, lambda layer, x: sine_loss(partial(call, layer), x))

        def part(params, x):
            with batch_over("parts"):
                return jax.grad(loss)(params, x)

        parts = jax.vmap(part, (None, 0), axis_name="parts")(params, x)
        scanned = jax.grad(
            lambda p: jax.lax.scan(lambda c, row: (c + loss(p, row), None), 0.0, x)[0]
        )(params)
        return jax.tree.leaves((parts, scanned))

    calls = lambda layer, x: layer(x), lambda layer, x: layer.down(ops.gelu(layer.up(x)))
    for a, b in zip(*jit(lambda: list(map(gradients, calls)))(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_who_watches_layers_sees_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are observed by patching the class, as `nnx.tabulate` and the recipes' probe do."""
    original, layer = nn.Dense.__call__, nn.MLP(8, 12, policy="fp8", rngs=nnx.Rngs(0))
    seen: list[jax.Array] = []

    def call(self: nn.Dense, x: ops.ArrayLike) -> ops.ArrayLike:
        y = original(self, x)
        seen.append(y.value)
        return y

    monkeypatch.setattr(nn.Dense, "__call__", call)
    y, (_, last) = jax.jit(lambda x: (layer(x).value, seen))(jnp.ones((2, 8)))
    np.testing.assert_array_equal(last, y)


@pytest.mark.parametrize("kind", [nn.MLP, partial(nn.MoE, experts=2)])
def test_dropout_is_on_the_output(kind) -> None:
    layer = kind(8, 12, dropout_rate=0.5, rngs=nnx.Rngs(params=0, dropout=1))
    x = normal(10, 30, 8)
    noisy, quiet = nnx.jit(lambda m, x: (m(x).value, m(x, deterministic=True).value))(layer, x)
    kept = noisy != 0
    assert 0 < np.mean(kept) < 1
    np.testing.assert_allclose(noisy[kept], 2 * quiet[kept], rtol=1e-5)


# Mixtures of experts.


def moe(policy="float32", seed=0, **options):
    options = {"experts": 4, "activation": "silu_glu"} | options
    return build(lambda: nn.MoE(WIDTH, HIDDEN, policy=policy, rngs=nnx.Rngs(0), **options), seed)


def gradients(model, x, cotangent):
    """Return a function for value and gradients by parameters and input, and the parameters."""

    def call(model, x):
        y = model(x).value
        return jnp.sum(y.astype(jnp.float32) * cotangent), y

    loss, params = functional(model, call)

    def run(params, x):
        (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return y, grads

    return run, params


def test_is_the_mlp_that_it_is_made_of() -> None:
    """One expert equals an MLP of the same parameters; several equal the weighted sum of MLPs."""
    x = normal(0, 3, 5, WIDTH)
    one, three = moe(experts=1, top_k=1), moe(experts=3, top_k=3)

    def expert(model, index):
        mlp = nn.MLP(WIDTH, HIDDEN, activation="silu_glu", rngs=nnx.Rngs(0))
        for name in ("up", "gate", "down"):
            layer = getattr(mlp, name)
            layer.kernel.set_value(model.experts[name].kernel.get_value()[index])
            layer.bias.set_value(model.experts[name].bias.get_value()[index])
        return mlp(x).value

    @jit
    def run(x):
        p = three.route(x).probabilities.reshape(3, 5, 3)
        mixed = sum(p[..., i, None] * expert(three, i) for i in range(3))
        pairs = (one(x), expert(one, 0)), (three(x), rules.mixture(3, 3).fwd * mixed)
        return [(found.value, expected) for found, expected in pairs]

    for found, expected in run(x):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    layer, x = nn.ExpertDense(2, 8, 3, rngs=nnx.Rngs(0)), normal(10, 30, 8)
    groups = ops.Groups(jnp.array([10, 20]), rows=30, groups=2)
    expected = ops.dense(x[:10], layer.kernel.get_value()[0]).value
    np.testing.assert_allclose(layer(x, groups).value[:10], expected, rtol=1e-5, atol=1e-5)


def test_no_tokens() -> None:
    """The last, smaller batch of a loader that was divided may have none."""
    model, x = moe("fp8", load_balancing=0.1, z_loss=0.1), jnp.ones((0, WIDTH))
    grads = nnx.jit(nn.grad(lambda model: jnp.sum(model(x).value)))(model)
    assert not any(map(jnp.any, jax.tree.leaves(grads)))


@pytest.mark.slow
def test_losses_of_the_router() -> None:
    """The weight of a router loss changes gradients but not values."""
    x, cotangent = normal(5, TOKENS, WIDTH), normal(6, TOKENS, WIDTH)
    plain, weighted = moe(), moe(load_balancing=0.5, z_loss=0.25)
    run, params = gradients(plain, x, cotangent)
    with_loss, _ = gradients(weighted, x, cotangent)

    def losses(model, x):
        routing = model.route(x)
        return 0.5 * routing.load_balancing_loss() + 0.25 * routing.z_loss()

    alone, _ = functional(plain, losses)

    def everything(params, x):
        return run(params, x), with_loss(params, x), jax.grad(alone, (0, 1))(params, x)

    (y, grads), (same, found), extra = jit(everything)(params, x)
    np.testing.assert_array_equal(y, same)
    expected = jax.tree.map(jnp.add, grads, extra)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(extra[0]["router"].get_value()).max() > 0.01


@pytest.mark.parametrize(
    ("axes", "spec", "policy"),
    [
        ({"data": 2, "expert": 2}, P(("data", "expert")), "float32"),
        ({"data": 2, "expert": 2}, P("data"), "fp8_delayed"),
        ({"data": 2, "tensor": 2}, P("data", None, "tensor"), "float32"),
    ],
)
@pytest.mark.slow
def test_experts_on_a_mesh_whose_axes_are_part_of_the_type(axes, spec, policy) -> None:
    x, cotangent = normal(7, 8, 6, WIDTH), normal(8, 8, 6, WIDTH)

    @nnx.jit
    def run(model, x, cotangent):
        def loss(model, x):
            return jnp.sum(jnp.sin(model(x).value) * cotangent)

        return nn.value_and_grad(loss, argnums=(0, 1))(model, x)

    def everything(x, cotangent):
        options = {"experts": 4, "load_balancing": 0.1, "z_loss": 0.01, "policy": policy}
        model = nn.MoE(WIDTH, HIDDEN, **options, rngs=nnx.Rngs(0))
        out = run(model, x, cotangent)
        states = [state.get_value() for _, state in nn.amax_states(model)]
        return jax.tree.leaves((out, [(state.scale, state.history) for state in states]))

    expected = everything(x, cotangent)
    with jax.set_mesh(explicit_mesh(**axes)):
        found = everything(*(jax.device_put(array, spec) for array in (x, cotangent)))
    # In FP8 layers compute in bfloat16, and what rounds the other way there moves by an ulp.
    tolerance = {"float32": 2**-17, "fp8_delayed": 2**-7}[policy]
    for a, b in zip(found, expected, strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def forward_derivative() -> None:
    layer, x = nn.MLP(8, 12, policy="fp8", rngs=nnx.Rngs(0)), jnp.ones((2, 8))
    jax.jvp(lambda x: layer(x).value, (x,), (x,))


RNGS = nnx.Rngs(0)
test_errors = refuses(
    [
        (ValueError, lambda: nn.MLP(8, 12, activation="swish", rngs=RNGS), "activation must"),
        (ValueError, lambda: moe(activation="swish"), "activation must be one of"),
        (ValueError, lambda: moe(top_k=5), "top_k must be from 1 to the 4 experts"),
        (ValueError, lambda: moe(top_k=1, renormalize=True), "one renormalized gate"),
        (TypeError, forward_derivative, "supports reverse-mode differentiation only"),
    ]
)
