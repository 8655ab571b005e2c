"""Configs and commands; every format trains, stores and multiplies what it says."""

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
from recipes.run.precision import fed
from recipes.run.report import read_metrics
from recipes.run.state import init_state
from recipes.run.step import make_train_step
from tests.products import products
from unitscale import ScaledArray, scalify

from ..configs import CONFIGS, FILES, refuses_configs
from ..idx import write_config
from ..runs import resumes_bit_for_bit, run
from .test_model import logits, magnitudes

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


@pytest.mark.parametrize(("kind", "name"), PRODUCTS)
def test_what_is_multiplied(make: MakeConfig, kind: str, name: str) -> None:
    step, *inputs = first_step(make(f"model.kind={kind}", FORMATS[name]))
    found = products(jax.make_jaxpr(step)(*inputs, np.int32(0)).jaxpr)
    assert Counter((name, *sorted(types)) for name, *types in found) == PRODUCTS[kind, name]


@pytest.mark.parametrize(("kind", "optimizer"), [("mlp", "sgd"), ("cnn", "adam")])
def test_scales_propagate_through_the_whole_step(
    make: MakeConfig, kind: str, optimizer: str
) -> None:
    config = make(f"model.kind={kind}", f"optimizer.name={optimizer}", FORMATS["float16"])
    graphdef, transformation, state = init_state(config)
    batch = fed(config.precision, next(task.load_data(config).training(0)))
    step = make_train_step(graphdef, transformation)
    assert scalify(step).report(state, batch, np.int32(0)) == []


@pytest.mark.parametrize("name", ["plain", "bfloat16", "float16"])
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
    **{f"mlp-{name}": (words,) for name, words in FORMATS.items()},
    **{f"cnn-{name}": ("model.kind=cnn", words) for name, words in FORMATS.items()},
    "mlp-float16-adam": (FORMATS["float16"], ADAM),
    "vit-float32": VIT,
    "vit-fp8": (*VIT, "precision.policy=fp8"),
}
# Compilation takes most of the time, so the fast part of the tests has what is least alike.
QUICK = ("cnn-fp8",)


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


@pytest.mark.parametrize("size", [7, 20])
def test_accuracy_is_over_all_test_images(make: MakeConfig, size: int) -> None:
    config = make(f"data.batch_size={size}")
    data = task.load_data(config)
    model: Any = task.build(config)
    found = logits(model, data.standardized(data.test.images))
    right = found.argmax(-1) == data.test.labels
    assert 0 < right.mean() < 1
    assert task.scores(config, data, model, Path()) == {"accuracy": right.mean()}


@pytest.mark.slow
def test_stopped_and_resumed_is_bit_for_bit_the_uninterrupted_run(make: MakeConfig) -> None:
    resumes_bit_for_bit(*(make("train.log_every=1", f"name={name}") for name in ("one", "other")))


@pytest.mark.slow
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


SHIPPED = [CONFIGS / "mnist/cnn.yaml", CONFIGS / "mnist/mlp.yaml", CONFIGS / "images/vit.yaml"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs(path: Path) -> None:
    config = load_kind(ImagesConfig, path, FILES["images"])
    assert config.name == config.model.kind == path.stem
    epoch = 60_000 // config.data.batch_size
    assert config.train.steps % epoch == 0
    assert config.train.eval_every == epoch
    with pytest.raises(RecipeError, match=r"data\.folder: expected a value"):
        load_config(path)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def test_the_config_of_an_earlier_version_is_read(make: MakeConfig) -> None:
    config = make()
    old = config.model_dump(mode="json")
    folder = old["data"].pop("folder")
    for key in ("train_images", "train_labels", "test_images", "test_labels"):
        old["data"][key] = f"{folder}/file"
    old["data"]["classes"] = None
    assert ImagesConfig.model_validate(ImagesConfig.upgraded(old)) == config


VIT = "model.kind=vit"
# overrides, and what the message has to say
WRONG = [
    (
        ["format=fp8"],
        r"format is no longer a key of the config; set precision\.scalify and",
    ),
    (["train.epochs=5"], r"train\.epochs is no longer a key of the config; set train\.steps"),
    (["optimizer.momentum=0.5"], r"optimizer\.momentum is no longer .*; set optimizer\.b1"),
    (["data.train_images=x"], r"data\.train_images is no longer .*; set data\.folder"),
    (["data.classes=9"], r"data\.classes is no longer a key of the config"),
    (["precision.policy=fp8"], r"an FP8 precision\.policy .* need a unitscale model"),
    (["precision.policy=float16"], r"precision\.policy needs model\.kind vit"),
    (["precision.matmuls=qwix"], r"precision\.matmuls must be fp8 or null; got qwix"),
    (["optimizer.umup=true"], r"optimizer\.umup need a unitscale model"),
    ([VIT, "precision=scalify_float16"], r"precision\.scalify .* are for plain models"),
    (["model={kind: rnn}"], r"model\.kind .*'mlp', 'cnn' or 'vit'; got 'rnn'"),
    (["data.folders=x"], r"data\.folders .*did you mean data\.folder\?"),
    (["recipe=gpt"], r"recipe .*: expected 'images'; got 'gpt'"),
]


test_wrong_value = refuses_configs(WRONG)


@pytest.mark.parametrize(("name", "todo"), [("imges", "images"), ("mnist", "images"), ("zzz", "")])
def test_unknown_recipe(tmp_path: Path, name: str, todo: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(f"recipe: {name}\nname: x\n", encoding="utf-8")
    todo = f"did you mean {todo}" if todo else "correct the value"
    with pytest.raises(RecipeError, match=f"recipe: expected one of gpt, .*; got '{name}'; {todo}"):
        load_config(path)


@pytest.mark.slow
@pytest.mark.usefixtures("plots")
def test_commands(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(config_file), "train.steps=6"]
    assert main(["train", *words]) == 0
    trained = capsys.readouterr().out.splitlines()
    assert trained[-2].startswith("accuracy ")
    names = {path.name for path in (config_file.parent / "runs" / "tiny").iterdir()}
    assert names == {
        *("config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "scores.json"),
        *("loss.png", "rms.png"),
    }
    assert main(["evaluate", *words]) == 0
    loss, accuracy = capsys.readouterr().out.splitlines()
    assert f"{loss.removeprefix('step 6  ')} (of at most 16 batches;" in trained[-1]
    assert loss.endswith(" nats per image")
    assert accuracy == trained[-2]
    assert main(["train", *words, "seed=1"]) == 2
    assert "seed: 0 -> 1" in capsys.readouterr().err
    assert main(["generate", *words]) == 2
    assert "expected a model that continues text; got one of recipe" in capsys.readouterr().err
    assert main(["describe", *words]) == 0
    assert "16 images in 16 examples" in capsys.readouterr().out


def test_a_file_that_is_missing(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config_file), "data.folder=/nowhere"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: data.folder: /nowhere/train-images")
    assert not output.out
    assert not (config_file.parent / "runs").exists()
