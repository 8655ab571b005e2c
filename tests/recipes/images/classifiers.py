"""The MLP and the CNN again, in float64 NumPy, and how far rounding can take them from it."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from flax import nnx

from recipes.images.model import CNN, MLP

Array = np.ndarray


class Logits(NamedTuple):
    """Logits, and the sums of magnitudes that rounding errors are relative to."""

    values: Array
    magnitudes: Array


def logits(model: MLP | CNN, images: Array) -> Logits:
    """Of a model's parameters and images (batch, height, width)."""
    images = images.astype(np.float64)
    return Logits(_run(model, images, _get), _run(model, np.abs(images), lambda p: np.abs(_get(p))))


def losses(model: MLP | CNN, images: Array, labels: Array) -> Array:
    """Cross-entropy of each image."""
    values = logits(model, images).values
    values = values - values.max(-1, keepdims=True)
    return np.log(np.exp(values).sum(-1)) - values[np.arange(len(labels)), labels]


def _get(parameter: nnx.Param | None) -> Array:
    assert parameter is not None, "every layer has a bias"
    return np.asarray(parameter[...], np.float64)


def _run(model: MLP | CNN, x: Array, get: Callable[[nnx.Param | None], Array]) -> Array:
    dense = list(model.layers) if isinstance(model, MLP) else [model.hidden, model.readout]
    x = x[..., None]
    for layer in [] if isinstance(model, MLP) else model.convolutions:
        x = np.maximum(_convolution(x, get(layer.kernel)) + get(layer.bias), 0)
    x = x.reshape(len(x), -1)
    for layer in dense[:-1]:
        x = np.maximum(x @ get(layer.kernel) + get(layer.bias), 0)
    return x @ get(dense[-1].kernel) + get(dense[-1].bias)


def _convolution(x: Array, kernel: Array) -> Array:
    """Stride 2 with zeros around, one more behind than before where their number is odd."""
    size = len(kernel)
    outputs = [math.ceil(side / 2) for side in x.shape[1:3]]
    missing = [
        max(2 * (out - 1) + size - side, 0) for out, side in zip(outputs, x.shape[1:3], strict=True)
    ]
    padding = [(n // 2, n - n // 2) for n in missing]
    x = np.pad(x, ((0, 0), *padding, (0, 0)))
    result = np.zeros((len(x), *outputs, kernel.shape[-1]))
    for row, column in np.ndindex(*outputs):
        window = x[:, 2 * row : 2 * row + size, 2 * column : 2 * column + size]
        result[:, row, column] = np.einsum("nhwi,hwio->no", window, kernel)
    return result
