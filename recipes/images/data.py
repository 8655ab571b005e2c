"""Images and labels from idx files, the format that MNIST is given in.

An idx file is two zero bytes, a code of the element type, the number of axes, the length of each
axis in four bytes, and the elements; all numbers have their highest byte first.
"""

import functools
import gzip
import hashlib
import math
import os
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

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
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
    """The data set of a config, whose files are read once for as long as they are the same."""
    train = _load_split(*_stamped(config.train_images, config.train_labels), "train")
    test = _load_split(*_stamped(config.test_images, config.test_labels), "test")
    if train.images.shape[1:] != test.images.shape[1:]:
        sizes = " and ".join("{} x {}".format(*s.images.shape[1:]) for s in (train, test))
        raise RecipeError(
            "data.test_images: expected images of the size of the training images; "
            f"got {sizes}; name files of one data set"
        )
    if config.batch_size > len(train.labels):
        raise RecipeError(
            f"data.batch_size: expected at most the {len(train.labels)} training images; "
            f"got {config.batch_size}; lower it"
        )
    classes = config.classes or int(train.labels.max()) + 1
    for split, key in ((train, "data.train_labels"), (test, "data.test_labels")):
        wrong = np.flatnonzero((split.labels < 0) | (split.labels >= classes))
        if wrong.size:
            raise RecipeError(
                f"{key}: expected labels from 0 to {classes - 1}; got {split.labels[wrong[0]]} at "
                f"position {wrong[0]}; correct the file, or set data.classes"
            )
    sample = train.images[:: -(-len(train.images) // _STATISTICS)].astype(np.float64)
    mean, deviation = float(sample.mean()), float(sample.std()) or 1.0
    return ImageData(train, test, classes, mean, deviation, config.batch_size)


def _stamped(*paths: str) -> Iterator[tuple[str, int, int]]:
    """Files with what changes when they do."""
    for path in paths:
        try:
            facts = os.stat(path)
        except OSError:
            yield path, 0, 0  # reading it says what is wrong
        else:
            yield path, facts.st_mtime_ns, facts.st_size


@functools.lru_cache(maxsize=2)
def _load_split(images_file: tuple, labels_file: tuple, split: str) -> Split:
    images_path, labels_path = images_file[0], labels_file[0]
    images = read_idx(Path(images_path), f"data.{split}_images")
    labels = read_idx(Path(labels_path), f"data.{split}_labels")
    if images.ndim != 3 or images.dtype != np.uint8 or not images.size:
        raise RecipeError(
            f"data.{split}_images: expected images of bytes, with axes of count, height and width; "
            f"got {_kind(images)} in {images_path}; name the file of images"
        )
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise RecipeError(
            f"data.{split}_labels: expected one axis of integers; got {_kind(labels)} in "
            f"{labels_path}; name the file of labels"
        )
    if len(images) != len(labels):
        raise RecipeError(
            f"data.{split}_labels: expected a label for each image; got {len(images)} images in "
            f"{images_path} and {len(labels)} labels in {labels_path}; name files that belong "
            "together"
        )
    return Split(images, labels.astype(np.int32))


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype.name} of shape {array.shape}"


def read_idx(path: Path, key: str) -> np.ndarray:
    """Reads one idx file of any element type and number of axes."""
    content = _read_bytes(path, key)
    magic = content[:4]
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES:
        raise RecipeError(
            f"{key}: {path} is not an idx file: expected it to start with two zero bytes, an "
            f"element type and a number of axes; got {magic.hex(' ') or 'nothing'}; name an idx "
            "file, as it is or compressed with gzip"
        )
    dtype, axes = np.dtype(_TYPES[magic[2]]), magic[3]
    offset = 4 + 4 * axes
    if len(content) < offset:
        raise RecipeError(
            f"{key}: {path} is cut short: expected a header of {offset} bytes; got {len(content)} "
            "bytes; fetch the file again"
        )
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", axes, offset=4))
    expected = offset + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        what = "is cut short" if len(content) < expected else "is longer than its header says"
        raise RecipeError(
            f"{key}: {path} {what}: expected {expected} bytes for shape {shape}; got "
            f"{len(content)}; fetch the file again"
        )
    array = np.frombuffer(content, dtype, offset=offset).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _read_bytes(path: Path, key: str) -> bytes:
    try:
        with refused(f"{key}: {path} cannot be read", "name an idx file, or a .gz of one"):
            content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecipeError(f"{key}: {path} is damaged: {error}; fetch the file again") from error
