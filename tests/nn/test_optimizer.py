"""Gradients of models by value, and the optimizer; what is recorded of amax is in test_amax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.modules import build
from tests.nn.table import parameters
from tests.optimizers import scaled
from tests.refusals import refuses
from unitscale import ScaledArray, nn, to_array
from unitscale.optim import skip_nonfinite, umup

X = jax.random.normal(jax.random.key(0), (16, 8))


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nn.Dense(8, 8, rngs=rngs)
        self.norm = nn.LayerNorm(8, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return self.norm(self.first(x))


def loss(model, x):
    return jnp.sum(jnp.sin(to_array(model(x))))


def stored(scale: float = 1.0) -> Net:
    """Weights in float16, every scale moved by a factor."""
    model = Net()
    tx = scaled(optax.sgd(1.0))
    params = tx.scale_params(nnx.state(model, nnx.Param))
    moved = lambda w: ScaledArray(w.data / scale, w.scale * scale)  # noqa: E731
    is_leaf = lambda x: isinstance(x, ScaledArray)  # noqa: E731
    nnx.update(model, jax.tree.map(moved, params, is_leaf=is_leaf))
    return model


@pytest.mark.parametrize(("wrap", "scale"), [(nnx.jit, 2.0**7), (lambda f: f, 1.0)])
def test_gradients_are_those_of_plain_parameters(wrap, scale: float) -> None:
    model, plain = stored(scale), Net()
    nnx.update(plain, to_array(nnx.state(model, nnx.Param), jnp.float32))
    value, grads = wrap(nn.value_and_grad(loss))(model, X)
    wanted, expected = nnx.jit(nnx.value_and_grad(loss))(plain, X)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    # What the model counts goes on, and its weights are stored as they were.
    assert int(model.calls.get_value()) == 1
    assert model.first.kernel.get_value().dtype == jnp.float16
    assert float(model.first.kernel.get_value().scale) == scale


def test_grad_and_aux() -> None:
    model = stored()
    both = lambda model, x: (loss(model, x), {"x": x})  # noqa: E731
    (_, aux), grads = nn.value_and_grad(both, has_aux=True)(model, X)
    again, seen = nn.grad(both, has_aux=True)(model, X)
    np.testing.assert_array_equal(aux["x"], seen["x"])
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    by_x = nn.grad(loss, argnums=1)(model, X)
    assert by_x.shape == X.shape
    times = lambda model, x, *, factor=2.0: factor * loss(model, x)  # noqa: E731
    value, _ = nn.value_and_grad(times)(model, x=X, factor=3.0)
    np.testing.assert_allclose(value, 3 * loss(model, X), rtol=1e-6)


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_that_is_a_scaled_array_is_taken_by_its_value(has_aux: bool) -> None:
    def by_operators(model, x):
        value = (model(x) ** 2).mean()
        assert isinstance(value, ScaledArray)
        return (value, x) if has_aux else value

    def by_value(model, x):
        return jnp.mean(to_array(model(x)) ** 2)

    value, grads = nn.value_and_grad(by_operators, has_aux=has_aux)(model := stored(4.0), X)
    value = value[0] if has_aux else value
    expected, wanted = nn.value_and_grad(by_value)(model, X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert isinstance(value, jax.Array)
    with pytest.raises(ValueError, match=r"models by unitscale\.nn\.value_and_grad"):
        nnx.value_and_grad(by_operators, has_aux=has_aux)(model, X)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_the_model_of_the_caller_is_not_touched_while_the_loss_runs() -> None:
    model = stored()
    before = model.first.kernel.get_value()
    seen = []

    def watching(inner, x):
        assert inner is not model
        seen.append(model.first.kernel.get_value().dtype)
        return loss(inner, x)

    nn.grad(watching)(model, X)
    assert seen == [jnp.float16]
    with pytest.raises(ZeroDivisionError):
        nn.grad(lambda model: 1 / 0)(model)
    np.testing.assert_array_equal(model.first.kernel.get_value().data, before.data)


INPUTS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)


def mean_square(model) -> jax.Array:
    return jnp.mean((model(INPUTS).value - 1) ** 2)


def train(tx, steps: int = 5, jit=nnx.jit) -> tuple[nn.MLP, nn.Optimizer, list[float]]:
    model = build(lambda: nn.MLP(8, 16, rngs=nnx.Rngs(0)))
    optimizer = nn.Optimizer(model, tx, wrt=nnx.Param)

    @jit
    def step(model, optimizer):
        value, grads = nn.value_and_grad(mean_square)(model)
        optimizer.update(model, grads)
        return value

    return model, optimizer, [float(step(model, optimizer)) for _ in range(steps)]


def values(model) -> dict[str, np.ndarray]:
    return {path: np.asarray(to_array(p.get_value())) for path, p in parameters(model).items()}


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
    x, kernel = INPUTS, to_array(model.kernel.get_value())
    for one in kernel:
        x = x @ one / 8**0.5
    np.testing.assert_allclose(run(model, INPUTS), x, rtol=1e-5, atol=1e-5)


def test_decorators_and_modes_are_those_of_flax() -> None:
    """Also for code that has left graphs behind, whose models are trees."""
    model, x = nn.Dense(3, 2, rngs=nnx.Rngs(0)), jnp.arange(3.0)

    @nn.value_and_grad(argnums=(0, 1))
    def both(model, x):
        return model(x).value.sum()

    @nn.grad(argnums=1)
    def second(model, x):
        return model(x).value.sum()

    value, (_, by_input) = both(model, x)
    np.testing.assert_array_equal(value, model(x).value.sum())
    np.testing.assert_array_equal(second(model, x), by_input)
    last = nn.grad(lambda model, x, power=1: model(x**power).value.sum(), argnums=-1)
    np.testing.assert_array_equal(last(model, x), by_input)
    delayed = nn.MLP(3, 4, policy="fp8_delayed", rngs=nnx.Rngs(0))
    with nnx.set_graph_mode(False):
        nnx.jit(both)(delayed, x)
    assert all((v.get_value().counts[0, 1] > 0) for _, v in nn.amax_states(delayed))


@pytest.mark.parametrize("jit", [nnx.jit, lambda f: f], ids=["jit", "eager"])
def test_near_the_optimizer_of_flax_in_float32(jit) -> None:
    tx = optax.adam(0.01)
    rate, steps = 0.01, 2
    model, optimizer, found = train(skip_nonfinite(scaled(tx)), steps, jit)
    plain, reference, expected = train(tx, steps)
    assert int(optimizer.step[...]) == int(reference.step[...]) == steps
    # float16 weights; Adam's updates are rate-sized, and off by the rounding of e4m3 moments.
    np.testing.assert_allclose(found, expected, rtol=steps * 2**-10)
    for path, value in values(plain).items():
        near = steps * (2**-11 * np.maximum(np.abs(value), 1e-2) + 2 * rate * 2**-3)
        assert (np.abs(values(model)[path] - value) <= near).all(), path
    assert all(isinstance(p.get_value(), ScaledArray) for p in parameters(model).values())
    assert model.up.kernel.role == "weight"


def test_umup_and_accumulation_inside_and_a_merged_optimizer_goes_on() -> None:
    model = nn.Dense(8, 16, rngs=nnx.Rngs(0))
    before = values(model)
    inner = optax.chain(optax.clip_by_global_norm(1e9), optax.adam(0.25))
    inner = umup(inner, nnx.state(model, nnx.Param))
    tx = scaled(optax.MultiSteps(inner, 2).gradient_transformation(), weights="float32")
    optimizer = nn.Optimizer(model, tx, wrt=nnx.Param)
    grads = nn.grad(mean_square)(model)
    optimizer.update(model, grads)
    np.testing.assert_array_equal(values(model)["kernel"], before["kernel"])
    again_model, again = nnx.merge(*nnx.split((model, optimizer)))
    for m, o in ((model, optimizer), (again_model, again)):
        o.update(m, grads)
    moved = np.abs(values(model)["kernel"] - before["kernel"]).max()
    assert moved == pytest.approx(0.25 * 8**-0.5, rel=1e-3)
    for path, value in values(model).items():
        np.testing.assert_array_equal(value, values(again_model)[path])


def around() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), scaled(optax.adam(0.1)))


def optimizer_of(model: nnx.Module, tx, **options) -> nn.Optimizer:
    return nn.Optimizer(model, tx, **options)


test_errors = refuses(
    [
        (
            TypeError,
            lambda: nn.grad(lambda t: jnp.sum(to_array(t)["w"]))({"w": ScaledArray(jnp.ones(2))}),
            r"unitscale\.value_and_grad",
        ),
        (
            TypeError,
            lambda: optimizer_of(stored(), optax.sgd(0.1), wrt=nnx.Param),
            r"parameters that are ScaledArrays, such as first\.bias",
        ),
        (TypeError, lambda: optimizer_of(stored(), around(), wrt=nnx.Param), "A chain goes inside"),
        (ValueError, lambda: optimizer_of(Net(), around(), wrt=nnx.Param), "clip inside scaled"),
        (TypeError, lambda: optimizer_of(Net(), scaled(optax.adam(0.01))), "wrt"),
    ]
)
