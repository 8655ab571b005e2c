"""The plain models against NumPy, for several image sizes; the ViT is unit scaled."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.config import PrecisionConfig
from recipes.errors import RecipeError
from recipes.images.config import ImageModelConfig
from recipes.images.task import Plain, ViT
from tests.gradients import check, jit
from tests.modules import FLOAT64, build, model_loss

Get = Callable[[Any], np.ndarray]


def parameter(value: Any) -> np.ndarray:
    return np.asarray(value[...], np.float64)


def logits(model: Plain, images: np.ndarray, get: Get = parameter) -> np.ndarray:
    """Compute the logits of images (batch, height, width) in float64 NumPy."""
    x = images.astype(np.float64)[..., None]
    is_mlp = model.kind == "mlp"
    for layer in [] if is_mlp else model.convolutions:
        x = np.maximum(convolution(x, get(layer.kernel)) + get(layer.bias), 0)
    x = x.reshape(len(x), -1)
    *dense, readout = model.layers if is_mlp else [model.hidden, model.readout]
    for layer in dense:
        x = np.maximum(x @ get(layer.kernel) + get(layer.bias), 0)
    return x @ get(readout.kernel) + get(readout.bias)


def magnitudes(model: Plain, images: np.ndarray) -> np.ndarray:
    """Compute sums of magnitudes, to which rounding errors of logits are relative."""
    return logits(model, np.abs(images), lambda value: np.abs(parameter(value)))


def convolution(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Convolve with stride 2 and zero padding; if it is odd, there is one more zero at the end."""
    size = len(kernel)
    outputs = [math.ceil(side / 2) for side in x.shape[1:3]]
    pairs = zip(outputs, x.shape[1:3], strict=True)
    missing = [max(2 * (out - 1) + size - side, 0) for out, side in pairs]
    padding = [(n // 2, n - n // 2) for n in missing]
    x = np.pad(x, ((0, 0), *padding, (0, 0)))
    result = np.zeros((len(x), *outputs, kernel.shape[-1]))
    for row, column in np.ndindex(*outputs):
        window = x[:, 2 * row : 2 * row + size, 2 * column : 2 * column + size]
        result[:, row, column] = np.einsum("nhwi,hwio->no", window, kernel)
    return result


def make(kind: str, image: tuple[int, int], precision: PrecisionConfig | None = None) -> Plain:
    shape = ImageModelConfig.model_validate({"kind": kind, "hidden": 8, "channels": 3})
    return build(lambda: Plain(shape, image, 4, precision, nnx.Rngs(0)))


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "image"),
    [("mlp", (6, 5)), ("cnn", (9, 8)), ("cnn", (6, 5))]
    + [pytest.param(kind, (1, 1), marks=pytest.mark.slow) for kind in ("mlp", "cnn")],
)
def test_logits_are_those_of_numpy(kind: str, image: tuple[int, int]) -> None:
    model, images = make(kind, image), draw(3, *image)
    found = jit(model)(jnp.asarray(images))
    assert found.dtype == np.float32
    # Each sum of n terms rounds n times at most, by 2**-24; the layers' n add up.
    kernels = [p for p in jax.tree.leaves(nnx.state(model, nnx.Param)) if p.ndim > 1]
    terms = sum(p.size // p.shape[-1] + 1 for p in kernels)
    error = np.abs(np.asarray(found, np.float64) - logits(model, images))
    assert (error <= terms * 2**-24 * magnitudes(model, images)).all()


def vit(image: tuple[int, int] = (8, 12), policy: Any = "float32", **shape: int) -> Any:
    small = {"kind": "vit", "patch": 4, "width": 8, "heads": 2, "layers": 1, "hidden": 16}
    config = ImageModelConfig.model_validate(small | shape)
    return build(lambda: ViT(config, image, 4, policy=policy, rngs=nnx.Rngs(0)))


def test_gradients_of_the_vit_are_constants_times_the_truth() -> None:
    with jax.enable_x64(True):
        images, labels = draw(3, 8, 12).astype(np.float64), np.array([0, 3, 1])
        # What all keys share, softmax takes out again.
        loss, params = model_loss(vit(policy=FLOAT64), lambda model: model.loss(images, labels))
        assert min(check(loss, params, zero=["key.bias"]).values()) > 0


def test_the_vit_sees_patches_and_their_places() -> None:
    model, images = vit(), draw(1, 8, 12)
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
