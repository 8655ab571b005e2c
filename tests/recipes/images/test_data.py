"""Idx files come back as they were written, and what is wrong with one is said."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recipes.errors import RecipeError
from recipes.images.config import ImageDataConfig
from recipes.images.data import ImageData, load_images, read_idx

from ..idx import CLASSES, HEIGHT, WIDTH, draw, encode, write_files


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("shape", [(0,), (7,), (2, 3), (1, 2, 3)], ids=str)
def test_what_was_written_is_read(
    tmp_path: Path, shape: tuple[int, ...], compress: Callable[[bytes], bytes]
) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    path = tmp_path / "file"
    path.write_bytes(compress(encode(array)))
    np.testing.assert_array_equal(read_idx(path, len(shape)), array, strict=True)


IMAGES = encode(draw(4, 0)[0])
# contents of a file, and what the message has to say
WRONG = {
    "empty": (b"", r"got nothing; fetch the file again"),
    "three bytes": (b"\0\0\x08", r"got 00 00 08;"),
    "text": (b"label,pixel\n1,2\n", r"got 6c 61 62 65;"),
    "floats": (b"\0\0\x0d\x03" + bytes(16), r"begins with 00 00 08 03; got 00 00 0d 03;"),
    "labels": (encode(draw(4, 0)[1]), r"with 3 axes, .*; got 00 00 08 01;"),
    "header cut short": (IMAGES[:15], r"to be an idx file"),
    "cut short": (IMAGES[:-1], r"expected 136 bytes for shape \(4, 6, 5\); got 135"),
    "too long": (IMAGES + b"\0", r"expected 136 .*; got 137;"),
    "gzip cut short": (gzip.compress(IMAGES)[:-9], r"is damaged: Compressed file ended"),
    "gzip header alone": (b"\x1f\x8b", r"is damaged"),
    "gzip with wrong bytes": (gzip.compress(IMAGES)[:10] + b"\xff" * 40, r"is damaged: Error -3"),
    "gzip with a wrong sum": (gzip.compress(IMAGES)[:-8] + b"\0" * 8, r"is damaged: CRC check"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_damaged_file(tmp_path: Path, case: str) -> None:
    content, message = WRONG[case]
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=rf"data\.folder: .*file.*{message}"):
        read_idx(path, 3)
    with pytest.raises(RecipeError, match=r"data\.folder: .*gone.gz cannot be read"):
        read_idx(tmp_path / "gone", 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path)


def load(folder: Path, batch_size: int = 16) -> ImageData:
    return load_images(ImageDataConfig(folder=str(folder), batch_size=batch_size))


def test_a_data_set(folder: Path) -> None:
    data = load(folder)
    assert data.summary == "96 training and 20 test images, 3 classes"
    assert (data.classes, data.image) == (CLASSES, (HEIGHT, WIDTH))
    assert [len(part) for part in (*data.train, *data.test)] == [96, 96, 20, 20]
    images, labels = draw(96, 5)
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
# the test file that is replaced, by what, the batch size, and what the message has to say
IMAGE_FILE, LABEL_FILE = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
DISAGREEMENTS = {
    "no images": (IMAGE_FILE, BLANK[:0], 16, r"data\.folder: .*got 0 images and 20 labels"),
    "images without width": (IMAGE_FILE, BLANK[..., :0], 16, r"data\.folder"),
    "sizes": (IMAGE_FILE, BLANK[:, 1:], 16, r"data\.folder: .*; got 6 x 5 and 5 x 5"),
    "counts": (LABEL_FILE, LABELS[1:], 16, r"got 20 images and 19 labels"),
    "a new label": (LABEL_FILE, LABELS + 3, 16, r"data\.folder: .* from 0 to 2, .* got 3"),
    "a large batch": (LABEL_FILE, LABELS, 97, r"data\.batch_size: .* 96 .*got 97"),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_files_that_do_not_belong_together(folder: Path, case: str) -> None:
    name, array, size, message = DISAGREEMENTS[case]
    (folder / name).write_bytes(encode(array))
    with pytest.raises(RecipeError, match=message):
        load(folder, size)


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


def test_validation_is_of_whole_batches(folder: Path) -> None:
    data = load(folder, batch_size=8)
    assert [labels.shape for _, labels in data.validation()] == [(8,), (8,)]
    assert next(load(folder, batch_size=64).validation())[0].shape == (20, HEIGHT, WIDTH)
