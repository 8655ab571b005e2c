"""Rows of statistics against numpy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.analysis._scale_sums import DOWN, UP, ScaleSums, add_rows, over_iterations
from unitscale.core import format_of

FORMATS = tuple(map(format_of, ("float16", "e4m3fn")))
RNG = np.random.default_rng(0)


def expected(x) -> list[float]:
    size = np.abs(np.asarray(x, np.float64))
    row = [size.size, *(np.sum((size * s) ** 2) for s in (1, UP, DOWN)), np.sum(size == 0)]
    for f in FORMATS:
        row += [
            np.sum(size <= f.smallest_subnormal / 2),
            np.sum(size < f.smallest_normal),
            np.sum(size > f.max),
        ]
    with np.errstate(over="ignore"):  # one of the three sums of squares is to be in range
        return [float(np.float32(x)) for x in (*row, size.max(initial=0))]


def check(row, x) -> None:
    # The sum of n float32 squares is off by n + 1 roundings at most; a square below the normal
    # numbers may count as zero.
    info = np.finfo(np.float32)
    rtol, atol = (x.size + 1) * float(info.eps), x.size * float(info.tiny)
    np.testing.assert_allclose(row, expected(x), rtol=rtol, atol=atol)


def rows_of(values, sample=None):
    def collect(xs):
        sums = ScaleSums(FORMATS, sample)
        for x in xs:
            sums.add(x)
        return sums.together()

    return jax.jit(collect)(values)


def value(*shape):
    # Of every range that is counted: zeros, subnormal numbers, numbers beyond the largest.
    x = RNG.normal(size=shape) * 2.0 ** RNG.integers(-30, 20, size=shape)
    return np.asarray(np.where(RNG.random(shape) < 0.1, 0, x), np.float32)


def test_sizes() -> None:
    shapes = [(), (3,), (4,), (0,), (1,), (2, 2), (7, 11), (80,), (128,), (2**17 + 3,)]
    values = [value(*shape) for shape in shapes]
    for x, row in zip(values, rows_of(values), strict=True):
        check(row, x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_values(dtype) -> None:
    x = jnp.asarray(np.clip(value(64), -6e4, 6e4), dtype)
    check(rows_of([x])[0], x.astype(jnp.float32))


def test_a_sample_stands_for_all_but_amax_is_that_of_all() -> None:
    x = RNG.normal(size=4096).astype(np.float32)
    x[1] = 100  # not in the sample
    row = np.asarray(rows_of([x], 64)[0])
    part = np.asarray(x[::63], np.float64)
    np.testing.assert_allclose(row[1], np.sum(part**2) * 4096 / part.size, rtol=1e-5)
    assert (row[0], row[-1]) == (4096, 100)


def test_not_finite() -> None:
    row = rows_of([np.array([np.inf, 1.0], np.float32), np.array([np.nan, 1.0], np.float32)])
    assert not np.isfinite(row[:, -1]).any()
    assert not np.isfinite(row[:, 1]).any()


def test_rows_of_bodies_keep_their_place() -> None:
    sums = ScaleSums((), None)
    sums.add(jnp.ones(2))
    inner = ScaleSums((), None)
    inner.add(jnp.full(3, 2.0))
    inner.add(jnp.full(1, 3.0))
    sums.extend(inner.together())
    sums.extend(ScaleSums((), None).together())
    sums.add(jnp.full(2, 4.0))
    assert sums.together()[:, -1].tolist() == [1, 2, 3, 4]


def test_iterations_add_up() -> None:
    rows = jnp.asarray(np.stack([rows_of([value(5), value(2)]) for _ in range(3)]))
    total = add_rows(add_rows(rows[0], rows[1]), rows[2])
    np.testing.assert_allclose(over_iterations(rows), total, rtol=1e-6)
    assert over_iterations(rows[:0]).tolist() == np.zeros(rows.shape[1:]).tolist()
