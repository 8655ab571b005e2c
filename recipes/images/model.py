"""An MLP and a CNN in plain flax.nnx.

The only trace of low precision is in the products of `fp8`: markers, which are identities until the
program runs under `unitscale.transforms.scalify`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from unitscale.transforms import cast

from .config import Format, MnistConfig, ModelConfig

Product = Callable[..., jax.Array]


class Products(NamedTuple):
    """What layers multiply with, in the place of `lax.dot_general` and its convolution."""

    dot: Product
    convolution: Product


def make_products(number_format: Format) -> Products:
    """The products of a format: those of `lax`, with 8-bit operands for fp8."""
    dot, convolution = jax.lax.dot_general, jax.lax.conv_general_dilated
    if number_format != "fp8":
        return Products(dot, convolution)
    # A convolution takes operands of one type, and its gradient meets E4M3 images and kernels.
    return Products(narrowed(dot, jnp.float8_e5m2), narrowed(convolution, jnp.float8_e4m3fn))


def narrowed(product: Product, gradient: Any) -> Product:
    """A product whose operands are E4M3, and the gradient of whose output is in another format."""

    def product_of_narrow(x: jax.Array, kernel: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        x, kernel = cast(x, jnp.float8_e4m3fn), cast(kernel, jnp.float8_e4m3fn)
        return cast(product(x, kernel, *args, **kwargs), gradient, on="backward")

    return product_of_narrow


class Layers(NamedTuple):
    """What makes the layers of a model, given their sizes."""

    linear: Callable[..., nnx.Linear]
    convolution: Callable[..., nnx.Conv]


def make_layers(number_format: Format, rngs: nnx.Rngs) -> Layers:
    """Layers that multiply in a format and draw their parameters from the stream `params`."""
    products = make_products(number_format)
    return Layers(
        functools.partial(nnx.Linear, dot_general=products.dot, rngs=rngs),
        functools.partial(nnx.Conv, conv_general_dilated=products.convolution, rngs=rngs),
    )


class MLP(nnx.Module):
    """Dense layers with relu between them.

    Args:
      shape: `hidden` and `layers`.
      image: Height and width.
      classes: Number of classes.
      make: Makes the layers.
    """

    def __init__(self, shape: ModelConfig, image: tuple[int, int], classes: int, make: Layers):
        sizes = [math.prod(image), *[shape.hidden] * shape.layers, classes]
        self.layers = nnx.List([make.linear(*pair) for pair in itertools.pairwise(sizes)])

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits (batch, classes) of images (batch, height, width)."""
        x = images.reshape(images.shape[0], -1)
        *hidden, readout = self.layers
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return readout(x)


class CNN(nnx.Module):
    """Two convolutions that each halve the image, a hidden dense layer, and the readout.

    Args:
      shape: `hidden` and `channels`.
      image: Height and width.
      classes: Number of classes.
      make: Makes the layers.
    """

    def __init__(self, shape: ModelConfig, image: tuple[int, int], classes: int, make: Layers):
        channels = 1, shape.channels, 2 * shape.channels
        self.convolutions = nnx.List(
            [
                make.convolution(*pair, kernel_size=(3, 3), strides=2)
                for pair in itertools.pairwise(channels)
            ]
        )
        height, width = (math.ceil(side / 4) for side in image)
        self.hidden = make.linear(height * width * channels[-1], shape.hidden)
        self.readout = make.linear(shape.hidden, classes)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits (batch, classes) of images (batch, height, width)."""
        x = images[..., None]
        for convolution in self.convolutions:
            x = jax.nn.relu(convolution(x))
        x = x.reshape(x.shape[0], -1)
        return self.readout(jax.nn.relu(self.hidden(x)))


def build(config: MnistConfig, image: tuple[int, int], classes: int) -> MLP | CNN:
    """The model of a config, in float32, for images of a height and width."""
    kind = {"mlp": MLP, "cnn": CNN}[config.model.kind]
    make = make_layers(config.format, nnx.Rngs(config.seed))
    return kind(config.model, image, classes, make)
