"""Idx files come back as they were written, and what is wrong with one is said."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recipes.errors import RecipeError
from recipes.images.config import ImageDataConfig
from recipes.images.data import ImageData, load_images, read_idx

from ..idx import CLASSES, CODES, HEIGHT, WIDTH, draw, encode, write_files

SHAPES = [(), (0,), (7,), (2, 3), (1, 2, 3, 4)]


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_was_written_is_read(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, compress: Callable[[bytes], bytes]
) -> None:
    array = np.asarray(np.random.default_rng(0).normal(size=shape) * 40, dtype)
    path = tmp_path / "file"
    path.write_bytes(compress(encode(array)))
    found = read_idx(path, "data.train_images")
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, array, strict=True)


IMAGES = encode(draw(4, 0)[0])
# contents of a file, and what the message has to say
WRONG = {
    "empty": (b"", r"is not an idx file: .*; got nothing; name an idx file"),
    "three bytes": (b"\0\0\x08", r"is not an idx file: .*; got 00 00 08;"),
    "text": (b"label,pixel\n1,2\n", r"is not an idx file: .*; got 6c 61 62 65;"),
    "unknown type": (b"\0\0\x0a\x01\0\0\0\0", r"is not an idx file: .*; got 00 00 0a 01;"),
    "header cut short": (IMAGES[:9], r"is cut short: expected a header of 16 bytes; got 9 bytes"),
    "cut short": (IMAGES[:-1], r"is cut short: expected 136 bytes for shape \(4, 6, 5\); got 135"),
    "too long": (IMAGES + b"\0", r"is longer than its header says: expected 136 .*; got 137;"),
    "huge": (b"\0\0\x08\x03" + b"\xff" * 12, r"is cut short: expected 79228162458924105385300197"),
    "gzip cut short": (gzip.compress(IMAGES)[:-9], r"is damaged: Compressed file ended"),
    "gzip header alone": (b"\x1f\x8b", r"is damaged: .*; fetch the file again"),
    "gzip of another method": (b"\x1f\x8b\0" + b"\0" * 20, r"is damaged: Unknown compression"),
    "gzip with wrong bytes": (gzip.compress(IMAGES)[:10] + b"\xff" * 40, r"is damaged: Error -3"),
    "gzip with a wrong sum": (gzip.compress(IMAGES)[:-8] + b"\0" * 8, r"is damaged: CRC check"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_damaged_file(tmp_path: Path, case: str) -> None:
    content, message = WRONG[case]
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=rf"data\.test_labels: .*file {message}") as caught:
        read_idx(path, "data.test_labels")
    assert caught.value.exit_code == 2


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"images: .*gone cannot be read: No such file"):
        read_idx(tmp_path / "gone", "data.train_images")
    with pytest.raises(RecipeError, match=r"data\.train_images: .* cannot be read: Is a directory"):
        read_idx(tmp_path, "data.train_images")


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    return write_files(tmp_path)


def load(paths: dict[str, str], **keys: int) -> ImageData:
    return load_images(ImageDataConfig.model_validate({"batch_size": 16, **paths, **keys}))


def test_a_data_set(paths: dict[str, str]) -> None:
    data = load(paths)
    assert data.summary == "96 training and 20 test images, 3 classes"
    assert (data.classes, data.image) == (CLASSES, (HEIGHT, WIDTH))
    for split, count in ((data.train, 96), (data.test, 20)):
        assert split.images.shape == (count, HEIGHT, WIDTH)
        assert split.images.dtype == np.uint8
        assert split.labels.dtype == np.int32
    images, labels = draw(96, len("train"))
    np.testing.assert_array_equal(data.train.images, images)
    np.testing.assert_array_equal(data.train.labels, labels)
    standardized = data.standardized(images)
    assert standardized.dtype == np.float32
    # The mean rounds once, each pixel twice, by 2**-24 of numbers whose mean size is below 2.
    assert abs(standardized.mean(dtype=np.float64)) < 2**-22
    assert standardized.std(dtype=np.float64) == pytest.approx(1, abs=2**-22)
    assert load(paths, classes=10).classes == 10  # more than labels show


def test_files_are_read_once_until_they_change(paths: dict[str, str]) -> None:
    first = load(paths)
    assert load(paths, batch_size=8).train.images is first.train.images
    assert load(paths).digest == first.digest
    # All alike: the deviation that they are divided by is not zero.
    Path(paths["train_images"]).write_bytes(encode(np.full((96, HEIGHT, WIDTH), 7, np.uint8)))
    again = load(paths)
    assert not again.standardized(again.train.images).any()
    assert again.digest != first.digest


def labels(*values: int, dtype: str = "uint8") -> np.ndarray:
    return np.resize(np.array(values, dtype), 20)


BLANK = np.zeros((20, HEIGHT, WIDTH), np.uint8)
# the test file that is replaced, by what, other keys, and what the message has to say
DISAGREEMENTS = {
    "labels for images": ("images", labels(0), {}, r"of bytes, .*; got uint8 of shape \(20,\)"),
    "images of floats": ("images", BLANK.astype("f4"), {}, r"got float32 of shape"),
    "no images": ("images", BLANK[:0], {}, r"data\.test_images: .*of shape \(0, 6, 5\)"),
    "images without width": ("images", BLANK[..., :0], {}, r"of shape \(20, 6, 0\)"),
    "images of colours": ("images", BLANK[..., None], {}, r"of shape \(20, 6, 5, 1\)"),
    "sizes": ("images", BLANK[:, 1:], {}, r"of the size .*; got 6 x 5 and 5 x 5; name files of"),
    "images for labels": ("labels", BLANK, {}, r"one axis of integers; got uint8 of shape \(20"),
    "labels of floats": ("labels", labels(0, dtype="f4"), {}, r"got float32 of shape"),
    "counts": ("labels", labels(0)[1:], {}, r"got 20 images in .* and 19 labels"),
    "a new label": ("labels", labels(0, 1, 2, 3), {}, r"labels from 0 to 2; got 3 at position 3"),
    "a negative label": ("labels", labels(0, -1, dtype="i1"), {}, r"got -1 at position 1"),
    "fewer classes": ("labels", labels(0), {"classes": 2}, r"data\.train_labels: .* got 2 at posi"),
    "a batch of more than all": (
        "labels",
        labels(0),
        {"batch_size": 97},
        r"data\.batch_size: expected at most the 96 training images; got 97; lower it",
    ),
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
            assert images.dtype == np.float32
            chosen = [numbers[image.tobytes()] for image in images]
            np.testing.assert_array_equal(labels, data.train.labels[chosen], strict=True)
            seen += chosen
        assert sorted(seen) == list(range(96))
    halves = [next(data.training(0, process=i, processes=2)) for i in (0, 1)]
    together = {image.tobytes() for images, _ in halves for image in images}
    assert together == {image.tobytes() for image in next(data.training(0))[0]}


def test_validation_is_of_whole_batches(paths: dict[str, str]) -> None:
    data = load(paths, batch_size=8)
    assert [labels.shape for _, labels in data.validation()] == [(8,), (8,)]
    assert len(list(data.validation(1))) == 1
    assert next(load(paths, batch_size=64).validation())[0].shape == (20, HEIGHT, WIDTH)


@pytest.mark.parametrize("size", [1, 7, 20, 32])
def test_all_test_images_in_batches_of_one_size(paths: dict[str, str], size: int) -> None:
    data = load(paths, batch_size=size)
    batches = [images for (images,) in data.test_images()]
    assert {batch.shape for batch in batches} == {(size, HEIGHT, WIDTH)}
    together = np.concatenate(batches)
    expected = data.standardized(data.test.images)
    np.testing.assert_array_equal(together[:20], expected, strict=True)
    assert not together[20:].any()
