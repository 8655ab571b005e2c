"""Recipe images: idx files, models against NumPy, configs and commands."""

import gzip
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.cli import main
from recipes.errors import RecipeError
from recipes.images import task
from recipes.images.config import ImageModelConfig, ImagesConfig
from recipes.images.task import ImageData, Plain, ViT, load_data, read_idx
from recipes.registry import load_kind
from recipes.run.folder import read_metrics
from recipes.run.state import init_state, scaled
from recipes.run.step import make_train_step
from tests.gradients import check, jit
from tests.modules import FLOAT64, build, model_loss
from tests.products import products
from unitscale import scalify

from ..runs import resumes_bit_for_bit, run
from ..support import (
    CLASSES,
    HEIGHT,
    WIDTH,
    draw,
    encode,
    refuses_configs,
    write_files,
    write_images,
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    for shape, compress in (((7,), bytes), ((1, 2, 3), gzip.compress)):
        array = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
        (tmp_path / "file").write_bytes(compress(encode(array)))
        found = read_idx(tmp_path / "file", len(shape))
        np.testing.assert_array_equal(found, array, strict=True)


IMAGES = encode(draw(4, 0)[0])
WRONG = {
    "text": b"label,pixel\n1,2\n",
    "labels": encode(draw(4, 0)[1]),
    "header cut short": IMAGES[:15],
    "cut short": IMAGES[:-1],
    "too long": IMAGES + b"\0",
    "gzip with wrong bytes": gzip.compress(IMAGES)[:10] + b"\xff" * 40,
    "gzip with a wrong sum": gzip.compress(IMAGES)[:-8] + b"\0" * 8,
}


def test_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in WRONG.values():
        path.write_bytes(content)
        with pytest.raises(RecipeError, match=r"data\.folder: .*file"):
            read_idx(path, 3)
    with pytest.raises(RecipeError, match=r"data\.folder: .*gone.gz cannot be read"):
        read_idx(tmp_path / "gone", 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path)


def load(folder: Path, **keys: int) -> ImageData:
    data: dict[str, Any] = {"batch_size": 16, "folder": str(folder), **keys}
    return load_data(ImagesConfig.model_validate({"recipe": "images", "name": "x", "data": data}))


def test_a_data_set(folder: Path) -> None:
    data = load(folder)
    assert data.summary == "96 training and 20 test images, 3 classes"
    assert (data.classes, data.train.images.shape[1:]) == (CLASSES, (HEIGHT, WIDTH))
    images, labels = draw(96, len("train"))
    np.testing.assert_array_equal(data.train.images, images)
    np.testing.assert_array_equal(data.train.labels, labels.astype(np.int32), strict=True)
    standardized = data.standardized(images)
    assert standardized.dtype == np.float32
    # The mean rounds once, each pixel twice, by 2**-24 of numbers whose mean size is below 2.
    assert abs(standardized.mean(dtype=np.float64)) < 2**-22
    assert standardized.std(dtype=np.float64) == pytest.approx(1, abs=2**-22)
    # All alike: the deviation that they are divided by is not zero.
    alike = encode(np.full((96, HEIGHT, WIDTH), 7, np.uint8))
    (folder / "train-images-idx3-ubyte").write_bytes(alike)  # goes before the .gz
    again = load(folder)
    assert not again.standardized(again.train.images).any()
    (folder / "train-images-idx3-ubyte").unlink()
    assert again.digest != data.digest == load(folder).digest


BLANK, LABELS = np.zeros((20, HEIGHT, WIDTH), np.uint8), np.zeros(20, np.uint8)
# the test file that is replaced, and by what: no images, too few labels, new labels, another size
DISAGREEMENTS = [
    ("images-idx3", BLANK[:0]),
    ("labels-idx1", LABELS[1:]),
    ("labels-idx1", LABELS + 3),
    ("images-idx3", BLANK[:, 1:]),
]


def test_files_that_do_not_belong_together(folder: Path) -> None:
    for name, array in DISAGREEMENTS:
        path = folder / f"t10k-{name}-ubyte"
        path.write_bytes(encode(array))
        with pytest.raises(RecipeError, match=r"label|of one size"):
            load(folder)
        path.unlink()
        write_files(folder)


def test_training_goes_through_all_images_with_their_labels(folder: Path) -> None:
    data = load(folder)
    expected = data.standardized(data.train.images)
    numbers = {image.tobytes(): number for number, image in enumerate(expected)}
    batches = data.training(0)
    for _ in range(2):  # passes
        seen = []
        for _ in range(6):
            images, labels = next(batches)
            chosen = [numbers[image.tobytes()] for image in images]
            np.testing.assert_array_equal(labels, data.train.labels[chosen], strict=True)
            seen += chosen
        assert sorted(seen) == list(range(96))
    shapes = [labels.shape for _, labels in load(folder, batch_size=8).validation()]
    assert shapes == [(8,), (8,)]  # of 20


def get(value: Any) -> np.ndarray:
    return np.asarray(value[...], np.float64)


def logits(model: Plain, images: np.ndarray) -> np.ndarray:
    """Compute the logits of images (batch, height, width) in float64."""
    x = images.astype(np.float64)[..., None]
    is_mlp = model.kind == "mlp"
    for layer in [] if is_mlp else model.convolutions:
        x = np.maximum(convolution(x, get(layer.kernel)) + get(layer.bias), 0)
    x = x.reshape(len(x), -1)
    *dense, readout = model.layers if is_mlp else [model.hidden, model.readout]
    for layer in dense:
        x = np.maximum(x @ get(layer.kernel) + get(layer.bias), 0)
    return x @ get(readout.kernel) + get(readout.bias)


def convolution(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Convolve with stride 2 in float64."""
    dimensions = ("NHWC", "HWIO", "NHWC")
    with jax.enable_x64(True):
        y = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=dimensions)
    return np.asarray(y)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "image"),
    [("mlp", (6, 5)), ("cnn", (9, 8)), ("cnn", (6, 5))]
    + [pytest.param(kind, (1, 1), marks=pytest.mark.slow) for kind in ("mlp", "cnn")],
)
def test_logits_are_those_of_numpy(kind: str, image: tuple[int, int]) -> None:
    shape = ImageModelConfig.model_validate({"kind": kind, "hidden": 8, "channels": 3})
    model, images = build(lambda: Plain(shape, image, 4, None, nnx.Rngs(0))), normal(3, *image)
    labels = np.array([0, 3, 1])
    found, loss = jit(lambda x: (model(x), model.loss(x, labels)))(jnp.asarray(images))
    assert found.dtype == np.float32
    # Each sum of n terms rounds n times at most, by 2**-24; the layers' n add up.
    kernels = [p for p in jax.tree.leaves(nnx.state(model, nnx.Param)) if p.ndim > 1]
    terms = sum(p.size // p.shape[-1] + 1 for p in kernels)
    exact = logits(model, images)
    np.testing.assert_allclose(found, exact, rtol=0, atol=terms * 2**-24 * np.abs(exact).max())
    picked = exact[np.arange(3), labels]
    assert float(loss) == pytest.approx((np.log(np.exp(exact).sum(-1)) - picked).mean(), rel=1e-5)


def vit(image: tuple[int, int] = (8, 12), policy: Any = "float32", **shape: int) -> Any:
    small = {"kind": "vit", "patch": 4, "width": 8, "heads": 2, "layers": 1, "hidden": 16}
    config = ImageModelConfig.model_validate(small | shape)
    return build(lambda: ViT(config, image, 4, policy=policy, rngs=nnx.Rngs(0)))


def test_gradients_of_the_vit_are_constants_times_the_truth() -> None:
    with jax.enable_x64(True):
        images, labels = normal(3, 8, 12).astype(np.float64), np.array([0, 3, 1])
        # Softmax ignores what is common to all keys.
        loss, params = model_loss(vit(policy=FLOAT64), lambda model: model.loss(images, labels))
        assert min(check(loss, params, zero=["key.bias"]).values()) > 0


def test_the_vit_sees_patches_and_their_places() -> None:
    model, images = vit(), normal(1, 8, 12)
    swapped = np.concatenate([images[:, 4:], images[:, :4]], 1)  # rows of patches
    moved = np.roll(images, 1, axis=2)  # pixels into other patches
    outputs = jit(lambda model, images: model(images).value)
    own, other, others = outputs(model, np.concatenate([images, swapped, moved]))
    assert not np.allclose(own, other)
    model.positions.embedding[...] = jnp.zeros_like(model.positions.embedding[...])
    own, other, others = outputs(model, np.concatenate([images, swapped, moved]))
    np.testing.assert_allclose(own, other, atol=1e-5)
    assert not np.allclose(own, others)
    with pytest.raises(RecipeError, match=r"model\.patch: .* 8 x 10 p"):
        vit((8, 10))


MakeConfig = Callable[..., ImagesConfig]
FORMATS = {
    "plain": "precision=float32",
    "float16": "precision.scalify=float16",
    "fp8": "precision=scalify_fp8",
}


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """Load the tiny config with overrides."""
    path = write_images(tmp_path)
    return lambda *overrides: load_kind(ImagesConfig, path, overrides)


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


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), PRODUCTS)
def test_what_is_multiplied(make_config: MakeConfig, kind: str, name: str) -> None:
    config = make_config(f"model.kind={kind}", FORMATS[name])
    graphdef, optimizer, state = init_state(config)
    step, batch = make_train_step(graphdef, optimizer, config), next(load_data(config).training(0))
    found = products(jax.make_jaxpr(step)(state, batch, np.int32(0)).jaxpr)
    assert Counter((name, *sorted(types)) for name, *types in found) == PRODUCTS[kind, name]


@pytest.mark.slow
def test_scales_propagate_through_the_whole_step(make_config: MakeConfig) -> None:
    config = make_config("model.kind=cnn", "optimizer.name=adam", FORMATS["float16"])
    graphdef, transformation, state = init_state(config)
    batch = scaled(config.precision, next(task.load_data(config).training(0)), 1)
    step = make_train_step(graphdef, transformation)
    assert scalify(step).report(state, batch, np.int32(0)) == []


ADAM = "optimizer={name: adam, learning_rate: 0.01}"
VIT = ("model.kind=vit", "optimizer={name: adam, umup: true, learning_rate: 0.1}")
LEARNS = {
    **{f"cnn-{name}": ("model.kind=cnn", FORMATS[name]) for name in ("plain", "fp8")},
    "mlp-float16-adam": (FORMATS["float16"], ADAM),
    "vit-fp8": (*VIT, "precision.policy=fp8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", LEARNS.values(), ids=LEARNS)
def test_it_learns(make_config: MakeConfig, overrides: tuple[str, ...]) -> None:
    outcome, _ = run(
        make_config(*overrides, "train={steps: 36, log_every: 1, checkpoint_every: 36}")
    )
    # Out of 20 images. One is so near a boundary that its class depends on the processor.
    assert outcome.scores["accuracy"] >= 0.95
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    first, *_, last = (row["loss"] for row in rows if "loss" in row)
    assert last < 0.5 * first


def test_accuracy_is_over_all_test_images(make_config: MakeConfig) -> None:
    config = make_config("data.batch_size=7")
    data = task.load_data(config)
    model: Any = task.build(config)
    found = logits(model, data.standardized(data.test.images))
    right = found.argmax(-1) == data.test.labels
    assert 0 < right.mean() < 1
    assert task.scores(config, data, model, Path()) == {"accuracy": right.mean()}


@pytest.mark.slow
def test_stopped_and_resumed_is_bit_for_bit_the_uninterrupted_run(make_config: MakeConfig) -> None:
    resumes_bit_for_bit(
        *(make_config("train.log_every=1", f"name={name}") for name in ("one", "other"))
    )


def test_a_batch_is_what_was_announced(make_config: MakeConfig) -> None:
    config = make_config()
    announced = [(part.shape, part.dtype) for part in task.abstract_batch(config)]
    batch = next(task.load_data(config).training(0))
    assert [(part.shape, part.dtype) for part in batch] == announced


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_images(tmp_path)


IS_VIT = "model.kind=vit"
# overrides, and what the message has to say
WRONG_KEYS = [
    (["format=fp8"], r"format is not a key of the config"),
    (["optimizer.momentum=0.5"], r"optimizer\.momentum is no longer .*; set optimizer\.b1"),
    (["precision.policy=fp8"], "policy"),
    (["optimizer.umup=true"], r"optimizer\.umup"),
    ([IS_VIT, "precision=scalify_float16"], r"precision\.scalify"),
    (["model={kind: rnn}"], r"model\.kind .*'mlp', 'cnn' or 'vit'; got 'rnn'"),
]
test_wrong_value = refuses_configs(WRONG_KEYS)


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
