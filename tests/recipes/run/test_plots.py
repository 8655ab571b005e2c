"""Plots are drawn from what is there, also when it is little or not finite."""

from pathlib import Path

import jax.numpy as jnp
import matplotlib.image
import pytest

from recipes.run.metrics import Metrics
from recipes.run.plots import plot_loss, plot_rms
from recipes.run.probe import Reading


def ink(path: Path) -> int:
    """The number of pixels that are not white."""
    return int((matplotlib.image.imread(path)[..., :3].min(-1) < 0.9).sum())


def test_loss(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.close()
    empty = ink(plot_loss(tmp_path, per="token"))
    metrics = Metrics(tmp_path)
    for step in range(1, 9):
        metrics.write(step, loss=3.0 / step)
    metrics.write(8, validation_loss=1.0)
    metrics.close()
    assert plot_loss(tmp_path, per="token") == tmp_path / "loss.png"
    assert ink(tmp_path / "loss.png") > empty


@pytest.mark.parametrize("value", [1.0, 0.0, float("nan"), float("inf")])
def test_rms(tmp_path: Path, value: float) -> None:
    layers = {"embed": jnp.float32(1.5), "layers.0": jnp.float32(value)}
    reading = Reading(jnp.float32(2.0), layers, layers, layers)
    path = plot_rms(tmp_path, {"at initialisation": reading, "after 3 steps": reading})
    assert path == tmp_path / "rms.png"
    assert ink(path) > 1000
