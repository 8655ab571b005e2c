"""Every format trains, stores and multiplies what it says, and a run is resumed and spread."""

from __future__ import annotations

import io
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from recipes import train as train_module
from recipes.images import task
from recipes.images.config import ImagesConfig
from recipes.registry import load_kind
from recipes.run.metrics import Metrics, read_metrics
from recipes.run.scaling import fed
from recipes.run.state import init_state, load_trained
from recipes.run.step import make_train_step
from recipes.train import Outcome, train
from unitscale import ScaledArray, scalify

from ..idx import write_config
from .classifiers import logits, losses

MakeConfig = Callable[..., ImagesConfig]
FORMATS = {
    "plain": "scalify=null",
    **{name: f"scalify={{storage: {name}}}" for name in ("float32", "bfloat16", "float16")},
    "fp8": "scalify={products: float8_e4m3fn, gradients: float8_e5m2}",
}


@pytest.fixture
def make(tmp_path: Path) -> MakeConfig:
    """The tiny config with overrides."""
    path = write_config(tmp_path)
    return lambda *overrides: load_kind(ImagesConfig, path, overrides)


@pytest.fixture(autouse=True)
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "plot_run", lambda run: None)


def run(config: ImagesConfig) -> Outcome:
    return train(config, console=Console(file=io.StringIO()))


def first_step(config: ImagesConfig) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """The step of a config, the state before it, and a batch."""
    graphdef, optimizer, state = init_state(config)
    step = make_train_step(graphdef, optimizer, config.scalify)
    return step, state, next(task.load_data(config).training(0))


def equations(jaxpr: jax.extend.core.Jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()),
            is_leaf=lambda x: isinstance(x, jax.extend.core.ClosedJaxpr),
        ):
            if isinstance(inner, jax.extend.core.ClosedJaxpr):
                yield from equations(inner.jaxpr)


def operand_types(function: Callable[..., Any], *args: Any) -> dict[str, Counter]:
    """How many products of which operand types a program has, by primitive."""
    found: dict[str, Counter] = {"dot_general": Counter(), "conv_general_dilated": Counter()}
    for eqn in equations(jax.make_jaxpr(function)(*args).jaxpr):
        if eqn.primitive.name in found:
            types = sorted(operand.aval.dtype.name for operand in eqn.invars)
            found[eqn.primitive.name]["*".join(types)] += 1
    return found


HALF = "float16*float16"
E4M3, MIXED = "float8_e4m3fn*float8_e4m3fn", "float8_e4m3fn*float8_e5m2"
# Each layer has a product forward, one for its kernel's gradient, one for its input's; but images
# have no gradient.
PRODUCTS = {
    ("mlp", "float16"): {"dot_general": {HALF: 5}},
    ("mlp", "fp8"): {"dot_general": {E4M3: 2, MIXED: 3}},
    ("cnn", "float16"): {"dot_general": {HALF: 6}, "conv_general_dilated": {HALF: 5}},
    ("cnn", "fp8"): {
        "dot_general": {E4M3: 2, MIXED: 4},
        "conv_general_dilated": {E4M3: 5},
    },
}


@pytest.mark.parametrize(("kind", "name"), PRODUCTS)
def test_what_is_multiplied(make: MakeConfig, kind: str, name: str) -> None:
    step, state, batch = first_step(make(f"model.kind={kind}", FORMATS[name]))
    found = operand_types(step, state, batch, np.int32(0))
    assert {key: dict(counts) for key, counts in found.items() if counts} == PRODUCTS[kind, name]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_scales_propagate_through_the_whole_step(
    make: MakeConfig, kind: str, optimizer: str
) -> None:
    config = make(f"model.kind={kind}", f"optimizer.name={optimizer}", FORMATS["float16"])
    graphdef, transformation, state = init_state(config)
    batch = fed(config.scalify, next(task.load_data(config).training(0)))
    step = make_train_step(graphdef, transformation)
    assert scalify(step).report(state, batch, np.int32(0)) == []


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_first_step_is_within_rounding_of_numpy(make: MakeConfig, name: str) -> None:
    config = make(FORMATS[name])
    model = task.build(config)
    step, state, (images, labels) = first_step(config)
    state, values = step(state, (images, labels), np.int32(0))

    expected = losses(model, images, labels).mean()
    unit = float(jnp.finfo(name).eps) / 2
    # Images, two kernels, and the results of two products and two sums with biases round once
    # each, relative to the magnitudes; the loss follows the two largest errors of logits, and
    # itself takes less than eight more roundings of numbers of its size or the logits'.
    magnitude = logits(model, images).magnitudes.max()
    tolerance = unit * (2 * 7 * magnitude + 8 * (magnitude + expected))
    assert abs(float(values["loss"]) - expected) <= tolerance

    kept = (state.params, state.opt_state)
    leaves = jax.tree.leaves(kept, is_leaf=lambda x: isinstance(x, ScaledArray))
    floating = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert len(floating) == 8  # kernels and biases, and the momentum of each
    for leaf in floating:
        assert isinstance(leaf, ScaledArray)
        assert leaf.dtype == name


def test_the_step_follows_the_slope_of_numpy(make: MakeConfig) -> None:
    config = make("optimizer={b1: 0.0, learning_rate: 0.125}")
    graphdef, _ = nnx.split(task.build(config))
    step, state, (images, labels) = first_step(config)
    structure = jax.tree.structure(state.params)
    before = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(state.params)]
    state, _ = step(state, (images, labels), np.int32(0))
    after = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(state.params)]
    gradient = [(b - a) / 0.125 for b, a in zip(before, after, strict=True)]

    def loss(distance: float, direction: list[np.ndarray]) -> float:
        moved = [b + distance * d for b, d in zip(before, direction, strict=True)]
        model = nnx.merge(graphdef, jax.tree.unflatten(structure, moved))
        return float(losses(model, images, labels).mean())

    rng = np.random.default_rng(0)
    for _ in range(3):
        direction = [rng.normal(size=b.shape) for b in before]
        slope = (loss(1e-6, direction) - loss(-1e-6, direction)) / 2e-6
        terms = [np.abs(g * d).sum() for g, d in zip(gradient, direction, strict=True)]
        # The update rounds by 2**-24 of a parameter, and is divided by the learning rate; sums of
        # fewer than 64 terms by as much each.
        rounding = sum(np.abs(b * d).sum() for b, d in zip(before, direction, strict=True))
        found = sum((g * d).sum() for g, d in zip(gradient, direction, strict=True))
        assert abs(found - slope) <= 2**-24 * (rounding / 0.125 + 64 * sum(terms)) + 1e-8


ADAM = "optimizer={name: adam, learning_rate: 0.01}"
VIT = ("model.kind=vit", "optimizer={name: adam, umup: true, learning_rate: 0.2}")
# Compilation takes most of the time, so the fast part of the tests has what is least alike.
LEARNS = {
    "mlp-plain": (FORMATS["plain"],),
    "mlp-fp8": (FORMATS["fp8"],),
    "cnn-fp8": ("model.kind=cnn", FORMATS["fp8"]),
    "vit-fp8": (*VIT, "policy=fp8"),
}
LEARNS_TOO = {
    **{f"mlp-{name}": (FORMATS[name],) for name in ("float32", "bfloat16", "float16")},
    **{f"cnn-{n}": ("model.kind=cnn", FORMATS[n]) for n in ("plain", "float32", "float16")},
    "mlp-float16-adam": (FORMATS["float16"], ADAM),
    "vit-float32": VIT,
}


@pytest.mark.parametrize(
    "overrides",
    [
        *(pytest.param(words, id=name) for name, words in LEARNS.items()),
        *(
            pytest.param(words, id=name, marks=pytest.mark.slow)
            for name, words in LEARNS_TOO.items()
        ),
    ],
)
def test_it_learns(make: MakeConfig, overrides: tuple[str, ...]) -> None:
    outcome = run(make(*overrides, "train={steps: 36, log_every: 1, checkpoint_every: 36}"))
    assert outcome.scores == {"accuracy": 1.0}
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    first, *_, last = (row["loss"] for row in rows if "loss" in row)
    assert last < 0.5 * first


@pytest.mark.parametrize("size", [1, 7, 16])
def test_accuracy_is_over_all_test_images(make: MakeConfig, size: int) -> None:
    config = make(f"data.batch_size={size}")
    data, model = task.load_data(config), task.build(config)
    test = data.dataset.test
    right = logits(model, data.dataset.standardized(test.images)).values.argmax(-1) == test.labels
    assert 0 < right.mean() < 1
    assert task.scores(config, data, model, Path()) == {"accuracy": right.mean()}


class StopAfter(Metrics):
    """Sends SIGTERM to this process when step 4 has been logged."""

    def write(self, step: int, **values: float) -> None:
        super().write(step, **values)
        signal.raise_signal(signal.SIGTERM)


def test_stopped_and_resumed_is_bit_for_bit_the_uninterrupted_run(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = (make(FORMATS["float16"], f"name={name}") for name in ("whole", "stopped"))
    expected = run(whole)
    with monkeypatch.context() as patch:
        patch.setattr("recipes.run.metrics.Metrics", StopAfter)
        assert run(stopped).step == 5
    resumed = run(stopped)
    assert (resumed.step, resumed.scores) == (12, expected.scores)
    ends = [jax.tree.leaves(load_trained(config, print)[1]) for config in (whole, stopped)]
    for one, other in zip(*ends, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_a_run_on_a_mesh_is_that_of_one_device(make: MakeConfig) -> None:
    one, many = (run(make(f"name={n}", f"mesh={mesh}")) for n, mesh in MESHES.items())
    assert many.validation_loss == pytest.approx(one.validation_loss, rel=1e-5)
    assert many.scores == one.scores


MESHES = {"one": "null", "many": "{data: 2, fsdp: 4}"}


def test_a_batch_is_what_was_announced(make: MakeConfig) -> None:
    config = make()
    announced = [(part.shape, part.dtype) for part in task.abstract_batch(config)]
    for batches in (task.load_data(config).training(0), task.load_data(config).validation()):
        assert [(part.shape, part.dtype) for part in next(batches)] == announced
