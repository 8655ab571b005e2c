"""Every format trains, stores and multiplies what it says, and a run is resumed and spread."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.images import task
from recipes.images.config import ImagesConfig
from recipes.registry import load_kind
from recipes.run.precision import fed
from recipes.run.report import read_metrics
from recipes.run.state import init_state
from recipes.run.step import make_train_step
from tests.products import products
from unitscale import ScaledArray, scalify

from ..idx import write_config
from ..runs import resumes_bit_for_bit, run
from .classifiers import logits, losses

MakeConfig = Callable[..., ImagesConfig]
FORMATS = {
    "plain": "precision=float32",
    **{name: f"precision.scalify={name}" for name in ("float32", "bfloat16", "float16")},
    "fp8": "precision=scalify_fp8",
}


@pytest.fixture
def make(tmp_path: Path) -> MakeConfig:
    """The tiny config with overrides."""
    path = write_config(tmp_path)
    return lambda *overrides: load_kind(ImagesConfig, path, overrides)


def first_step(config: ImagesConfig) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """The step of a config, the state before it, and a batch."""
    graphdef, optimizer, state = init_state(config)
    step = make_train_step(graphdef, optimizer, config.precision)
    return step, state, next(task.load_data(config).training(0))


DOT, CONVOLUTION = "dot_general", "conv_general_dilated"
HALF, E4M3 = ("float16", "float16"), ("float8_e4m3fn", "float8_e4m3fn")
MIXED = "float8_e4m3fn", "float8_e5m2"
# Each layer has a product forward, one for its kernel's gradient, one for its input's; but images
# have no gradient. A convolution takes operands of one type.
PRODUCTS = {
    ("mlp", "float16"): {(DOT, *HALF): 5},
    ("mlp", "fp8"): {(DOT, *E4M3): 2, (DOT, *MIXED): 3},
    ("cnn", "float16"): {(DOT, *HALF): 6, (CONVOLUTION, *HALF): 5},
    ("cnn", "fp8"): {(DOT, *E4M3): 2, (DOT, *MIXED): 4, (CONVOLUTION, *E4M3): 5},
}


@pytest.mark.parametrize(("kind", "name"), PRODUCTS)
def test_what_is_multiplied(make: MakeConfig, kind: str, name: str) -> None:
    step, *inputs = first_step(make(f"model.kind={kind}", FORMATS[name]))
    found = products(jax.make_jaxpr(step)(*inputs, np.int32(0)).jaxpr)
    assert Counter((name, *sorted(types)) for name, *types in found) == PRODUCTS[kind, name]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_scales_propagate_through_the_whole_step(
    make: MakeConfig, kind: str, optimizer: str
) -> None:
    config = make(f"model.kind={kind}", f"optimizer.name={optimizer}", FORMATS["float16"])
    graphdef, transformation, state = init_state(config)
    batch = fed(config.precision, next(task.load_data(config).training(0)))
    step = make_train_step(graphdef, transformation)
    assert scalify(step).report(state, batch, np.int32(0)) == []


@pytest.mark.parametrize("name", ["plain", "float32", "bfloat16", "float16"])
def test_the_first_step_is_within_rounding_of_numpy(make: MakeConfig, name: str) -> None:
    config = make(FORMATS[name])
    model: Any = task.build(config)
    step, state, (images, labels) = first_step(config)
    state, values = step(state, (images, labels), np.int32(0))

    expected = losses(model, images, labels).mean()
    dtype = "float32" if name == "plain" else name
    unit = float(jnp.finfo(dtype).eps) / 2
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
        assert isinstance(leaf, ScaledArray) == (name != "plain")
        assert leaf.dtype == dtype


ADAM = "optimizer={name: adam, learning_rate: 0.01}"
VIT = ("model.kind=vit", "optimizer={name: adam, umup: true, learning_rate: 0.1}")
LEARNS = {
    **{f"mlp-{name}": (words,) for name, words in FORMATS.items()},
    **{f"cnn-{name}": ("model.kind=cnn", words) for name, words in FORMATS.items()},
    "mlp-float16-adam": (FORMATS["float16"], ADAM),
    "vit-float32": VIT,
    "vit-fp8": (*VIT, "precision.policy=fp8"),
}
# Compilation takes most of the time, so the fast part of the tests has what is least alike.
QUICK = "mlp-plain", "cnn-fp8"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(words, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, words in LEARNS.items()
    ],
)
def test_it_learns(make: MakeConfig, overrides: tuple[str, ...]) -> None:
    outcome, _ = run(make(*overrides, "train={steps: 36, log_every: 1, checkpoint_every: 36}"))
    # Of 20 images; one lies so near to a boundary that rounding decides, as processors do it.
    assert outcome.scores["accuracy"] >= 0.95
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    first, *_, last = (row["loss"] for row in rows if "loss" in row)
    assert last < 0.5 * first


@pytest.mark.parametrize("size", [1, 7, 16])
def test_accuracy_is_over_all_test_images(make: MakeConfig, size: int) -> None:
    config = make(f"data.batch_size={size}")
    data = task.load_data(config)
    model: Any = task.build(config)
    found = logits(model, data.standardized(data.test.images)).values
    right = found.argmax(-1) == data.test.labels
    assert 0 < right.mean() < 1
    assert task.scores(config, data, model, Path()) == {"accuracy": right.mean()}


@pytest.mark.slow
def test_stopped_and_resumed_is_bit_for_bit_the_uninterrupted_run(make: MakeConfig) -> None:
    resumes_bit_for_bit(*(make("train.log_every=1", f"name={name}") for name in ("one", "other")))


def test_a_run_on_a_mesh_is_that_of_one_device(make: MakeConfig) -> None:
    one, _ = run(make("name=one"))
    many, _ = run(make("name=many", "mesh={data: 2, fsdp: 4}"))
    assert many.validation_loss == pytest.approx(one.validation_loss, rel=1e-5)
    assert many.scores == one.scores


def test_a_batch_is_what_was_announced(make: MakeConfig) -> None:
    config = make()
    announced = [(part.shape, part.dtype) for part in task.abstract_batch(config)]
    for batches in (task.load_data(config).training(0), task.load_data(config).validation()):
        assert [(part.shape, part.dtype) for part in next(batches)] == announced
