"""Which entries of an array a scale is chosen from."""

import numpy as np
import pytest

from unitscale.optim._sample import columns, is_sampled, parts, rows

SHAPES = [(2**20,), (4096, 512), (50304, 96), (64, 12, 3072), (3, 2, 512, 768)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_of_a_large_array_some_2_to_the_14_entries(shape: tuple[int, ...]) -> None:
    x = np.empty(shape, np.int8)
    axes = tuple(range(x.ndim))
    assert is_sampled(shape, axes)
    assert 2**12 <= columns(x, axes).size < 2**17
    assert 2**13 < rows(x, axes).size <= 2**14  # more than that XLA reduces in two kernels


@pytest.mark.parametrize("shape", [(), (7,), (256, 256), (0, 3)], ids=str)
def test_of_a_small_array_all(shape: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    assert not is_sampled(shape, tuple(range(x.ndim)))
    (part,) = parts(x, tuple(range(x.ndim)))
    np.testing.assert_array_equal(part, x)


@pytest.mark.parametrize("shape", [(50304, 96), (768, 3072)], ids=str)
def test_every_row_is_seen_in_some_columns_and_every_column_in_some_rows(shape) -> None:
    n, m = shape
    row, column = np.indices(shape, np.int32, sparse=True)
    number = row * m + column
    seen = columns(number, (0, 1)) // m
    assert len(np.unique(seen)) == n
    assert len(np.unique(rows(number, (0, 1)) % m)) == m


def test_each_item_of_a_stack_is_seen() -> None:
    items = np.broadcast_to(np.arange(12)[:, None, None], (12, 256, 512))
    for part in (rows(items, (1, 2)), columns(items, (1, 2))):
        np.testing.assert_array_equal(np.unique(part), np.arange(12))
    assert rows(items, (1, 2)).size >= 12 * 1024
    assert not is_sampled((100, 16, 64), (1, 2))
