"""Reading idx files, and errors for damaged ones."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.errors import RecipeError
from recipes.images.config import ImagesConfig
from recipes.images.task import ImageData, load_data, read_idx

from ..idx import CLASSES, HEIGHT, WIDTH, draw, encode, write_files


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("shape", [(7,), (1, 2, 3)], ids=str)
def test_what_was_written_is_read(
    tmp_path: Path, shape: tuple[int, ...], compress: Callable[[bytes], bytes]
) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    path = tmp_path / "file"
    path.write_bytes(compress(encode(array)))
    np.testing.assert_array_equal(read_idx(path, len(shape)), array, strict=True)


IMAGES = encode(draw(4, 0)[0])
WRONG = {
    "text": b"label,pixel\n1,2\n",
    "labels": encode(draw(4, 0)[1]),
    "header cut short": IMAGES[:15],
    "cut short": IMAGES[:-1],
    "too long": IMAGES + b"\0",
    "gzip with wrong bytes": gzip.compress(IMAGES)[:10] + b"\xff" * 40,
    "gzip with a wrong sum": gzip.compress(IMAGES)[:-8] + b"\0" * 8,
}


@pytest.mark.parametrize("case", WRONG)
def test_a_damaged_file(tmp_path: Path, case: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(WRONG[case])
    with pytest.raises(RecipeError, match=r"data\.folder: .*file"):
        read_idx(path, 3)
    with pytest.raises(RecipeError, match=r"data\.folder: .*gone.gz cannot be read"):
        read_idx(tmp_path / "gone", 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path)


def load(folder: Path, **keys: int) -> ImageData:
    data: dict[str, Any] = {"batch_size": 16, "folder": str(folder), **keys}
    return load_data(ImagesConfig.model_validate({"recipe": "images", "name": "x", "data": data}))


def test_a_data_set(folder: Path) -> None:
    data = load(folder)
    assert data.summary == "96 training and 20 test images, 3 classes"
    assert (data.classes, data.train.images.shape[1:]) == (CLASSES, (HEIGHT, WIDTH))
    images, labels = draw(96, len("train"))
    np.testing.assert_array_equal(data.train.images, images)
    np.testing.assert_array_equal(data.train.labels, labels.astype(np.int32), strict=True)
    standardized = data.standardized(images)
    assert standardized.dtype == np.float32
    # The mean rounds once, each pixel twice, by 2**-24 of numbers whose mean size is below 2.
    assert abs(standardized.mean(dtype=np.float64)) < 2**-22
    assert standardized.std(dtype=np.float64) == pytest.approx(1, abs=2**-22)
    # All alike: the deviation that they are divided by is not zero.
    alike = encode(np.full((96, HEIGHT, WIDTH), 7, np.uint8))
    (folder / "train-images-idx3-ubyte").write_bytes(alike)  # goes before the .gz
    again = load(folder)
    assert not again.standardized(again.train.images).any()
    (folder / "train-images-idx3-ubyte").unlink()
    assert again.digest != data.digest == load(folder).digest


BLANK, LABELS = np.zeros((20, HEIGHT, WIDTH), np.uint8), np.zeros(20, np.uint8)
# the test file that is replaced, and by what
DISAGREEMENTS = {
    "no images": ("images-idx3", BLANK[:0]),
    "counts": ("labels-idx1", LABELS[1:]),
    "a new label": ("labels-idx1", LABELS + 3),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_files_that_do_not_belong_together(folder: Path, case: str) -> None:
    name, array = DISAGREEMENTS[case]
    (folder / f"t10k-{name}-ubyte").write_bytes(encode(array))
    with pytest.raises(RecipeError, match=r"label"):
        load(folder)


def test_training_goes_through_all_images_with_their_labels(folder: Path) -> None:
    data = load(folder)
    expected = data.standardized(data.train.images)
    numbers = {image.tobytes(): number for number, image in enumerate(expected)}
    batches = data.training(0)
    for _ in range(2):  # passes
        seen = []
        for _ in range(6):
            images, labels = next(batches)
            chosen = [numbers[image.tobytes()] for image in images]
            np.testing.assert_array_equal(labels, data.train.labels[chosen], strict=True)
            seen += chosen
        assert sorted(seen) == list(range(96))
    shapes = [labels.shape for _, labels in load(folder, batch_size=8).validation()]
    assert shapes == [(8,), (8,)]  # of 20
