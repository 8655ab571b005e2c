"""Classification of images as `recipes.train` sees it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..run.evaluate import predict
from ..run.precision import make_policy
from ..run.recipe import no_closing
from .config import ImagesConfig
from .data import ImageData, load_images
from .model import CNN, MLP, make_layers
from .vit import ViT

Model = MLP | CNN | ViT
closing = no_closing


def build(config: ImagesConfig) -> Model:
    """The model of a config, for images and classes as its files have them."""
    shape, rngs, data = config.model, nnx.Rngs(config.seed), load_images(config.data)
    if shape.kind == "vit":
        return ViT(shape, data.image, data.classes, policy=make_policy(config.precision), rngs=rngs)
    kind = {"mlp": MLP, "cnn": CNN}[shape.kind]
    return kind(shape, data.image, data.classes, make_layers(config.precision, rngs))


def abstract_batch(config: ImagesConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Standardized images and labels."""
    size, image = config.data.batch_size, load_images(config.data).image
    return (
        jax.ShapeDtypeStruct((size, *image), jnp.float32),
        jax.ShapeDtypeStruct((size,), jnp.int32),
    )


def load_data(config: ImagesConfig) -> ImageData:
    """The idx files of the config."""
    return load_images(config.data)


def scores(config: ImagesConfig, data: ImageData, model: Model, folder: Path) -> dict[str, float]:
    """The share of the test images that are classified rightly."""
    labels = data.test.labels
    logits = predict(model, data.test_images(), config.precision)[: len(labels)]
    return {"accuracy": float(np.mean(logits.argmax(-1) == labels))}
