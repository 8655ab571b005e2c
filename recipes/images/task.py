"""The recipe images: an MLP and a CNN in plain `flax.nnx`, and a ViT in `unitscale.nn`.

For FP8 the plain models mark the operands of matmuls and convolutions. Without `unitscale.scalify`
the marks have no effect.
"""

import functools
import gzip
import hashlib
import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from unitscale import ScaledArray, nn, ops

from ..config import PrecisionConfig
from ..errors import RecipeError, refused
from ..hf.plain import make_product
from ..pooling import mean_of_tokens
from ..recipe import Data, Examples, no_closing
from ..run.state import make_policy
from ..run.step import predict
from .config import ImageModelConfig, ImagesConfig

closing = no_closing
Size = tuple[int, int]  # of images: height and width
_STATISTICS = 10_000  # images from which to compute mean and standard deviation


class Split(NamedTuple):
    """Images (n, height, width) uint8 and labels (n,) int32."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class ImageData(Data):
    """Training and test images, number of classes, and mean and standard deviation of pixels."""

    train: Split
    test: Split
    classes: int
    mean: float
    deviation: float
    batch_size: int

    @functools.cached_property
    def digest(self) -> str:
        found = hashlib.sha256()
        for array in (*self.train, *self.test):
            found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        return found.hexdigest()

    @property
    def summary(self) -> str:
        train, test = len(self.train.labels), len(self.test.labels)
        return f"{train:,} training and {test:,} test images, {self.classes} classes"

    def standardized(self, images: np.ndarray) -> np.ndarray:
        """Convert to float32, with mean 0 and standard deviation 1 over the training images."""
        return (images.astype(np.float32) - self.mean) / self.deviation

    def examples(self, *, training: bool) -> Sequence[Examples]:
        """Return pairs of a standardized image and its label."""
        images, labels = self.train if training else self.test
        numbers = grain.MapDataset.range(len(labels))
        return [Examples(numbers.map(lambda i: (self.standardized(images[i]), labels[i])))]


def load_data(config: ImagesConfig) -> ImageData:
    """Read the idx files of a config."""
    folder = Path(config.data.folder)
    train, test = (_load_split(folder, split) for split in ("train", "t10k"))
    sizes = [split.images.shape[1:] for split in (train, test)]
    if sizes[0] != sizes[1]:
        what = f"data.folder: expected training and test images of one size in {folder}"
        raise RecipeError(f"{what}; got {sizes[0]} and {sizes[1]}; download the files again")
    classes = int(train.labels.max()) + 1
    if test.labels.max() >= classes:
        wanted = f"expected test labels from 0 to {classes - 1}, as in the training data"
        raise RecipeError(f"data.folder: {wanted}; got {test.labels.max()}; correct the files")
    sample = train.images[:: -(-len(train.images) // _STATISTICS)].astype(np.float64)
    mean, deviation = float(sample.mean()), float(sample.std()) or 1.0
    return ImageData(train, test, classes, mean, deviation, config.data.batch_size)


def _load_split(folder: Path, split: str) -> Split:
    images = read_idx(folder / f"{split}-images-idx3-ubyte", axes=3)
    labels = read_idx(folder / f"{split}-labels-idx1-ubyte", axes=1)
    if len(images) != len(labels) or not images.size:
        raise RecipeError(
            f"data.folder: expected a label for each image of {split} in {folder}; got "
            f"{len(images)} images and {len(labels)} labels; download the files again"
        )
    return Split(images, labels.astype(np.int32))


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Read an idx file of bytes, or its .gz: 0, 0, 8, number of axes, big-endian lengths, data."""
    path = path if path.exists() else path.with_name(f"{path.name}.gz")
    try:
        with refused(f"data.folder: {path} cannot be read", "give the folder of the four files"):
            content = path.read_bytes()
            if content.startswith(b"\x1f\x8b"):
                content = gzip.decompress(content)
        if content[:4] != bytes([0, 0, 8, axes]):
            raise ValueError(f"one that begins with {content[:4].hex(' ') or 'nothing'}")
        shape = np.frombuffer(content, ">u4", axes, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (EOFError, ValueError, zlib.error) as error:
        raise RecipeError(
            f"data.folder: expected {path} to be an idx file of bytes with {axes} axes, which "
            f"begins with 00 00 08 0{axes}; got: {error}; download the file again"
        ) from error


class Plain(nnx.Module):
    """An MLP, or a CNN of two convolutions of stride 2, a dense layer and a readout."""

    def __init__(
        self,
        shape: ImageModelConfig,
        image: Size,
        classes: int,
        precision: PrecisionConfig | None,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(nnx.Linear, dot_general=make_product(precision), rngs=rngs)
        self.kind = shape.kind
        if shape.kind == "mlp":
            sizes = [math.prod(image), *[shape.hidden] * shape.layers, classes]
            self.layers = nnx.List([linear(*pair) for pair in itertools.pairwise(sizes)])
            return
        # E4M3 gradients: they are convolved with images and kernels, and types must be equal.
        convolve, e4m3 = jax.lax.conv_general_dilated, "float8_e4m3fn"
        product = make_product(precision, convolve, gradients=e4m3)
        channels = 1, shape.channels, 2 * shape.channels
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), strides=2, rngs=rngs)
        pairs = itertools.pairwise(channels)
        self.convolutions = nnx.List([conv(*p, conv_general_dilated=product) for p in pairs])
        height, width = (math.ceil(side / 4) for side in image)
        self.hidden = linear(height * width * channels[-1], shape.hidden)
        self.readout = linear(shape.hidden, classes)

    def __call__(self, images: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Return logits (batch, classes) of images (batch, height, width)."""
        x, is_mlp = images[..., None], self.kind == "mlp"
        for convolution in () if is_mlp else self.convolutions:
            x = jax.nn.relu(convolution(x))
        x = x.reshape(images.shape[0], -1)
        *hidden, readout = self.layers if is_mlp else (self.hidden, self.readout)
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return readout(x)

    def loss(self, images, labels, *, deterministic: bool = True) -> jax.Array:
        """Return the mean cross entropy of labels (batch,), float32, in nats per image."""
        logits = self(images, deterministic=deterministic)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class ViT(nnx.Module):
    """A Transformer over patches, and a readout of its mean output."""

    def __init__(self, shape: ImageModelConfig, image: Size, classes: int, **options: Any):
        if any(side % shape.patch for side in image):
            raise RecipeError(
                f"model.patch: expected a divisor of the images' {image[0]} x {image[1]} pixels; "
                f"got {shape.patch}; change it"
            )
        self.patch, width = shape.patch, shape.width
        tokens = math.prod(image) // shape.patch**2
        self.embed = nn.Dense(shape.patch**2, width, **options)
        self.positions = nn.PositionalEmbed(tokens, width, **options)
        sizes = shape.layers, width, shape.heads, shape.hidden
        self.stack = nn.TransformerStack(*sizes, norm="layer", max_length=tokens, **options)
        self.norm = nn.LayerNorm(width, policy=options["policy"])
        self.readout = nn.Readout(width, classes, **options)

    def __call__(self, images: jax.Array, *, deterministic: bool = True) -> ScaledArray:
        """Return logits (batch, classes) of standardized images (batch, height, width)."""
        (batch, height, width), patch = images.shape, self.patch
        x = images.reshape(batch, height // patch, patch, width // patch, patch)
        x = x.swapaxes(2, 3).reshape(batch, -1, patch**2)
        x = self.stack(self.positions(self.embed(x)), deterministic=deterministic)
        return self.readout(self.norm(mean_of_tokens(x)))

    def loss(self, images, labels, *, deterministic: bool = True) -> jax.Array:
        """Return the mean cross entropy of labels (batch,), float32, in nats per image."""
        return ops.softmax_cross_entropy(self(images, deterministic=deterministic), labels)


def build(config: ImagesConfig) -> Plain | ViT:
    """Build the model of a config, for the image size and classes of its files."""
    data, rngs = load_data(config), nnx.Rngs(config.seed)
    sizes = config.model, data.train.images.shape[1:], data.classes
    if config.model.kind == "vit":
        return ViT(*sizes, policy=make_policy(config.precision), rngs=rngs)
    return Plain(*sizes, config.precision, rngs)


def abstract_batch(config: ImagesConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of images and labels."""
    size, images = config.data.batch_size, load_data(config).train.images
    images = jax.ShapeDtypeStruct((size, *images.shape[1:]), jnp.float32)
    return images, jax.ShapeDtypeStruct((size,), jnp.int32)


def scores(config: ImagesConfig, data: ImageData, model: Any, folder: Path) -> dict[str, float]:
    """Return the accuracy on the test images."""
    images, size = data.standardized(data.test.images), data.batch_size
    batches = ((images[start : start + size],) for start in range(0, len(images), size))
    found = predict(model, batches, config.precision).argmax(-1)
    return {"accuracy": float((found == data.test.labels).mean())}
