"""Images and labels from idx files, the format that MNIST is given in.

An idx file of bytes is two zero bytes, 8, the number of axes, the length of each axis in four
bytes, highest first, and the elements.
"""

import functools
import gzip
import hashlib
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grain
import numpy as np

from ..batches import Data, Examples
from ..errors import RecipeError, refused
from .config import ImageDataConfig

_STATISTICS = 10_000
"""Images that the mean and the deviation are taken over."""


class Split(NamedTuple):
    """Images (n, height, width) uint8 and labels (n,) int32."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class ImageData(Data):
    """Both splits, the number of classes, and the pixels' mean and standard deviation."""

    train: Split
    test: Split
    classes: int
    mean: float
    deviation: float
    batch_size: int

    @property
    def image(self) -> tuple[int, int]:
        """Height and width."""
        return self.train.images.shape[1:]

    @functools.cached_property
    def digest(self) -> str:
        found = hashlib.sha256()
        for array in (*self.train, *self.test):
            found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        return found.hexdigest()

    @property
    def summary(self) -> str:
        counts = f"{len(self.train.labels):,} training and {len(self.test.labels):,} test images"
        return f"{counts}, {self.classes} classes"

    def standardized(self, images: np.ndarray) -> np.ndarray:
        """Images in float32, of mean 0 and deviation 1 over the training images."""
        return (images.astype(np.float32) - self.mean) / self.deviation

    def examples(self, *, training: bool) -> Sequence[Examples]:
        """Pairs of a standardized image and its label."""
        images, labels = self.train if training else self.test
        numbers = grain.MapDataset.source(range(len(labels)))
        return [Examples(numbers.map(lambda i: (self.standardized(images[i]), labels[i])))]

    def test_images(self) -> Iterator[tuple[np.ndarray]]:
        """All test images in order, in batches of one size; the last is filled up with zeros."""
        images = self.standardized(self.test.images)
        for start in range(0, len(images), self.batch_size):
            batch = images[start : start + self.batch_size]
            missing = self.batch_size - len(batch)
            yield (np.pad(batch, ((0, missing), (0, 0), (0, 0))),)


def load_images(config: ImageDataConfig) -> ImageData:
    """The data set of a config."""
    train, test = (_load_split(Path(config.folder), split) for split in ("train", "t10k"))
    if train.images.shape[1:] != test.images.shape[1:]:
        sizes = " and ".join("{} x {}".format(*s.images.shape[1:]) for s in (train, test))
        raise RecipeError(
            "data.folder: expected test images of the size of the training images; "
            f"got {sizes}; name the folder of one data set"
        )
    if config.batch_size > len(train.labels):
        raise RecipeError(
            f"data.batch_size: expected at most the {len(train.labels)} training images; "
            f"got {config.batch_size}; lower it"
        )
    classes = int(train.labels.max()) + 1
    if test.labels.max() >= classes:
        raise RecipeError(
            f"data.folder: expected test labels from 0 to {classes - 1}, as the training labels; "
            f"got {test.labels.max()}; name the folder of one data set"
        )
    sample = train.images[:: -(-len(train.images) // _STATISTICS)].astype(np.float64)
    mean, deviation = float(sample.mean()), float(sample.std()) or 1.0
    return ImageData(train, test, classes, mean, deviation, config.batch_size)


def _load_split(folder: Path, split: str) -> Split:
    images = read_idx(folder / f"{split}-images-idx3-ubyte", axes=3)
    labels = read_idx(folder / f"{split}-labels-idx1-ubyte", axes=1)
    if len(images) != len(labels) or not images.size:
        raise RecipeError(
            f"data.folder: expected a label for each image of {split} in {folder}; got "
            f"{len(images)} images and {len(labels)} labels; fetch the files again"
        )
    return Split(images, labels.astype(np.int32))


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Reads one idx file of bytes, or the gzip-compressed file with .gz after its name."""
    key = "data.folder"
    if not path.exists():
        path = path.with_name(f"{path.name}.gz")
    try:
        todo = "name the folder of MNIST's four files"
        with refused(f"{key}: {path} cannot be read", todo):
            content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecipeError(f"{key}: {path} is damaged: {error}; fetch the file again") from error
    offset = 4 + 4 * axes
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) < offset:
        raise RecipeError(
            f"{key}: expected {path} to be an idx file of bytes with {axes} axes, which begins "
            f"with 00 00 08 0{axes}; got {content[:4].hex(' ') or 'nothing'}; fetch the file again"
        )
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", axes, offset=4))
    if len(content) != offset + math.prod(shape):
        raise RecipeError(
            f"{key}: {path}: expected {offset + math.prod(shape)} bytes for shape {shape}; got "
            f"{len(content)}; fetch the file again"
        )
    return np.frombuffer(content, np.uint8, offset=offset).reshape(shape)
