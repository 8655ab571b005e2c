"""The probe measures each layer without changing the model; plots."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from flax import nnx

from recipes.run.probe import Reading, plot_rms, probe


class Toy(nnx.Module):
    """Two linear layers with the loss mean(output * target)."""

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
    model, before = Toy(), (nnx.Linear.__call__, Toy.__call__)
    reading = probe(model, X, Y)
    assert (nnx.Linear.__call__, Toy.__call__) == before  # as they were
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
    expected = {
        f"{layer}.{name}": rms(grads[layer][name][...])
        for layer in ("first", "second")
        for name in ("kernel", "bias")
    }
    assert {k: float(x) for k, x in reading.weights.items()} == pytest.approx(expected, rel=1e-5)
    assert reading.first_not_finite() is None


def test_a_layer_that_runs_twice_is_noted_twice() -> None:
    model = Toy()
    model.second = model.first = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    reading = probe(model, X, jnp.ones((5, 3)))
    assert list(reading.activations) == ["first", "first'"]


class Zero(nnx.Module):
    """A layer whose output is zero, of which the loss is a sum of `function`."""

    def __init__(self, function: Any):
        self.linear = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))
        self.function = function

    def loss(self, ids, targets, *, deterministic):
        return self.function(jnp.abs(self.linear(ids))).sum()


def test_names_what_is_not_finite_first() -> None:
    # tanh hides the infinity, but not from its own input
    for layer, value in (("first", jnp.inf), ("second", jnp.nan)):
        model = Toy()
        kernel = getattr(model, layer).kernel
        kernel[...] = kernel[...].at[0].set(value)
        assert probe(model, X, Y).first_not_finite() == f"the output of {layer}"
    # The square root of zero is finite, its gradient is not.
    at_output = "the gradient at the output of linear"
    for function, named in ((jnp.sqrt, at_output), (jnp.log, "the loss")):
        assert probe(Zero(function), jnp.zeros((5, 3)), Y).first_not_finite() == named
    layers = {"a": jnp.float32(1.0)}
    reading = Reading(jnp.float32(1.0), layers, layers, {"a.kernel": jnp.float32(jnp.nan)})
    assert reading.first_not_finite() == "the gradient of a.kernel"


def test_plots_an_rms_also_if_it_is_not_finite(tmp_path: Path) -> None:
    layers = {f"layers.{value}": jnp.float32(value) for value in (1.5, 0.0, np.nan, np.inf)}
    reading = Reading(jnp.float32(2.0), layers, layers, layers)
    path = plot_rms(tmp_path, {"at initialization": reading, "after 3 steps": reading})
    shown = matplotlib.image.imread(path)[..., :3]
    assert (shown.min(-1) < 0.9).sum() > 1000  # pixels that are not white
