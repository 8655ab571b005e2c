"""Small idx files of images whose bright rows show their class."""

import gzip
import struct
from pathlib import Path

import numpy as np
import yaml

CLASSES, HEIGHT, WIDTH = 3, 6, 5


def encode(array: np.ndarray) -> bytes:
    """Return the contents of an idx file of bytes."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw noisy images with a bright band of rows for each class, which are easy to classify."""
    rng = np.random.default_rng(seed)
    labels = (np.arange(count) % CLASSES).astype(np.uint8)
    images = rng.integers(0, 100, (count, HEIGHT, WIDTH))
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 2] += 150
    return images.astype(np.uint8), labels


def write_files(folder: Path) -> Path:
    """Write 96 training images and 20 compressed test images to a folder; return the folder."""
    for split, count, seed in (("train", 96, 5), ("t10k", 20, 4)):
        images, labels = draw(count, seed)
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(encode(images)))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(encode(labels))
    return folder


def write_config(folder: Path) -> Path:
    """Write the four files and a complete config of a tiny run; return the path of the config."""
    tree = {
        "recipe": "images",
        "name": "tiny",
        "data": {"folder": str(write_files(folder)), "batch_size": 16},
        "model": {"hidden": 16, "layers": 1, "channels": 4, "patch": 1, "width": 8, "heads": 2},
        "optimizer": {"name": "sgd", "learning_rate": 0.05, "schedule": "constant", "umup": False},
        "train": {"steps": 12, "eval_every": 6, "log_every": 4, "runs_dir": str(folder / "runs")},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path
