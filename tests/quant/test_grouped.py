"""Matmuls of groups of rows, against float64 matmuls row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gradients import jit
from unitscale.quant import (
    Block,
    Delayed,
    Dynamic,
    MatmulConfig,
    QuantState,
    Static,
    Unit,
    group_of,
    grouped,
    quantize,
)

K, N = 8, 5
FACTORS = (0.25, 0.125, 0.5)
# Groups of several blocks of 16 rows, of one row, without rows; rows that belong to none.
SIZES = {
    "even": ([4, 4, 4], 12),
    "many blocks": ([33, 0, 1, 16], 50),
    "all in one": ([0, 20, 0], 20),
    "rows of none": ([3, 0, 2], 9),
    "nothing": ([0, 0], 4),
}


def draw(seed: int, *shapes) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def expected(lhs, rhs, dy, sizes) -> list[np.ndarray]:
    """The result and both gradients, row by row, without factors."""
    y, dlhs, drhs = np.zeros((len(lhs), N)), np.zeros(lhs.shape), np.zeros(rhs.shape)
    start = 0
    for group, size in enumerate(sizes):
        own = slice(start, start + size)
        y[own] = lhs[own] @ rhs[group]
        dlhs[own] = dy[own] @ rhs[group].T
        drhs[group] = lhs[own].T @ dy[own]
        start += size
    return [y, dlhs, drhs]


def run(lhs, rhs, dy, sizes, **options) -> list[np.ndarray]:
    @jit
    def program(lhs, rhs, dy, sizes):
        y, vjp = jax.vjp(lambda a, b: grouped(a, b, sizes, factors=FACTORS, **options), lhs, rhs)
        return y, *vjp(dy.astype(y.dtype))

    return [np.asarray(a).astype(np.float64) for a in program(lhs, rhs, dy, jnp.asarray(sizes))]


@pytest.mark.parametrize("name", SIZES)
def test_groups_of_any_size(name: str) -> None:
    sizes, rows = SIZES[name]
    lhs, rhs, dy = draw(0, (rows, K), (len(sizes), K, N), (rows, N))
    found = run(lhs, rhs, dy, sizes)
    for got, wanted, factor in zip(found, expected(lhs, rhs, dy, sizes), FACTORS, strict=True):
        np.testing.assert_allclose(got, factor * wanted, rtol=1e-5, atol=1e-5)
    # What belongs to nothing is exactly zero, whatever was next to it.
    assert not found[0][sum(sizes) :].any()
    assert not found[1][sum(sizes) :].any()
    assert not found[2][np.asarray(sizes) == 0].any()


@pytest.mark.parametrize(
    "strategy", [Unit(), Dynamic(), Dynamic("channel"), Block(4), Static((2, 4, 8))]
)
def test_strategies(strategy) -> None:
    """Each matmul is that of the values that the strategy's formats hold."""
    sizes, rows = SIZES["many blocks"]
    lhs, rhs, dy = draw(2, (rows, K), (len(sizes), K, N), (rows, N))
    lhs[0, 0], dy[0, 0] = 500.0, 1e6  # they saturate at a scale of 1, and are not NaN
    config = MatmulConfig(cotangent="e5m2", strategy=strategy)
    found = run(lhs, rhs, dy, sizes, config=config)

    def values(x, which, axis):
        own = Static(strategy.scales[which]) if isinstance(strategy, Static) else strategy
        name = "e5m2" if which == 2 else "e4m3fn"
        return np.float64(quantize(jnp.asarray(x), name, own, axis=(axis,)).value)

    left, right = values(lhs, 0, 1), values(rhs, 1, 1)
    wanted = expected(left, right, values(dy, 2, 1), sizes)[:2]
    wanted.append(expected(left, right, values(dy, 2, 0), sizes)[2])
    for got, want, factor in zip(found, wanted, FACTORS, strict=True):
        scale = 1e-6 * np.max(np.abs(want))
        np.testing.assert_allclose(got, factor * want, rtol=1e-5, atol=scale)


def test_a_state_sees_all_three_tensors() -> None:
    sizes, rows = SIZES["even"]
    lhs, rhs, dy = draw(3, (rows, K), (len(sizes), K, N), (rows, N))
    config, state = MatmulConfig(strategy=Delayed()), QuantState.create(Delayed())

    @jit
    def gradient(state):
        def loss(state):
            y = grouped(1000 * lhs, rhs, jnp.asarray(sizes), config=config, state=state)
            return jnp.sum(y * 1e-3 * dy)

        return jax.grad(loss)(state)

    scale = np.asarray(state.advance(gradient(state)).scale)
    tensors = 1000 * np.abs(lhs).max(), np.abs(rhs).max(), 1e-3 * np.abs(dy).max()
    for found, largest in zip(scale, tensors, strict=True):
        assert 224 < largest / found <= 448


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_operands_accumulate_in_float32(dtype: str) -> None:
    """A gradient that sums 3,000 ones is 3,000, where a 16-bit sum would stop at 2,048 or 256."""
    rows = 3000
    lhs, rhs = jnp.ones((rows, 2), dtype), jnp.ones((1, 2, 3), dtype)
    y, vjp = jax.vjp(lambda a, b: grouped(a, b, jnp.array([rows])), lhs, rhs)
    dlhs, drhs = vjp(jnp.ones_like(y))
    assert (y.dtype, dlhs.dtype, drhs.dtype) == (dtype,) * 3
    np.testing.assert_allclose(np.asarray(drhs, np.float32), rows, rtol=4e-3)


def test_vmap_and_scan() -> None:
    """Groups of other sizes in each example."""
    sizes = jnp.array([[3, 0, 17], [10, 10, 0]])
    lhs, rhs = draw(4, (2, 20, K), (2, 3, K, N))

    def f(lhs, rhs, sizes):
        return jnp.sum(jnp.sin(grouped(lhs, rhs, sizes)))

    @jit
    def run(lhs, rhs):
        grad = jax.grad(f, (0, 1))
        scanned = jax.lax.scan(lambda c, xs: (c, grad(*xs)), 0, (lhs, rhs, sizes))[1]
        return (
            jax.vmap(grad)(lhs, rhs, sizes),
            scanned,
            [grad(lhs[i], rhs[i], sizes[i]) for i in range(2)],
        )

    mapped, scanned, single = run(lhs, rhs)
    for i in range(2):
        for a, b, c in zip(mapped, scanned, single[i], strict=True):
            np.testing.assert_allclose(a[i], c, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(b[i], c, rtol=1e-6, atol=1e-6)


def test_group_of() -> None:
    sizes = [2, 0, 3]
    found = group_of(jnp.array(sizes), jnp.arange(6))
    np.testing.assert_array_equal(found, [*np.repeat(np.arange(3), sizes), 3])


def test_rows_of_other_groups_are_not_in_a_matmul() -> None:
    x, w, dy = draw(3, (6, K), (2, K, N), (6, N))
    sizes, finite = jnp.array([2, 3]), np.where(np.arange(6)[:, None] < 2, x, 0)

    @jit
    def run(x, w):
        y, vjp = jax.vjp(lambda w: grouped(x, w, sizes), w)
        return y, vjp(dy)[0]

    for wrong in (np.nan, np.inf):
        rows = x.copy()
        rows[2:] = wrong  # of the second group, and of none
        np.testing.assert_array_equal(run(rows, w)[1][0], run(finite, w)[1][0])
        rows = x.copy()
        rows[5] = wrong
        assert all(np.isfinite(leaf).all() for leaf in run(rows, w))


def test_rows_of_none_do_not_count_for_a_scale() -> None:
    x, w = np.ones((3, 2), np.float32), np.ones((2, 2, 1), np.float32)
    x[2] = 1e9
    y = grouped(x, w, jnp.array([1, 1]), config=MatmulConfig(strategy=Dynamic()))
    np.testing.assert_array_equal(y.ravel(), [2, 2, 0])


def test_sizes() -> None:
    x, w = jnp.ones((200, K)), jnp.ones((2, K, N))
    for dtype in ("int8", "uint8", "int32"):
        np.testing.assert_array_equal(
            grouped(x, w, jnp.array([100, 100], dtype)), np.full((200, N), K)
        )
