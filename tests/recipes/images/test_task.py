"""Configs and commands of recipe images; formats of storage and matmuls."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.cli import main
from recipes.errors import RecipeError
from recipes.images import task
from recipes.images.config import ImagesConfig
from recipes.registry import load_config, load_kind
from recipes.run.folder import read_metrics
from recipes.run.state import fed, init_state
from recipes.run.step import make_train_step
from tests.products import products
from unitscale import ScaledArray, scalify

from ..configs import refuses_configs
from ..idx import write_config
from ..runs import resumes_bit_for_bit, run
from .test_model import logits, magnitudes

MakeConfig = Callable[..., ImagesConfig]
FORMATS = {
    "plain": "precision=float32",
    **{name: f"precision.scalify={name}" for name in ("bfloat16", "float16")},
    "fp8": "precision=scalify_fp8",
}


@pytest.fixture
def make(tmp_path: Path) -> MakeConfig:
    """Load the tiny config with overrides."""
    path = write_config(tmp_path)
    return lambda *overrides: load_kind(ImagesConfig, path, overrides)


def first_step(config: ImagesConfig) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """Return the step of a config, the state before it, and a batch."""
    graphdef, optimizer, state = init_state(config)
    step = make_train_step(graphdef, optimizer, config)
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


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*k, marks=[] if k == ("cnn", "fp8") else pytest.mark.slow) for k in PRODUCTS],
)
def test_what_is_multiplied(make: MakeConfig, kind: str, name: str) -> None:
    step, *inputs = first_step(make(f"model.kind={kind}", FORMATS[name]))
    found = products(jax.make_jaxpr(step)(*inputs, np.int32(0)).jaxpr)
    assert Counter((name, *sorted(types)) for name, *types in found) == PRODUCTS[kind, name]


def test_scales_propagate_through_the_whole_step(make: MakeConfig) -> None:
    config = make("model.kind=cnn", "optimizer.name=adam", FORMATS["float16"])
    graphdef, transformation, state = init_state(config)
    batch = fed(config.precision, next(task.load_data(config).training(0)))
    step = make_train_step(graphdef, transformation)
    assert scalify(step).report(state, batch, np.int32(0)) == []


@pytest.mark.parametrize(
    "name", ["float16", *(pytest.param(n, marks=pytest.mark.slow) for n in ("plain", "bfloat16"))]
)
def test_the_first_step_is_within_rounding_of_numpy(make: MakeConfig, name: str) -> None:
    config = make(FORMATS[name])
    model: Any = task.build(config)
    step, state, (images, labels) = first_step(config)
    state, found = step(state, (images, labels), np.int32(0))

    values = logits(model, images)
    picked = values[np.arange(len(labels)), labels]
    expected = (np.log(np.exp(values).sum(-1)) - picked).mean()
    dtype = "float32" if name == "plain" else name
    unit = float(jnp.finfo(dtype).eps) / 2
    # Images, two kernels, and the results of two products and two sums with biases round once
    # each, relative to the magnitudes; the loss follows the two largest errors of logits, and
    # itself takes less than eight more roundings of numbers of its size or the logits'.
    magnitude = magnitudes(model, images).max()
    tolerance = unit * (2 * 7 * magnitude + 8 * (magnitude + expected))
    assert abs(float(found["loss"]) - expected) <= tolerance

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
    **{f"cnn-{name}": ("model.kind=cnn", FORMATS[name]) for name in ("plain", "fp8")},
    "mlp-float16-adam": (FORMATS["float16"], ADAM),
    "vit-fp8": (*VIT, "precision.policy=fp8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", LEARNS.values(), ids=LEARNS)
def test_it_learns(make: MakeConfig, overrides: tuple[str, ...]) -> None:
    outcome, _ = run(make(*overrides, "train={steps: 36, log_every: 1, checkpoint_every: 36}"))
    # Of 20 images; one lies so near to a boundary that rounding decides, as processors do it.
    assert outcome.scores["accuracy"] >= 0.95
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    first, *_, last = (row["loss"] for row in rows if "loss" in row)
    assert last < 0.5 * first


def test_accuracy_is_over_all_test_images(make: MakeConfig) -> None:
    config = make("data.batch_size=7")
    data = task.load_data(config)
    model: Any = task.build(config)
    found = logits(model, data.standardized(data.test.images))
    right = found.argmax(-1) == data.test.labels
    assert 0 < right.mean() < 1
    assert task.scores(config, data, model, Path()) == {"accuracy": right.mean()}


@pytest.mark.slow
def test_stopped_and_resumed_is_bit_for_bit_the_uninterrupted_run(make: MakeConfig) -> None:
    resumes_bit_for_bit(*(make("train.log_every=1", f"name={name}") for name in ("one", "other")))


def test_a_batch_is_what_was_announced(make: MakeConfig) -> None:
    config = make()
    announced = [(part.shape, part.dtype) for part in task.abstract_batch(config)]
    batch = next(task.load_data(config).training(0))
    assert [(part.shape, part.dtype) for part in batch] == announced


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_config(tmp_path)


IS_VIT = "model.kind=vit"
# overrides, and what the message has to say
WRONG = [
    (["format=fp8"], r"format is not a key of the config"),
    (["optimizer.momentum=0.5"], r"optimizer\.momentum is no longer .*; set optimizer\.b1"),
    (["precision.policy=fp8"], "policy"),
    (["optimizer.umup=true"], r"optimizer\.umup"),
    ([IS_VIT, "precision=scalify_float16"], r"precision\.scalify"),
    (["model={kind: rnn}"], r"model\.kind .*'mlp', 'cnn' or 'vit'; got 'rnn'"),
]
test_wrong_value = refuses_configs(WRONG)


def test_unknown_recipe(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("recipe: imges\nname: x\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"recipe: expected one of .*images.*got 'imges'"):
        load_config(path)


@pytest.mark.slow
def test_commands(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(config_file), "train.steps=6"]
    assert main(["train", *words]) == 0
    trained = capsys.readouterr().out.splitlines()
    assert trained[-2].startswith("accuracy ")
    assert (config_file.parent / "runs" / "tiny" / "scores.json").exists()
    assert main(["evaluate", *words]) == 0
    loss, accuracy = capsys.readouterr().out.splitlines()
    assert f"{loss.removeprefix('step 6  ')} (over at most 16 batches;" in trained[-1]
    assert loss.endswith(" nats per image")
    assert accuracy == trained[-2]
    assert main(["generate", *words]) == 2
    assert "recipe images" in capsys.readouterr().err
    assert main(["describe", *words]) == 0
    assert "16 images in 16 examples" in capsys.readouterr().out
