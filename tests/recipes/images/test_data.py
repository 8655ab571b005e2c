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
    np.testing.assert_array_equal(read_idx(path, "data.x", len(shape)), array, strict=True)


IMAGES = encode(draw(4, 0)[0])
# contents of a file, and what the message has to say
WRONG = {
    "empty": (b"", r"got nothing; name such a file"),
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
    with pytest.raises(RecipeError, match=rf"data\.test_images: .*file.*{message}"):
        read_idx(path, "data.test_images", 3)
    with pytest.raises(RecipeError, match=r"data\.test_images: .*gone cannot be read"):
        read_idx(tmp_path / "gone", "data.test_images", 3)


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    return write_files(tmp_path)


def load(paths: dict[str, str], **keys: int) -> ImageData:
    return load_images(ImageDataConfig.model_validate({"batch_size": 16, **paths, **keys}))


def test_a_data_set(paths: dict[str, str]) -> None:
    data = load(paths)
    assert data.summary == "96 training and 20 test images, 3 classes"
    assert (data.classes, data.image) == (CLASSES, (HEIGHT, WIDTH))
    assert [len(part) for part in (*data.train, *data.test)] == [96, 96, 20, 20]
    images, labels = draw(96, len("train"))
    np.testing.assert_array_equal(data.train.images, images)
    np.testing.assert_array_equal(data.train.labels, labels.astype(np.int32), strict=True)
    standardized = data.standardized(images)
    assert standardized.dtype == np.float32
    # The mean rounds once, each pixel twice, by 2**-24 of numbers whose mean size is below 2.
    assert abs(standardized.mean(dtype=np.float64)) < 2**-22
    assert standardized.std(dtype=np.float64) == pytest.approx(1, abs=2**-22)
    assert load(paths, classes=10).classes == 10  # more than labels show
    # All alike: the deviation that they are divided by is not zero.
    Path(paths["train_images"]).write_bytes(encode(np.full((96, HEIGHT, WIDTH), 7, np.uint8)))
    again = load(paths)
    assert not again.standardized(again.train.images).any()
    assert (
        again.digest != data.digest == load(write_files(Path(paths["test_images"]).parent)).digest
    )


BLANK, LABELS = np.zeros((20, HEIGHT, WIDTH), np.uint8), np.zeros(20, np.uint8)
# the test file that is replaced, by what, other keys, and what the message has to say
DISAGREEMENTS = {
    "no images": ("images", BLANK[:0], {}, r"data\.test_labels: .*got 0 images in .*20 labels"),
    "images without width": ("images", BLANK[..., :0], {}, r"data\.test_labels"),
    "sizes": ("images", BLANK[:, 1:], {}, r"data\.test_images: .*; got 6 x 5 and 5 x 5"),
    "counts": ("labels", LABELS[1:], {}, r"got 20 images in .* and 19 labels"),
    "a new label": ("labels", LABELS + 3, {}, r"data\.test_labels: .* from 0 to 2; got 3"),
    "fewer classes": ("labels", LABELS, {"classes": 2}, r"data\.train_labels: .* to 1; got 2"),
    "a large batch": ("labels", LABELS, {"batch_size": 97}, r"data\.batch_size: .* 96 .*got 97"),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_files_that_do_not_belong_together(paths: dict[str, str], case: str) -> None:
    name, array, keys, message = DISAGREEMENTS[case]
    Path(paths[f"test_{name}"]).write_bytes(encode(array))
    with pytest.raises(RecipeError, match=message):
        load(paths, **keys)


def test_training_goes_through_all_images_with_their_labels(paths: dict[str, str]) -> None:
    data = load(paths)
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


def test_validation_is_of_whole_batches(paths: dict[str, str]) -> None:
    data = load(paths, batch_size=8)
    assert [labels.shape for _, labels in data.validation()] == [(8,), (8,)]
    assert next(load(paths, batch_size=64).validation())[0].shape == (20, HEIGHT, WIDTH)
