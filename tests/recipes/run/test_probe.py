"""The probe measures each layer without changing the model; plots."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from flax import nnx

from recipes.run.folder import Metrics
from recipes.run.probe import Reading, plot_loss, plot_rms, probe


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
    expected = {
        f"{layer}.{name}": rms(grads[layer][name][...])
        for layer in ("first", "second")
        for name in ("kernel", "bias")
    }
    assert {k: float(x) for k, x in reading.weights.items()} == pytest.approx(expected, rel=1e-5)
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


@pytest.mark.parametrize(
    ("layer", "name", "value"),
    # tanh hides the infinity, but not from its own input
    [("first", "kernel", jnp.inf), ("second", "kernel", jnp.nan)],
)
def test_names_the_first_layer_that_is_not_finite(layer: str, name: str, value: float) -> None:
    model = Toy()
    variable = getattr(getattr(model, layer), name)
    variable[...] = variable[...].at[0].set(value)
    assert probe(model, X, Y).first_not_finite() == f"the output of {layer}"


@pytest.mark.parametrize(
    ("function", "named"),
    # The square root of zero is finite, its gradient is not.
    [(jnp.sqrt, "the gradient at the output of linear"), (jnp.log, "the loss")],
)
def test_names_a_loss_or_gradient_that_is_not_finite(function: Any, named: str) -> None:
    class Zero(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))

        def loss(self, ids, targets, *, deterministic):
            return function(jnp.abs(self.linear(ids))).sum()

    assert probe(Zero(), jnp.zeros((5, 3)), Y).first_not_finite() == named


def test_names_a_weight_gradient_that_is_not_finite() -> None:
    layers = {"a": jnp.float32(1.0)}
    reading = Reading(jnp.float32(1.0), layers, layers, {"a.kernel": jnp.float32(jnp.nan)})
    assert reading.first_not_finite() == "the gradient of a.kernel"


def ink(path: Path) -> int:
    """Count the pixels that are not white."""
    return int((matplotlib.image.imread(path)[..., :3].min(-1) < 0.9).sum())


def test_plots_the_loss_however_much_there_is(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    empty = ink(plot_loss(tmp_path, per="token"))
    for step in range(1, 9):
        metrics.write(step, loss=3.0 / step)
    metrics.write(8, validation_loss=1.0)
    metrics.close()
    assert plot_loss(tmp_path, per="token") == tmp_path / "loss.png"
    assert ink(tmp_path / "loss.png") > empty


def test_plots_an_rms_also_if_it_is_not_finite(tmp_path: Path) -> None:
    values = (1.5, 0.0, float("nan"), float("inf"))
    layers = {f"layers.{i}": jnp.float32(value) for i, value in enumerate(values)}
    reading = Reading(jnp.float32(2.0), layers, layers, layers)
    path = plot_rms(tmp_path, {"at initialization": reading, "after 3 steps": reading})
    assert path == tmp_path / "rms.png"
    assert ink(path) > 1000
