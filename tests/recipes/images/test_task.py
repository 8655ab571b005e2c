"""Every format trains, stores and multiplies what it says, and a run leaves its results behind."""

from __future__ import annotations

import io
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from recipes.registry import load_any_config
from recipes.errors import RecipeError
from recipes.run.metrics import Metrics, read_metrics
from recipes.images import train as train_module
from recipes.images.config import Format, MnistConfig
from recipes.images.data import load_dataset
from recipes.images.model import build
from recipes.images.train import (
    STORAGE,
    Outcome,
    Program,
    in_format,
    make_program,
    measure,
    train,
)
from unitscale import ScaledArray, to_array
from unitscale.transforms import scalify

from .classifiers import logits, losses
from .idx import CLASSES, write_config

MakeConfig = Callable[..., MnistConfig]
FORMATS: tuple[Format, ...] = get_args(Format)


@pytest.fixture
def make(tmp_path: Path) -> MakeConfig:
    """The tiny config with overrides."""
    path = write_config(tmp_path)

    def load(*overrides: str) -> MnistConfig:
        config = load_any_config(path, overrides)
        assert isinstance(config, MnistConfig)
        return config

    return load


def program_of(config: MnistConfig) -> tuple[Program, np.ndarray, np.ndarray]:
    """The program of a config, and a batch."""
    data = load_dataset(config.data)
    images, labels = (array[: config.data.batch_size] for array in data.train)
    return make_program(config, data), data.standardized(images), labels


def run(config: MnistConfig, *, fresh: bool = False) -> tuple[Outcome, str]:
    output = io.StringIO()
    outcome = train(config, fresh=fresh, console=Console(file=output, width=200))
    return outcome, output.getvalue()


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


@pytest.mark.parametrize(("kind", "number_format"), PRODUCTS)
def test_what_is_multiplied(make: MakeConfig, kind: str, number_format: Format) -> None:
    config = make(f"model.kind={kind}", f"format={number_format}")
    plain, images, labels = program_of(config)
    scaled = in_format(plain, number_format)
    expected = PRODUCTS[kind, number_format]
    found = operand_types(scaled.step, scaled.state, images, labels)
    assert {name: dict(counts) for name, counts in found.items() if counts} == expected


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_scales_propagate_through_the_whole_step(
    make: MakeConfig, kind: str, optimizer: str
) -> None:
    config = make(f"model.kind={kind}", f"optimizer.name={optimizer}", "format=float16")
    plain, images, labels = program_of(config)
    state = in_format(plain, "float16").state
    assert scalify(plain.step).report(state, images, labels) == []


@pytest.mark.parametrize("number_format", [f for f in FORMATS if f not in ("plain", "fp8")])
def test_the_first_step_is_within_rounding_of_numpy(
    make: MakeConfig, number_format: Format
) -> None:
    config = make(f"format={number_format}")
    plain, images, labels = program_of(config)
    program = in_format(plain, number_format)
    state, loss = program.step(program.state, images, labels)

    model = build(config, images.shape[1:], CLASSES)
    expected = losses(model, images, labels).mean()
    unit = float(jnp.finfo(STORAGE[number_format]).eps) / 2
    # Images, two kernels, and the results of two products and two sums with biases round once
    # each, relative to the magnitudes; the loss follows the two largest errors of logits, and
    # itself takes less than eight more roundings of numbers of its size or the logits'.
    magnitude = logits(model, images).magnitudes.max()
    tolerance = unit * (2 * 7 * magnitude + 8 * (magnitude + expected))
    assert abs(float(to_array(loss)) - expected) <= tolerance

    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ScaledArray))
    assert len(leaves) == 8  # kernels and biases, and the momentum of each
    for leaf in leaves:
        assert isinstance(leaf, ScaledArray)
        assert leaf.dtype == STORAGE[number_format]


def test_the_plain_step_follows_the_slope_of_numpy(make: MakeConfig) -> None:
    config = make("optimizer.momentum=0.0", "optimizer.learning_rate=0.125")
    program, images, labels = program_of(config)
    graphdef, _ = nnx.split(build(config, images.shape[1:], CLASSES))
    state, _ = jax.jit(program.step)(program.state, images, labels)
    before, after = (
        [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(s.params)]
        for s in (program.state, state)
    )
    gradient = [
        (b - a) / config.optimizer.learning_rate for b, a in zip(before, after, strict=True)
    ]
    structure = jax.tree.structure(program.state.params)

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


# Compilation takes most of the time, so the fast part of the tests has what is least alike.
LEARNS = [
    pytest.param(kind, name, id=f"{kind}-{name}", marks=[] if quick else [pytest.mark.slow])
    for kind, name, quick in [
        ("mlp", "plain", True),
        ("mlp", "float32", False),
        ("mlp", "bfloat16", False),
        ("mlp", "float16", True),
        ("mlp", "fp8", True),
        ("cnn", "plain", True),
        ("cnn", "float32", False),
        ("cnn", "float16", False),
        ("cnn", "fp8", True),
    ]
]


@pytest.mark.parametrize(("kind", "number_format"), LEARNS)
def test_it_learns(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch, kind: str, number_format: str
) -> None:
    monkeypatch.setattr(train_module, "plot_loss", lambda *args, **kwargs: None)
    config = make(f"model.kind={kind}", f"format={number_format}", "train.epochs=6")
    outcome, said = run(config)
    assert outcome.accuracy == 1.0
    assert f"format {number_format}" in said
    assert "test accuracy 1.0000; metrics and plot are in" in said


@pytest.mark.slow
def test_adam_learns_in_float16(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "plot_loss", lambda *args, **kwargs: None)
    optimizer = "optimizer={name: adam, learning_rate: 0.01}"
    assert run(make("format=float16", optimizer, "train.epochs=6"))[0].accuracy == 1.0


@pytest.mark.parametrize("size", [1, 7, 16])
def test_accuracy_and_loss_of_a_split_that_fills_no_batch(make: MakeConfig, size: int) -> None:
    config = make("optimizer.momentum=0.0")
    data = load_dataset(config.data)
    program = in_format(make_program(config, data), "plain")
    model, images = build(config, data.test.images.shape[1:], CLASSES), data.test.images
    images = data.standardized(images)
    accuracy, loss = measure(program, program.state.params, data, size)
    values = logits(model, images).values
    assert accuracy == (values.argmax(-1) == data.test.labels).mean()
    # 20 losses of 30 + 16 terms in logits, softmax and sum.
    assert loss == pytest.approx(losses(model, images, data.test.labels).mean(), rel=2**-24 * 100)


def test_what_a_run_leaves_behind(make: MakeConfig) -> None:
    config = make()
    outcome, said = run(config)
    assert outcome == (Path(config.train.runs_dir) / "tiny", 12, outcome.accuracy, None)
    names = {path.name for path in outcome.folder.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "tensorboard", "loss.png"}
    assert load_any_config(outcome.folder / "config.yaml") == config
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [4, 8, 12]
    tests = [row for row in rows if "test_accuracy" in row]
    assert [row["step"] for row in tests] == [6, 12]
    assert tests[-1]["test_accuracy"] == outcome.accuracy
    assert "tiny: 547 parameters, 96 training images, 3 classes, format plain" in said
    assert "step 12/12  loss" in said
    assert "images/s" in said
    assert f"epoch 2/2  test accuracy {outcome.accuracy:.4f}" in said

    again, _ = run(config)
    timeless = [
        [{k: v for k, v in row.items() if k != "images_per_second"} for row in each]
        for each in (rows, read_metrics(again.folder / "metrics.jsonl"))
    ]
    assert timeless[0] == timeless[1]
    with pytest.raises(RecipeError, match=r"of another config:\n  format: plain -> fp8\nchange"):
        run(make("format=fp8"))


def test_a_signal_stops_the_run(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Metrics.write

    def stop(self: Metrics, step: int, **values: float) -> None:
        write(self, step, **values)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Metrics, "write", stop)
    outcome, said = run(make())
    assert outcome[1:] == (4, None, signal.SIGTERM)
    assert "stopped by SIGTERM after step 4; run the same command to start again" in said


def test_a_loss_that_is_not_finite_stops_the_run(make: MakeConfig) -> None:
    with pytest.raises(RecipeError, match=r"the loss after step 4 is not finite; lower") as caught:
        run(make("optimizer.learning_rate=1e38"))
    assert caught.value.exit_code == 1


def test_a_full_disk(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Metrics, step: int, **values: float) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Metrics, "write", full)
    with pytest.raises(
        RecipeError, match=r"cannot write to .*tiny: No space left on dev"
    ) as caught:
        run(make())
    assert caught.value.exit_code == 1
