"""Classification of images as `recipes.train` sees it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..run.evaluate import predict
from ..run.monitor import monitored
from ..run.recipe import no_closing
from .config import ImagesConfig
from .data import ImageData, load_images
from .model import Plain, ViT

closing = no_closing


def build(config: ImagesConfig) -> Plain | ViT:
    """The model of a config, for images and classes as its files have them."""
    data, rngs = load_images(config.data), nnx.Rngs(config.seed)
    sizes = config.model, data.image, data.classes
    if config.model.kind == "vit":
        return ViT(*sizes, policy=monitored(config), rngs=rngs)
    return Plain(*sizes, scalify=config.scalify, rngs=rngs)


def abstract_batch(config: ImagesConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Standardized images and labels."""
    size, image = config.data.batch_size, load_images(config.data).image
    images = jax.ShapeDtypeStruct((size, *image), jnp.float32)
    return images, jax.ShapeDtypeStruct((size,), jnp.int32)


def load_data(config: ImagesConfig) -> ImageData:
    """The idx files of the config."""
    return load_images(config.data)


def scores(
    config: ImagesConfig, data: ImageData, model: Plain | ViT, folder: Path
) -> dict[str, float]:
    """The share of the test images that are classified rightly."""
    labels = data.test.labels
    logits = predict(model, data.test_images(), config.scalify)[: len(labels)]
    return {"accuracy": float(np.mean(logits.argmax(-1) == labels))}
