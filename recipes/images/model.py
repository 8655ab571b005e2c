"""An MLP and a CNN in plain flax.nnx.

The only trace of low precision is in their products: markers, which are identities until the
program runs under `unitscale.scalify`.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from flax import nnx

from ..config import ScalifyConfig
from ..hf.plain import make_product
from .config import ImageModelConfig


class Layers(NamedTuple):
    """What makes the layers of a model, given their sizes."""

    linear: Callable[..., nnx.Linear]
    convolution: Callable[..., nnx.Conv]


def make_layers(scalify: ScalifyConfig | None, rngs: nnx.Rngs) -> Layers:
    """Layers that multiply in the formats asked for, their parameters of the stream `params`."""
    dot = make_product(scalify)
    # A convolution takes operands of one type, and its gradient meets images and kernels.
    same = scalify and scalify.model_copy(update={"gradients": scalify.products})
    convolution = make_product(same, jax.lax.conv_general_dilated)
    return Layers(
        functools.partial(nnx.Linear, dot_general=dot, rngs=rngs),
        functools.partial(nnx.Conv, conv_general_dilated=convolution, rngs=rngs),
    )


class _Classifier(nnx.Module):
    def loss(
        self, images: jax.Array, labels: jax.Array, *, deterministic: bool = True
    ) -> jax.Array:
        """Mean cross entropy of labels (batch,), a float32 scalar in nats per image."""
        logits = self(images, deterministic=deterministic)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class MLP(_Classifier):
    """Dense layers with relu between them."""

    def __init__(self, shape: ImageModelConfig, image: tuple[int, int], classes: int, make: Layers):
        sizes = [math.prod(image), *[shape.hidden] * shape.layers, classes]
        self.layers = nnx.List([make.linear(*pair) for pair in itertools.pairwise(sizes)])

    def __call__(self, images: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Logits (batch, classes) of images (batch, height, width); there is no dropout."""
        x = images.reshape(images.shape[0], -1)
        *hidden, readout = self.layers
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return readout(x)


class CNN(_Classifier):
    """Two convolutions that each halve the image, a hidden dense layer, and the readout."""

    def __init__(self, shape: ImageModelConfig, image: tuple[int, int], classes: int, make: Layers):
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

    def __call__(self, images: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Logits (batch, classes) of images (batch, height, width); there is no dropout."""
        x = images[..., None]
        for convolution in self.convolutions:
            x = jax.nn.relu(convolution(x))
        x = x.reshape(x.shape[0], -1)
        return self.readout(jax.nn.relu(self.hidden(x)))
