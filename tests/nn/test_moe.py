import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.gradients import jit
from tests.modules import build
from tests.parallel.devices import explicit_mesh
from tests.refusals import refuses
from unitscale import nn, ops, parallel, rules

from .table import parameters

WIDTH, HIDDEN, TOKENS = 16, 24, 40


def make(policy="float32", seed=0, **options):
    options = {"experts": 4, "activation": "silu_glu"} | options
    return build(lambda: nn.MoE(WIDTH, HIDDEN, policy=policy, rngs=nnx.Rngs(0), **options), seed)


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def gradients(model, x, cotangent):
    """Value and gradients by parameters and input; and the function, for other devices."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params, x):
        def loss(params, x):
            y = nnx.merge(graphdef, params, rest, copy=True)(x).value
            return jnp.sum(y.astype(jnp.float32) * cotangent), y

        (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return y, grads

    return run, params


SCALES = [
    # experts, top_k, width, options
    (8, 2, 32, {}),
    (4, 4, 32, {}),
    (16, 4, 32, {"router_mult": 2.0}),
    (8, 1, 64, {}),
    (6, 3, 32, {"renormalize": False}),
]


@pytest.mark.parametrize(("experts", "top_k", "width", "options"), SCALES)
def test_scale(experts, top_k, width, options) -> None:
    """Outputs, logits and all weights' gradients are unit, those of biases too.

    The gradient of the input is the true one, which adds up the experts' and the router's; that of
    what comes before the activation is larger by the ratio of its two factors.
    """
    ideal = rules.elementwise(jnp.tanh, constraint=None)
    ratio = ideal.fwd / ideal.bwd[0]
    tokens, trials = 64, 32

    def trial(key):
        init, x_key, y_key = jax.random.split(key, 3)
        model = nn.MoE(
            width,
            width,
            experts=experts,
            top_k=top_k,
            activation="tanh",
            rngs=nnx.Rngs(init),
            **options,
        )
        x = jax.random.normal(x_key, (tokens, width))
        run, params = gradients(model, x, jax.random.normal(y_key, x.shape))
        y, (grads, _) = run(params, x)
        found = {k: v.get_value() for k, v in nnx.to_flat_state(grads)}
        arrays = {"y": y, "logits": model.route(x).logits} | {
            ".".join(map(str, path)): g for path, g in found.items()
        }
        return {name: jnp.mean(a**2) for name, a in arrays.items()}

    squares = jit(lambda keys: jax.lax.map(trial, keys))(
        jax.random.split(jax.random.key(experts), trials)
    )
    assert len(squares) == 7
    for name, square in squares.items():
        expected = ratio if ".up." in name else 1.0
        error = square.std(ddof=1) / expected**2 / trials**0.5
        off = abs(float(square.mean()) / expected**2 - 1)
        # The router's gates are normal, and experts independent, for wide tokens alone.
        assert off <= 5 * error + 1 / width, (name, off, error)
        assert error < 0.06, (name, error)


def test_is_the_mlp_that_it_is_made_of() -> None:
    """One expert is an MLP of the same parameters; as many as are chosen, their weighted sum."""
    x = draw(0, 3, 5, WIDTH)
    call = nnx.jit(lambda model, x: model(x).value)
    one = make(experts=1, top_k=1)
    mlp = nn.MLP(WIDTH, HIDDEN, activation="silu_glu", rngs=nnx.Rngs(0))

    def expert(model, index):
        for name in ("up", "gate", "down"):
            layer = getattr(mlp, name)
            layer.kernel.set_value(model.experts[name].kernel.get_value()[index])
            layer.bias.set_value(model.experts[name].bias.get_value()[index])
        return call(mlp, x)

    np.testing.assert_allclose(call(one, x), expert(one, 0), rtol=1e-5, atol=1e-5)
    all_of_3 = make(experts=3, top_k=3)
    routing = all_of_3.route(x)
    p = np.asarray(routing.probabilities).reshape(3, 5, 3)
    c = rules.mixture(3, 3).fwd
    expected = c * sum(p[..., i, None] * expert(all_of_3, i) for i in range(3))
    np.testing.assert_allclose(call(all_of_3, x), expected, rtol=1e-4, atol=1e-4)


# Relative errors: some roundings of 16-bit activations; one of the coarsest operand in 8 bits.
POLICIES = {
    "bfloat16": 4 * float(jnp.finfo("bfloat16").eps),
    "float16": 4 * float(jnp.finfo("float16").eps),
    "fp8": float(jnp.finfo("float8_e4m3fn").eps),
    "fp8_dynamic": float(jnp.finfo("float8_e5m2").eps),
    "mxfp8": float(jnp.finfo("float8_e4m3fn").eps),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy) -> None:
    """As float32, up to the rounding of the format; the same experts are chosen."""
    x, cotangent = draw(1, TOKENS, WIDTH), draw(2, TOKENS, WIDTH)
    x = x.astype(jnp.bfloat16).astype(jnp.float32)
    results = []
    for name in (policy, "float32"):
        run, params = gradients(make(name), x, cotangent)
        results.append(jit(run)(params, x))
    for narrow, wide in zip(*map(jax.tree.leaves, results), strict=True):
        narrow, wide = np.asarray(narrow, np.float64), np.asarray(wide, np.float64)
        error = np.linalg.norm(narrow - wide) / np.linalg.norm(wide)
        assert error < POLICIES[policy]


def test_delayed_scales_follow_the_experts() -> None:
    """One state for each product, of all experts together."""
    model = make("fp8_delayed")

    @nnx.jit
    def step(model, x):
        return nn.value_and_grad(lambda m: jnp.sum(jnp.sin(m(x).value.astype(jnp.float32))))(model)

    step(model, 1000 * draw(11, TOKENS, WIDTH))
    scales = {
        name: np.asarray(layer.amax.get_value().scale) for name, layer in model.experts.items()
    }
    assert scales.keys() == {"up", "gate", "down"}
    assert scales["up"][0] == scales["gate"][0] > 4
    assert (scales["down"] != 1).all()


def test_experts_without_tokens_and_one_with_all() -> None:
    model = make("float16", activation="gelu")
    model.router.set_value(jnp.zeros((WIDTH, 4)).at[:, 1].set(3.0).at[:, 2].set(2.0))
    x = jnp.abs(draw(3, TOKENS, WIDTH))
    run, params = gradients(model, x, draw(4, TOKENS, WIDTH))
    y, (grads, dx) = jit(run)(params, x)
    assert np.isfinite(np.asarray(y, np.float32)).all()
    assert np.isfinite(dx).all()
    for path, grad in nnx.to_flat_state(grads["experts"]):
        grad = np.asarray(grad.get_value())
        assert np.isfinite(grad).all()
        assert not grad[[0, 3]].any(), path
        assert grad[1].any(), path
        assert grad[2].any(), path


def test_no_tokens() -> None:
    """As the last, smaller batch of a loader that was divided may have none."""
    model = make("fp8", activation="gelu", load_balancing=0.1, z_loss=0.1)
    x = jnp.ones((2, 0, WIDTH))
    assert model(x).shape == x.shape
    grads = nn.grad(lambda model: jnp.sum(model(x).value))(model)
    assert not any(map(jnp.any, jax.tree.leaves(grads)))


@pytest.mark.parametrize("name", ["load_balancing", "z_loss"])
def test_losses_of_the_router(name) -> None:
    """A weight adds the gradient of that loss, and changes no value."""
    x, cotangent = draw(5, TOKENS, WIDTH), draw(6, TOKENS, WIDTH)
    plain, weighted = make(), make(**{name: 0.5})
    loss = {"load_balancing": "load_balancing_loss", "z_loss": "z_loss"}[name]
    run, params = gradients(plain, x, cotangent)
    with_loss, _ = gradients(weighted, x, cotangent)
    graphdef, _, rest = nnx.split(plain, nnx.Param, ...)

    def alone(params, x):
        model = nnx.merge(graphdef, params, rest, copy=True)
        return 0.5 * getattr(model.route(x), loss)()

    def everything(params, x):
        return run(params, x), with_loss(params, x), jax.grad(alone, (0, 1))(params, x)

    (y, grads), (same, found), extra = jit(everything)(params, x)
    np.testing.assert_array_equal(y, same)
    expected = jax.tree.map(jnp.add, grads, extra)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert np.abs(extra[0]["router"].get_value()).max() > 0.01


@pytest.mark.parametrize(
    ("axes", "policy"),
    [
        ({"expert": 4}, "float32"),
        ({"expert": 4}, "fp8"),
        ({"data": 2, "expert": 2}, "float32"),
        ({"expert": 2, "tensor": 2}, "float32"),
    ],
)
def test_experts_on_many_devices(axes, policy) -> None:
    """Each device computes its own experts, and the result is that of one device."""
    x, cotangent = draw(7, 8, 6, WIDTH), draw(8, 8, 6, WIDTH)
    model = make(policy, load_balancing=0.1)
    run, params = gradients(model, x, cotangent)
    expected = jax.jit(run)(params, x)
    mesh = parallel.make_mesh(axes, devices=jax.devices()[:4])
    shardings = parallel.param_shardings(params, mesh, small=1)
    kernel = shardings["experts"]["up"]["kernel"].get_value()
    assert kernel.spec[0] == "expert"
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings), parallel.shard_batch(x, mesh)
        found = jax.jit(run)(*placed)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        # The devices' gradients of the input add up in another order, and round to bfloat16.
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error <= {"float32": 1e-5, "fp8": 4 * float(jnp.finfo("bfloat16").eps)}[policy]


@pytest.mark.parametrize(
    ("axes", "spec", "policy"),
    [
        ({"data": 4}, P("data"), "float32"),
        ({"expert": 4}, P(), "float32"),
        ({"data": 2, "expert": 2}, P(("data", "expert")), "float32"),
        ({"data": 2, "expert": 2}, P("data"), "fp8_delayed"),
        ({"data": 2, "context": 2}, P("data", "context"), "float32"),
        ({"data": 2, "tensor": 2}, P("data", None, "tensor"), "float32"),
    ],
)
def test_a_mesh_whose_axes_are_part_of_the_type(axes, spec, policy) -> None:
    x, cotangent = draw(7, 8, 6, WIDTH), draw(8, 8, 6, WIDTH)

    @nnx.jit
    def run(model, x, cotangent):
        def loss(model, x):
            return jnp.sum(jnp.sin(model(x).value) * cotangent)

        return nn.value_and_grad(loss, argnums=(0, 1))(model, x)

    def everything(x, cotangent):
        rngs = nnx.Rngs(0)
        model = nn.MoE(
            WIDTH, HIDDEN, experts=4, load_balancing=0.1, z_loss=0.01, policy=policy, rngs=rngs
        )
        out = run(model, x, cotangent)
        stateful = [layer for layer in model.experts.values() if layer.amax is not None]
        states = [layer.amax.get_value() for layer in stateful]
        return jax.tree.leaves((out, [(state.scale, state.history) for state in states]))

    expected = everything(x, cotangent)
    with jax.set_mesh(explicit_mesh(**axes)):
        found = everything(*(jax.device_put(array, spec) for array in (x, cotangent)))
    # In FP8 layers compute in bfloat16, and what rounds the other way there moves by an ulp.
    tolerance = {"float32": 2**-17, "fp8_delayed": 2**-7}[policy]
    for a, b in zip(found, expected, strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def test_in_a_transformer() -> None:
    """In place of the MLP of each layer, one by one, or scanned and computed again."""
    mlp = functools.partial(nn.MoE, experts=3, load_balancing=0.1)
    stack = build(
        lambda: nn.TransformerStack(2, 8, 2, 12, mlp=mlp, is_causal=True, rngs=nnx.Rngs(0))
    )
    shapes = {
        name.split("mlp.")[1]: p.get_value().shape
        for name, p in parameters(stack).items()
        if "layers.0.mlp." in name
    }
    assert shapes == {
        "router": (8, 3),
        "experts.up.kernel": (3, 8, 12),
        "experts.up.bias": (3, 12),
        "experts.down.kernel": (3, 12, 8),
        "experts.down.bias": (3, 8),
    }
    assert stack.layers[0].mlp.router.get_metadata()["depth"] == 4
    other = stack.with_scan(True)
    other.remat = "layer"
    x = draw(9, 2, 5, 8)

    def loss(model):
        return jnp.sum(jnp.sin(model(x).value))

    (value, grads), (again, same) = jit(
        lambda a, b: (nnx.value_and_grad(loss)(a), nnx.value_and_grad(loss)(b))
    )(stack, other)
    np.testing.assert_allclose(again, value, rtol=1e-5)
    layers = nnx.to_pure_dict(grads)["layers"]
    grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), layers[0], layers[1])
    same = nnx.to_pure_dict(same)["layers"]
    for a, b in zip(*map(jax.tree.leaves, (same, grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_roles() -> None:
    """Learning rates go by one expert's fan-in, whatever the number of experts."""
    found = {
        name: (p.get_metadata()["role"], p.get_metadata()["fan_in"], p.get_metadata()["fan_out"])
        for name, p in parameters(make(use_bias=False)).items()
    }
    assert found == {
        "router": ("weight", WIDTH, 4),
        "experts.up.kernel": ("weight", WIDTH, HIDDEN),
        "experts.gate.kernel": ("weight", WIDTH, HIDDEN),
        "experts.down.kernel": ("weight", HIDDEN, WIDTH),
    }


def test_dropout_and_one_layer() -> None:
    model = nn.MoE(8, 12, experts=2, dropout_rate=0.5, rngs=nnx.Rngs(params=0, dropout=1))
    x = draw(10, 30, 8)
    noisy, quiet = nnx.jit(lambda m, x: (m(x).value, m(x, deterministic=True).value))(model, x)
    kept = noisy != 0
    assert 0 < np.mean(kept) < 1
    np.testing.assert_allclose(noisy[kept], 2 * quiet[kept], rtol=1e-5)
    layer = nn.ExpertDense(2, 8, 3, rngs=nnx.Rngs(0))
    groups = ops.Groups(jnp.array([10, 20]), rows=30, groups=2)
    expected = ops.dense(x[:10], layer.kernel.get_value()[0]).value
    np.testing.assert_allclose(layer(x, groups).value[:10], expected, rtol=1e-5, atol=1e-5)


ERRORS = [
    (ValueError, lambda: make(activation="swish"), "activation must be one of gelu, .*; got 'sw"),
    (ValueError, lambda: make(top_k=5), "top_k must be from 1 to the 4 experts; got 5"),
    (ValueError, lambda: make(top_k=1, renormalize=True), "one renormalized gate is always 1"),
]
test_errors = refuses(ERRORS)
