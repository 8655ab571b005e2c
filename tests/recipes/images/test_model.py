"""The plain models compute what NumPy does, for images of any size; the ViT is unit scaled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.config import PrecisionConfig
from recipes.errors import RecipeError
from recipes.images.config import ImageModelConfig
from recipes.images.model import CNN, MLP, make_layers
from recipes.images.vit import ViT
from recipes.run.probe import probe
from tests.gradients import check
from tests.modules import FLOAT64, model_loss

from .classifiers import logits

SHAPES = {MLP: ImageModelConfig(hidden=8), CNN: ImageModelConfig(hidden=8, channels=3)}
FP8 = PrecisionConfig.model_validate("scalify_fp8")


def make(kind: type[MLP | CNN], image: tuple[int, int], scalify: PrecisionConfig | None = None):
    model = kind(SHAPES[kind], image, 4, make_layers(scalify, nnx.Rngs(0)))
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] == "bias":  # zeros would hide a bias that is not added
            parameter[...] = jnp.linspace(-1, 1, parameter.size).reshape(parameter.shape)
    return model


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("image", [(1, 1), (6, 5), (9, 8)], ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_logits_are_those_of_numpy(kind: type[MLP | CNN], image: tuple[int, int]) -> None:
    model, images = make(kind, image), draw(3, *image)
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


@pytest.mark.parametrize("kind", SHAPES)
def test_fp8_is_the_plain_model_until_it_is_scaled(kind: type[MLP | CNN]) -> None:
    images, labels = jnp.asarray(draw(3, 6, 5)), jnp.arange(3)

    def outputs(scalify: PrecisionConfig | None):
        graphdef, params = nnx.split(make(kind, (6, 5), scalify))
        loss = jax.value_and_grad(lambda p: nnx.merge(graphdef, p).loss(images, labels))
        return jax.jit(loss)(params)

    plain, fp8 = (jax.tree.leaves(outputs(formats)) for formats in (None, FP8))
    for one, other in zip(plain, fp8, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


def vit(image: tuple[int, int] = (8, 12), policy: Any = "float32", **shape: int) -> Any:
    small = {"kind": "vit", "patch": 4, "width": 8, "heads": 2, "layers": 1, "hidden": 16}
    config = ImageModelConfig.model_validate(small | shape)
    return ViT(config, image, 4, policy=policy, rngs=nnx.Rngs(0))


def test_gradients_of_the_vit_are_constants_times_the_truth() -> None:
    with jax.enable_x64(True):
        images, labels = draw(3, 8, 12).astype(np.float64), np.array([0, 3, 1])
        # What all keys share, softmax takes out again.
        loss, params = model_loss(vit(policy=FLOAT64), lambda model: model.loss(images, labels))
        assert min(check(loss, params, zero=["key.bias"]).values()) > 0


def test_the_vit_is_at_unit_size_when_it_begins() -> None:
    model = vit((16, 16), width=64, layers=2, hidden=128)
    found = probe(model, draw(32, 16, 16), np.arange(32) % 4)
    parts = [name for name in found.activations if name.count(".") < 3 and name != "readout"]
    for name in parts:
        assert 0.5 < found.activations[name] < 2, name
        assert 0.2 < found.gradients[name] < 5, name
    kernels = [name for name in found.weights if name.endswith(("embed.kernel", "readout.kernel"))]
    assert len(kernels) == 2
    for name in kernels:
        assert 0.2 < found.weights[name] < 5, name


def test_the_vit_sees_patches_and_their_places() -> None:
    model, images = vit(), draw(1, 8, 12)
    swapped = np.concatenate([images[:, 4:], images[:, :4]], 1)  # rows of patches
    assert not np.allclose(model(images).value, model(swapped).value)
    model.positions.embedding[...] = jnp.zeros_like(model.positions.embedding[...])
    np.testing.assert_allclose(model(images).value, model(swapped).value, atol=1e-5)
    moved = np.roll(images, 1, axis=2)  # pixels into other patches
    assert not np.allclose(model(images).value, model(moved).value)


def test_patches_cover_the_image() -> None:
    with pytest.raises(RecipeError, match=r"model\.patch: expected one that divides .* 8 x 10 p"):
        vit((8, 10))
