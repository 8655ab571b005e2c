"""The models compute what NumPy does, for images of any size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.images.config import DataConfig, Format, MnistConfig, ModelConfig
from recipes.images.model import build

from .classifiers import logits

FILES = DataConfig(train_images="", train_labels="", test_images="", test_labels="")
SHAPES = {
    "mlp": ModelConfig(kind="mlp", hidden=8, layers=2),
    "cnn": ModelConfig(kind="cnn", hidden=8, channels=3),
}


def make(shape: str, image: tuple[int, int], number_format: Format = "plain"):
    config = MnistConfig(name="x", data=FILES, model=SHAPES[shape], format=number_format)
    model = build(config, image, 4)
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] == "bias":  # zeros would hide a bias that is not added
            parameter[...] = jnp.linspace(-1, 1, parameter.size).reshape(parameter.shape)
    return model


def draw(image: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(3, *image)).astype(np.float32)


@pytest.mark.parametrize("image", [(1, 1), (6, 5), (9, 8)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_numpy(shape: str, image: tuple[int, int]) -> None:
    model, images = make(shape, image), draw(image)
    expected = logits(model, images)
    found = model(jnp.asarray(images))
    assert found.dtype == np.float32
    # Each sum of n terms rounds n times at most, by 2**-24; the layers' n add up.
    terms = sum(
        p.size // p.shape[-1] + 1
        for p in jax.tree.leaves(nnx.state(model, nnx.Param))
        if p.ndim > 1
    )
    error = np.abs(np.asarray(found, np.float64) - expected.values)
    assert (error <= terms * 2**-24 * expected.magnitudes).all()


@pytest.mark.parametrize("shape", ["mlp", "cnn"])
def test_fp8_is_the_plain_model_until_it_is_scaled(shape: str) -> None:
    images = jnp.asarray(draw((6, 5)))

    def outputs(number_format: Format):
        graphdef, params = nnx.split(make(shape, (6, 5), number_format))
        loss = jax.value_and_grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(images) ** 2))
        return jax.jit(loss)(params)

    plain, fp8 = (jax.tree.leaves(outputs(name)) for name in ("plain", "fp8"))
    for one, other in zip(plain, fp8, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


def test_the_seed_decides_the_parameters() -> None:
    def kernels(seed: int) -> np.ndarray:
        config = MnistConfig(name="x", data=FILES, model=SHAPES["mlp"], seed=seed)
        return np.asarray(build(config, (6, 5), 4).layers[0].kernel[...])

    np.testing.assert_array_equal(kernels(0), kernels(0))
    assert (kernels(0) != kernels(1)).any()
