import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.modules import build
from tests.nn.table import parameters
from tests.optimizers import scaled
from unitscale import nn
from unitscale.core import ScaledArray, to_array
from unitscale.optim import skip_nonfinite, umup

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)


def loss(model) -> jax.Array:
    return jnp.mean((model(X).value - 1) ** 2)


def train(tx, steps: int = 5, jit=nnx.jit) -> tuple[nn.MLP, nn.Optimizer, list[float]]:
    model = build(lambda: nn.MLP(8, 16, rngs=nnx.Rngs(0)))
    optimizer = nn.Optimizer(model, tx, wrt=nnx.Param)

    @jit
    def step(model, optimizer):
        value, grads = nn.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return model, optimizer, [float(step(model, optimizer)) for _ in range(steps)]


def values(model) -> dict[str, np.ndarray]:
    return {path: np.asarray(to_array(p.get_value())) for path, p in parameters(model).items()}


@pytest.mark.parametrize("jit", [nnx.jit, lambda f: f], ids=["jit", "eager"])
def test_near_the_optimizer_of_flax_in_float32(jit) -> None:
    rate, steps = 0.01, 5
    model, optimizer, found = train(scaled(optax.adam(rate)), steps, jit)
    plain, reference, expected = train(optax.adam(rate), steps)
    assert int(optimizer.step[...]) == int(reference.step[...]) == steps
    # float16 weights; Adam's updates are rate-sized, and off by the rounding of e4m3 moments.
    np.testing.assert_allclose(found, expected, rtol=steps * 2**-10)
    for path, value in values(plain).items():
        near = steps * (2**-11 * np.maximum(np.abs(value), 1e-2) + 2 * rate * 2**-3)
        assert (np.abs(values(model)[path] - value) <= near).all(), path
    assert all(isinstance(p.get_value(), ScaledArray) for p in parameters(model).values())
    assert model.up.kernel.role == "weight"


@pytest.mark.parametrize(
    "tx",
    [
        scaled(optax.adam(0.05), moments=("e4m3fn", "e4m3fn"), rounding="stochastic"),
        skip_nonfinite(scaled(optax.lion(0.02))),
        optax.adam(0.05),
    ],
    ids=["stochastic", "skip", "optax"],
)
def test_the_loss_falls(tx) -> None:
    losses = train(tx, 12)[2]
    assert losses[-1] < 0.7 * losses[0]


def test_layers_that_vmap_has_stacked() -> None:
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stack(rngs):
        return nn.Dense(8, 8, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return layer(x).value

    model = stack(nnx.Rngs(0))
    nn.Optimizer(model, scaled(optax.sgd(1.0)), wrt=nnx.Param, stack_axes=1)
    assert model.bias.get_value().scale.shape == (3, 1)
    x, kernel = X, to_array(model.kernel.get_value())
    for one in kernel:
        x = x @ one / 8**0.5
    np.testing.assert_allclose(run(model, X), x, rtol=1e-5, atol=1e-5)


def test_umup_inside() -> None:
    model = nn.MLP(8, 16, rngs=nnx.Rngs(0))
    before = values(model)
    tx = scaled(umup(optax.adam(0.25), nnx.state(model, nnx.Param)), weights="float32")
    optimizer = nn.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nn.grad(loss)(model))
    moved = np.abs(values(model)["up.kernel"] - before["up.kernel"]).max()
    assert moved == pytest.approx(0.25 * 8**-0.5, rel=1e-3)


def test_a_chain_around_is_told_to_go_inside() -> None:
    clip = optax.clip_by_global_norm(1.0)
    around = optax.chain(clip, scaled(optax.adam(0.1)))
    with pytest.raises(ValueError, match=r"clip inside scaled, as in scaled\(optax\.chain"):
        nn.Optimizer(nn.Dense(8, 2, rngs=nnx.Rngs(0)), around, wrt=nnx.Param)
    tx = scaled(optax.chain(clip, optax.adam(0.1)))
    model = nn.Dense(8, 2, rngs=nnx.Rngs(0))
    nn.Optimizer(model, tx, wrt=nnx.Param).update(model, nn.grad(loss)(model))
    with pytest.raises(TypeError, match=r"A chain goes inside: scaled\(optax\.chain"):
        nn.Optimizer(model, around, wrt=nnx.Param)


def test_gradients_are_accumulated() -> None:
    tx = scaled(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation())
    model = nn.Dense(8, 2, rngs=nnx.Rngs(0))
    optimizer = nn.Optimizer(model, tx, wrt=nnx.Param)
    before = values(model)
    grads = nn.grad(loss)(model)
    optimizer.update(model, grads)
    np.testing.assert_array_equal(values(model)["kernel"], before["kernel"])
    optimizer.update(model, grads)
    assert (values(model)["kernel"] != before["kernel"]).any()


def test_a_split_and_merged_optimizer_goes_on() -> None:
    model, optimizer, _ = train(scaled(optax.adam(0.01)), 2)
    graphdef, state = nnx.split((model, optimizer))
    again_model, again = nnx.merge(graphdef, state)
    grads = nn.grad(loss)(model)
    optimizer.update(model, grads)
    again.update(again_model, grads)
    for path, value in values(model).items():
        np.testing.assert_array_equal(value, values(again_model)[path])
    with pytest.raises(TypeError, match="wrt"):
        nn.Optimizer(model, scaled(optax.adam(0.01)))  # pyright: ignore[reportCallIssue]
