"""Grouped matmuls against float64 matmuls of each row."""

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
    group_of,
    grouped,
    quantize,
)

K, N = 8, 5
FACTORS = (0.25, 0.125, 0.5)
# Groups of several blocks of 16 rows, of one row, without rows; rows that belong to none.
MANY = np.array([33, 0, 1, 16]), 52
SIZES = {"many blocks": MANY, "all in one": ([0, 20, 0], 20), "nothing": ([0, 0], 4)}


def draw(seed: int, *shapes) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def tensors(seed: int, sizes, rows: int) -> list[np.ndarray]:
    return draw(seed, (rows, K), (len(sizes), K, N), (rows, N))


def expected(lhs, rhs, dy, sizes) -> list[np.ndarray]:
    """Compute the result and both gradients row by row, without factors."""
    y, dlhs, drhs = np.zeros((len(lhs), N)), np.zeros(lhs.shape), np.zeros(rhs.shape)
    start = 0
    for group, size in enumerate(sizes):
        own = slice(start, start + size)
        y[own] = lhs[own] @ rhs[group]
        dlhs[own] = dy[own] @ rhs[group].T
        drhs[group] = lhs[own].T @ dy[own]
        start += size
    return [y, dlhs, drhs]


def three(lhs, rhs, dy, sizes, **options) -> tuple[jax.Array, ...]:
    f = lambda a, b: grouped(a, b, sizes, factors=FACTORS, **options)  # noqa: E731
    y, vjp = jax.vjp(f, lhs, rhs)
    return y, *vjp(dy.astype(y.dtype))


@pytest.mark.parametrize("name", SIZES)
def test_groups_of_any_size(name: str) -> None:
    sizes, rows = SIZES[name]
    args = *tensors(0, sizes, rows), np.asarray(sizes)
    found = jit(three)(*args)
    for got, wanted, factor in zip(found, expected(*args), FACTORS, strict=True):
        np.testing.assert_allclose(got, factor * wanted, rtol=1e-5, atol=1e-5)
    # What belongs to nothing is exactly zero, whatever was next to it.
    assert not found[0][sum(sizes) :].any()
    assert not found[1][sum(sizes) :].any()
    assert not found[2][np.asarray(sizes) == 0].any()


def test_strategies() -> None:
    """Each matmul equals that of the operands rounded to the strategy's formats."""
    strategies = [Dynamic("channel"), Block(4), Static((2, 4, 8))]
    lhs, rhs, dy = tensors(2, *MANY)
    lhs[0, 0], dy[0, 0] = 500.0, 1e6  # they saturate at a scale of 1, and are not NaN

    def values(strategy, x, which, axis):
        own = Static(strategy.scales[which]) if isinstance(strategy, Static) else strategy
        name = "e5m2" if which == 2 else "e4m3fn"
        return quantize(x, name, own, axis=(axis,)).value

    @jit
    def run(*args):
        found = []
        for strategy in strategies:
            config = MatmulConfig(cotangent="e5m2", strategy=strategy)
            operands = ((args[0], 0, 1), (args[1], 1, 1), (args[2], 2, 1), (args[2], 2, 0))
            rounded = [values(strategy, *operand) for operand in operands]
            found.append((three(*args, MANY[0], config=config), rounded))
        return found

    for found, operands in run(lhs, rhs, dy):
        left, right, by_rows, by_columns = map(np.float64, operands)
        wanted = expected(left, right, by_rows, MANY[0])[:2]
        wanted.append(expected(left, right, by_columns, MANY[0])[2])
        for got, want, factor in zip(found, wanted, FACTORS, strict=True):
            scale = 1e-6 * np.max(np.abs(want))
            np.testing.assert_allclose(got, factor * want, rtol=1e-5, atol=scale)


def test_a_state_sees_all_three_tensors() -> None:
    lhs, rhs, dy = tensors(3, *MANY)
    lhs, dy = 1000 * lhs, 1e-3 * dy
    config, state = MatmulConfig(strategy=Delayed()), QuantState.create(Delayed())

    def loss(state):
        return jnp.sum(grouped(lhs, rhs, MANY[0], config=config, state=state) * dy)

    scale = np.asarray(state.advance(jit(jax.grad(loss))(state)).scale)
    used = slice(0, MANY[0].sum())
    for found, tensor in zip(scale, (lhs[used], rhs, dy[used]), strict=True):
        assert 224 < np.abs(tensor).max() / found <= 448


def test_narrow_operands_accumulate_in_float32() -> None:
    """A gradient that sums 3,000 ones is 3,000; a bfloat16 sum would stop at 256."""
    rows = 3000
    found = jit(three)(
        *(jnp.ones(s, "bfloat16") for s in [(rows, 2), (1, 2, 3), (rows, 3)]), [rows]
    )
    assert [x.dtype for x in found] == ["bfloat16"] * 3
    np.testing.assert_allclose(np.float32(found[2]), FACTORS[2] * rows, rtol=4e-3)


def test_vmap_and_scan() -> None:
    """Every example has groups of other sizes."""
    sizes = jnp.array([[3, 0, 17], [10, 10, 0]])
    lhs, rhs = draw(4, (2, 20, K), (2, 3, K, N))
    grad = jax.grad(lambda *args: jnp.sum(jnp.sin(grouped(*args))), (0, 1))

    @jit
    def run(*xs):
        scanned = jax.lax.scan(lambda c, xs: (c, grad(*xs)), 0, xs)[1]
        return jax.vmap(grad)(*xs), scanned, [grad(*(x[i] for x in xs)) for i in range(2)]

    mapped, scanned, single = run(lhs, rhs, sizes)
    for found in (mapped, scanned):
        for a, *each in zip(found, *single, strict=True):
            np.testing.assert_allclose(a, each, rtol=1e-6, atol=1e-6)


def test_rows_of_other_groups_and_of_none() -> None:
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
    # Nor do rows of none count for a scale.
    x, w = np.float32([[1, 1], [1, 1], [1e9, 1]]), np.ones((2, 2, 1), np.float32)
    dynamic = MatmulConfig(strategy=Dynamic())
    y = jit(lambda *args: grouped(*args, config=dynamic))(x, w, jnp.array([1, 1]))
    np.testing.assert_array_equal(y.ravel(), [2, 2, 0])
    found = group_of(jnp.array([2, 0, 3]), jnp.arange(6))
    np.testing.assert_array_equal(found, [0, 0, 2, 2, 2, 3])


def test_dtypes_of_sizes() -> None:
    x, w, sizes = jnp.ones((200, K)), jnp.ones((2, K, N)), [100, 100]
    types = [jnp.array(sizes, dtype) for dtype in ("int8", "uint8", "int32")]
    for y in jit(lambda types: [grouped(x, w, sizes) for sizes in types])(types):
        np.testing.assert_array_equal(y, np.full((200, N), K))
