"""The probe measures what JAX computes, layer by layer, and leaves the model as it was."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.run.probe import probe


class Toy(nnx.Module):
    """Two linear layers; the loss is the mean of the outputs times the targets."""

    def __init__(self):
        self.first = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))

    def loss(self, ids, targets, *, deterministic):
        del deterministic
        return (self(ids) * targets).mean()


X = jnp.linspace(-1, 1, 15).reshape(5, 3)
Y = jnp.linspace(0, 2, 10).reshape(5, 2)


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def test_measures_what_jax_computes() -> None:
    model = Toy()
    reading = probe(model, X, Y)
    hidden = model.first(X)
    out = model(X)
    assert list(reading.activations) == ["first", "second"]
    assert float(reading.loss) == pytest.approx(float((out * Y).mean()), rel=1e-5)
    at_hidden = jax.grad(lambda h: (model.second(jnp.tanh(h)) * Y).mean())(hidden)
    at_out = jax.grad(lambda o: (o * Y).mean())(out)
    expected = {
        "activations": {"first": rms(hidden), "second": rms(out)},
        "gradients": {"first": rms(at_hidden), "second": rms(at_out)},
    }
    for kind, layers in expected.items():
        found = {name: float(value) for name, value in getattr(reading, kind).items()}
        assert found == pytest.approx(layers, rel=1e-5)
    grads = nnx.grad(lambda m: (m(X) * Y).mean())(model)
    assert reading.weights.keys() == {
        "first.kernel",
        "first.bias",
        "second.kernel",
        "second.bias",
    }
    assert float(reading.weights["second.kernel"]) == pytest.approx(
        rms(grads["second"]["kernel"][...]), rel=1e-5
    )
    assert reading.first_not_finite() is None


def test_leaves_classes_as_they_were() -> None:
    before = nnx.Linear.__call__, Toy.__call__
    probe(Toy(), X, Y)
    assert (nnx.Linear.__call__, Toy.__call__) == before
    broken = Toy()
    broken.second = nnx.Linear(5, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="dot_general"):
        probe(broken, X, Y)
    assert (nnx.Linear.__call__, Toy.__call__) == before


def test_a_layer_that_runs_twice_is_noted_twice() -> None:
    model = Toy()
    model.second = model.first = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    reading = probe(model, X, jnp.ones((5, 3)))
    assert list(reading.activations) == ["first", "first'"]


# what is broken, and what is named
BROKEN = [
    (lambda model: model.first.kernel, jnp.inf, X, "the output of first"),
    (lambda model: model.second.kernel, jnp.nan, X, "the output of second"),
    # tanh hides the infinity, but not from its own input
    (lambda model: model.first.bias, jnp.inf, X, "the output of first"),
]


@pytest.mark.parametrize(("where", "value", "x", "named"), BROKEN)
def test_names_the_first_layer_that_is_not_finite(where, value, x, named) -> None:
    model = Toy()
    variable = where(model)
    variable[...] = variable[...].at[0].set(value)
    assert probe(model, x, Y).first_not_finite() == named


def test_names_a_gradient_that_is_not_finite() -> None:
    class Root(nnx.Module):
        """The square root of zero is finite, its gradient is not."""

        def __init__(self):
            self.linear = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))

        def loss(self, ids, targets, *, deterministic):
            return jnp.sqrt(jnp.abs(self.linear(ids))).sum()

    assert probe(Root(), jnp.zeros((5, 3)), Y).first_not_finite() == (
        "the gradient at the output of linear"
    )


def test_names_the_loss() -> None:
    class Log(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))

        def loss(self, ids, targets, *, deterministic):
            return jnp.log(jnp.abs(self.linear(ids))).sum()

    assert probe(Log(), jnp.zeros((5, 3)), Y).first_not_finite() == "the loss"
