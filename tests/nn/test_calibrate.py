import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from unitscale import nn
from unitscale.nn import AmaxState
from unitscale.quant import Static

from .delayed import CONFIG, STEP, Net, X, loss, same, scale_of, scales, states


def test_calibration_sets_static_scales() -> None:
    model = Net(dataclasses.replace(CONFIG, strategy=Static(margin=1)))
    before = nnx.state(model, nnx.Not(AmaxState))
    before = jax.tree.map(lambda x: x.copy(), before)
    nn.calibrate(model, [X, X * 32, X / 32], loss)
    assert same(before, nnx.state(model, nnx.Not(AmaxState)))
    found = scales(model)["first.dot_general.state"]
    assert found[0] == 2 * scale_of(X * 32)
    assert found[1] == 2 * scale_of(model.first.kernel[...])
    assert found[2] != 1
    # Another step does not move them.
    STEP(model, X * 1000)
    assert scales(model)["first.dot_general.state"] == found
    assert not any(state.calibrating for state in states(model).values())


def test_calibration_reaches_tiny_cotangents_at_once() -> None:
    """At scale 1 they would all be zero, layer after layer: nothing to measure."""

    def tiny(model, x):
        return loss(model, x) * 1e-12

    model, cold, step = Net(), Net(), nnx.jit(nn.value_and_grad(tiny))
    nn.calibrate(model, [X], tiny)
    step(cold, X)
    assert 0 < scales(model)["first.dot_general.state"][2] < 2.0**-40
    assert scales(cold)["first.dot_general.state"][2] == 1
    _, grads = step(model, X)
    assert np.any(grads["first"]["kernel"][...])


def test_calibration_without_a_loss_is_forward_only() -> None:
    model = Net()
    nn.calibrate(model, iter([X]))
    for path, found in scales(model).items():
        assert found[0] != 1, path
        assert found[2] == 1, path


class WithNumber(Net):
    """Returns a number of Python beside its output, as models do for a loss that is absent."""

    def __call__(self, x):
        return super().__call__(x), 0.0


def test_calibration_of_a_model_that_returns_a_number_too() -> None:
    model, alone = WithNumber(), Net()
    nn.calibrate(model, [X])
    nn.calibrate(alone, [X])
    assert scales(model) == scales(alone)


def test_calibration_errors() -> None:
    with pytest.raises(ValueError, match="calibrate: batches is empty"):
        nn.calibrate(Net(), [])
    with pytest.raises(ValueError, match="calibrate: the model holds no scales; give its layers"):
        nn.calibrate(Net(None), [X])
    with pytest.raises(TypeError) as told:
        nn.calibrate(Net(), [(X, X[:, 0])])
    assert "got a tuple of 2. Give loss=" in told.value.__notes__[-1]
