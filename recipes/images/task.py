"""An MLP and a CNN in plain flax.nnx, and a vision Transformer in `unitscale.nn`.

The only trace of low precision in the plain models is in their products: markers, which are
identities until the program runs under `unitscale.scalify`.
"""

import functools
import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from unitscale import ScaledArray, nn, ops

from ..config import PrecisionConfig
from ..errors import RecipeError
from ..hf.plain import make_product
from ..pooling import mean_of_tokens
from ..recipe import no_closing
from ..run.state import make_policy
from ..run.step import predict
from .config import ImageModelConfig, ImagesConfig
from .data import ImageData, load_images

closing = no_closing


class Plain(nnx.Module):
    """An MLP or, of kind cnn, convolutions that each halve the image, a dense layer, a readout."""

    def __init__(
        self,
        shape: ImageModelConfig,
        image: tuple[int, int],
        classes: int,
        *,
        precision: PrecisionConfig | None,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(nnx.Linear, dot_general=make_product(precision), rngs=rngs)
        self.kind = shape.kind
        if shape.kind == "mlp":
            sizes = [math.prod(image), *[shape.hidden] * shape.layers, classes]
            self.layers = nnx.List([linear(*pair) for pair in itertools.pairwise(sizes)])
            return
        # A convolution takes operands of one type, and its gradient meets images and kernels.
        convolve, e4m3 = jax.lax.conv_general_dilated, "float8_e4m3fn"
        product = make_product(precision, convolve, gradients=e4m3)
        channels = 1, shape.channels, 2 * shape.channels
        self.convolutions = nnx.List(
            [
                nnx.Conv(*pair, (3, 3), strides=2, conv_general_dilated=product, rngs=rngs)
                for pair in itertools.pairwise(channels)
            ]
        )
        height, width = (math.ceil(side / 4) for side in image)
        self.hidden = linear(height * width * channels[-1], shape.hidden)
        self.readout = linear(shape.hidden, classes)

    def __call__(self, images: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Logits (batch, classes) of images (batch, height, width); there is no dropout."""
        x, layers = images[..., None], self.layers if self.kind == "mlp" else []
        if self.kind == "cnn":
            for convolution in self.convolutions:
                x = jax.nn.relu(convolution(x))
            layers = [self.hidden, self.readout]
        x = x.reshape(images.shape[0], -1)
        *hidden, readout = layers
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return readout(x)

    def loss(
        self, images: jax.Array, labels: jax.Array, *, deterministic: bool = True
    ) -> jax.Array:
        """Mean cross entropy of labels (batch,), a float32 scalar in nats per image."""
        logits = self(images, deterministic=deterministic)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class ViT(nnx.Module):
    """Patches as tokens, a Transformer over them, and a readout of their mean."""

    def __init__(
        self,
        shape: ImageModelConfig,
        image: tuple[int, int],
        classes: int,
        *,
        policy: str | nn.Policy,
        rngs: nnx.Rngs,
    ):
        if any(side % shape.patch for side in image):
            raise RecipeError(
                f"model.patch: expected one that divides the images' {image[0]} x {image[1]} "
                f"pixels; got {shape.patch}; change it"
            )
        self.patch, width = shape.patch, shape.width
        tokens, options = math.prod(image) // shape.patch**2, {"policy": policy, "rngs": rngs}
        self.embed = nn.Dense(shape.patch**2, width, **options)
        self.positions = nn.PositionalEmbed(tokens, width, **options)
        sizes = shape.layers, width, shape.heads, shape.hidden
        self.stack = nn.TransformerStack(*sizes, norm="layer", max_length=tokens, **options)
        self.norm = nn.LayerNorm(width, policy=policy)
        self.readout = nn.Readout(width, classes, **options)

    def __call__(self, images: jax.Array, *, deterministic: bool = True) -> ScaledArray:
        """Logits (batch, classes) of images (batch, height, width) of unit size."""
        (batch, height, width), patch = images.shape, self.patch
        x = images.reshape(batch, height // patch, patch, width // patch, patch)
        x = x.swapaxes(2, 3).reshape(batch, -1, patch**2)
        x = self.stack(self.positions(self.embed(x)), deterministic=deterministic)
        return self.readout(self.norm(mean_of_tokens(x)))

    def loss(
        self, images: jax.Array, labels: jax.Array, *, deterministic: bool = True
    ) -> jax.Array:
        """Mean cross entropy of labels (batch,), a float32 scalar in nats per image."""
        return ops.softmax_cross_entropy(self(images, deterministic=deterministic), labels)


def build(config: ImagesConfig) -> Plain | ViT:
    """The model of a config, for images and classes as its files have them."""
    data, rngs = load_images(config.data), nnx.Rngs(config.seed)
    sizes = config.model, data.image, data.classes
    if config.model.kind == "vit":
        return ViT(*sizes, policy=make_policy(config.precision), rngs=rngs)
    return Plain(*sizes, precision=config.precision, rngs=rngs)


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
    logits = predict(model, data.test_images(), config.precision)[: len(labels)]
    return {"accuracy": float(np.mean(logits.argmax(-1) == labels))}
