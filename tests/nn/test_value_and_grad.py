"""Gradients of models by value; what is recorded of amax is in test_amax_state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.optimizers import scaled
from unitscale import ScaledArray, nn, to_array

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


@pytest.mark.parametrize("wrap", [nnx.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("scale", [1.0, 2.0**7])
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


def test_decorators_take_options_as_those_of_flax() -> None:
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


def test_trees_are_for_the_function_of_trees() -> None:
    tree = {"w": ScaledArray(jnp.ones(2), 4.0)}
    with pytest.raises(TypeError, match=r"unitscale\.value_and_grad"):
        nn.grad(lambda tree: jnp.sum(to_array(tree)["w"]))(tree)


def test_an_optimizer_that_knows_no_scales_is_refused() -> None:
    with pytest.raises(TypeError, match=r"parameters that are ScaledArrays, such as first\.bias"):
        nn.Optimizer(stored(), optax.sgd(0.1), wrt=nnx.Param)


def test_where_models_are_trees() -> None:
    """As code that has left graphs behind; `nnx.value_and_grad` takes models in either mode."""
    x = jnp.ones((4, 8))

    def losses() -> list[float]:
        model = nn.MLP(8, 16, policy="fp8_delayed", rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            loss, grads = nn.value_and_grad(lambda m: jnp.mean(m(x).value ** 2))(model)
            optimizer.update(model, grads)
            return loss

        return [float(step(model, optimizer, x)) for _ in range(3)]

    expected = losses()
    with nnx.set_graph_mode(False):
        assert losses() == expected
