"""Typical programs in 16 bits compute the same as float32 on the same values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.batching import compute, entry
from unitscale import ScaledArray, as_scaled, scalify, to_array
from unitscale.transforms import cast_data

from .agreement import HALF, Program, check, narrow, normal, scaled
from .table import IDS, A as TABLE

FORMATS = [jnp.float16, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]


# -- parts, choices, differences and sums, which may be of another size than their operands --------


def squared(part: Program) -> Program:
    """A matmul, which rounds its operands, of a squared slice."""
    return lambda x: jnp.square(part(x)) @ jnp.ones(part(x).shape[-1], x.dtype)


def variance(mean: Program) -> Program:
    return lambda x: mean(x * x) - mean(x) ** 2


def moving_average(x: Any) -> Any:
    sums = jnp.cumsum(x)
    return (sums[10:] - sums[:-10]) / 10


def hub(x: Any) -> Any:
    """Compute degrees of a graph in which all edges lead to one node."""
    return jax.ops.segment_sum(x, jnp.zeros(x.size, jnp.int32), x.size)


def states(x: Any) -> Any:
    """Run a recurrence of complex numbers."""
    turn = 0.9 * jnp.exp(0.3j)
    step = lambda h, u: (turn * h + u, (h.real, jnp.abs(h)))  # noqa: E731
    return lax.scan(step, jnp.zeros(3, jnp.complex64), x)[1]


def root(x: Any) -> Any:
    """Stop on the relative error, whatever the size."""
    stop = lambda c: jnp.max(jnp.abs(c * c - x) / x) > 1e-3  # noqa: E731
    return lax.while_loop(stop, lambda c: (c + x / c) / 2, x)


def transport(cost: Any) -> Any:
    """Compute Sinkhorn's plan u K v, with u and v of very different magnitudes."""
    kernel = jnp.exp(-cost)

    def turn(s: Any) -> Any:
        u = 0.25 / (kernel @ s[1])
        return u, 0.25 / (kernel.T @ u)

    away = lambda s: jnp.sum(jnp.abs(s[0] * (kernel @ s[1]) - 0.25)) > 1e-4  # noqa: E731
    u, v = lax.while_loop(away, turn, (jnp.ones(4), jnp.ones(4)))
    return u[:, None] * kernel * v


def doubled(x: Any) -> Any:
    ref = jax.new_ref(x)
    ref[...] = 2 * ref[...]
    return ref[...] + 1


def sums_into_places(x: Any) -> Any:
    """Add to one entry per row, inside and outside of the row, and to whole columns."""

    def at(i: int, mode: str, name: str = "add") -> Any:
        add = lambda row, j: getattr(row.at[j], name)(2.5, mode=mode)  # noqa: E731
        return jax.vmap(add)(x[0, :2], jnp.array([[i], [1]]))

    ones = [at(i, mode) for i in (0, 7, -9) for mode in ("drop", "clip")]
    columns = jax.vmap(lambda x, i: x.at[:, i].add(x[:, :1]))(x, jnp.array([[2], [0]]))
    return ones, at(2, "drop", "subtract"), columns, x.at[:, :, 1].add(x[..., 0])


def with_number(x: Any, c: Any) -> list[Any]:
    return [x * c, x + c, c - x, c / x, jnp.abs(lax.exp(x + 1j) * c)]


# Arrays of one number that a cast changes.
CASTS: list[Callable[[], Any]] = [
    lambda: jnp.full(3, -2.7).astype(jnp.int32),
    lambda: jnp.full(3, 300.0).astype(jnp.uint8),
    lambda: -jnp.full(3, -128.0).astype(jnp.int8),
    lambda: jnp.full(3, 1.06).astype(jnp.float8_e4m3fn).astype(jnp.float32),
    lambda: jnp.full(3, 1e5).astype(jnp.float16).astype(jnp.float32),
    lambda: jnp.full(3, 2.5).astype(jnp.complex64),
    lambda: -jnp.zeros(3).astype(jnp.complex64),
]
# One small positive number beside large negative ones; columns in units of their own; a table.
SMALL = np.array([1e-2, *[-100.0] * 7])
FOUR = np.array([1500.0, 800.0, 0.1, 0.2])
STEEP = normal(0, 8, 8) + np.linspace(-30, 30, 8)
UNITS = np.stack([40 + 10 * normal(1, 64), 5e4 + 1e4 * normal(2, 64), 0.05 + 0.01 * normal(3, 64)])
PLACES = np.array([[1e-3, 100.0] * 4, [100.0, 1e-3] * 4])
WINDOW = (lax.add, (7,), (1,), "VALID")
NEAR_ONE = 0.7 + 0.02 * normal(0, 64)
FILLS, KEEP = (0.0, -np.inf, np.inf, np.nan), np.array([True, False, True])
FAR = np.array([0.0, 1.0, 40.0, 2.0])
COSTS = FAR[:, None] + np.abs(np.arange(4.0)[:, None] - np.arange(4.0))
UNLIKE = np.array([[1.0, 300.0, -2.0], [2e-3, -1e-3, 1e-3]])
MATRIX, EDGES = np.array([[4.0, 1.0], [1.0, 3.0]]), (1e-9, 1e5)

VALUES: dict[str, tuple[Program, Any]] = {
    "elements": (lambda x: x[2] * x[3], FOUR),
    "a dynamic slice": (squared(lambda x: lax.dynamic_slice(x, (jnp.int32(2),), (2,))), FOUR),
    "over the least": (lambda x: x / x.min(), np.array([1.0, 3e3, 1.2e5])),
    "the largest so far": (squared(lax.cummax), np.array([600.0, *[0.0] * 4095])),
    "a product of choices": (lambda x: jax.nn.relu(x) * jax.nn.relu(x[::1]), SMALL),
    "near a root": (squared(lambda x: 1 - jnp.cos(x)), 1e-2 * normal(0, 8)),
    "large logarithms": (lambda x: (jnp.log(x) ** 3) @ jnp.ones(8), 1e-25 * np.arange(1, 9)),
    "a difference": (lambda x: (x[:, None] - x) ** 3 @ jnp.ones(8), 1 + 4e-3 * normal(0, 8)),
    "a spectrum": (squared(lambda x: jnp.abs(jnp.fft.rfft(x))), np.ones(2**14)),
    "one in many": (squared(lambda x: x), np.array([300.0, *[0.0] * (2**14 - 1)])),
    "shares along another axis": (lambda x: jnp.exp(x) / jnp.exp(x).sum(1)[None], STEEP.T),
    "large in different places": (lambda x: x[0] * x[1], PLACES),
    "scanned items": (lambda x: lax.map(lambda y: y @ y.T, x), UNITS[..., None, :8]),
    "uniform shares": (lambda x: jax.nn.softmax(0 * x) @ x.T, normal(0, 16, 256)),
    "peaked shares": (lambda x: jax.nn.softmax(100 * x) @ x.T, normal(0, 16, 256)),
    "moving average": (moving_average, np.linspace(0.5, 1.5, 1000)),
    "variance of windows": (variance(lambda a: lax.reduce_window(a, 0.0, *WINDOW) / 7), NEAR_ONE),
    "a hub": (lambda x: hub(x)[:1], np.ones(2**17)),
    "a large deviation": (lambda x: x.std(-1) @ jnp.ones(3), 1e6 * normal(6, 3, 64)),
    "log of a sigmoid's tail": (lambda x: jnp.log(jax.nn.sigmoid(-x)), np.arange(5.0, 9.0)),
    "log of a normal tail": (jax.scipy.stats.norm.logsf, np.arange(5.0, 9.0)),
    "constants": (lambda x: (x * 1e-6 + 1e-8) / 3.0 * FAR - jnp.ones(4) * 1e-7, UNITS[2, :4]),
    "small second moments": (
        lambda x: x / (jnp.sqrt(0.001 * x**2) + 1e-12),
        np.array([1e-4, 3e-8, -2e-7]),
    ),
    # 1 - b, as for variances of a diffusion model, is not rounded before it is used.
    "what is left of one": (
        lambda b: (jnp.log(1 - b), (1 + b) - 1, 1 - jnp.cumprod(1 - b)),
        np.linspace(1e-4, 0.02, 64),
    ),
    "fills": (
        lambda x: [jnp.where(KEEP, x, fill) for fill in FILLS],
        np.array([1e-3, -2e-3, 3e-3]),
    ),
    "gradients of the larger of two": (
        jax.grad(lambda pair: jnp.sum(jnp.maximum(*pair))),
        tuple(UNLIKE),
    ),
    "segments": (
        lambda x: [f(x, IDS, 4) for f in (jax.ops.segment_max, jax.ops.segment_min)],
        50 * TABLE,
    ),
    "functions of parts": (
        lambda x: (x.at[IDS[1:3]].apply(jnp.sin), jnp.zeros_like(x).at[IDS].add(x)),
        50 * TABLE,
    ),
    "sums into places": (sums_into_places, normal(0, 2, 3, 4)),
    "a reference": (doubled, np.arange(4.0)),
    "a plan of transport": (transport, COSTS),
    "numbers that are cast": (
        lambda x: [with_number(x, make()) for make in CASTS],
        np.array([1.5, -2.0, 3.0]),
    ),
    **{f"complex states near {n}": (states, n * normal(0, 6, 3)) for n in EDGES},
    **{f"a loop that stops near {n}": (root, n * np.array([0.7, 1.0, 1.5, 2.0])) for n in EDGES},
    **{
        f"a matrix near {n}": (
            lambda x: (
                jnp.linalg.solve(x, jnp.array([1.0, -2.0])),
                jnp.linalg.inv(x) @ jnp.array([1.0, -2.0]),
                jnp.linalg.cholesky(x),
                jnp.abs(jnp.linalg.eigvals(x)).max(),
            ),
            n * MATRIX,
        )
        for n in EDGES
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_parts_choices_differences_and_sums(dtype: Any) -> None:
    table = {name: (f, narrow(x, dtype)) for name, (f, x) in VALUES.items()}
    check(table, rtol=2 * float(jnp.finfo(dtype).eps), atol=2e-4)  # two roundings


# -- chains of functions, loops and their gradients ------------------------------------------------


def warped(costs: Any, most: float = 1e10) -> Any:
    """Compute soft dynamic time warping, with a large number for impossible paths."""

    def row(above: Any, costs: Any) -> Any:
        def cell(left: Any, item: Any) -> Any:
            cost, up, across = item
            best = cost - jax.nn.logsumexp(-jnp.stack([up, left, across]))
            return best, best

        after = lax.scan(cell, most, (costs, above[1:], above[:-1]))[1]
        return jnp.concatenate([jnp.array([most]), after]), None

    first = jnp.full(costs.shape[1] + 1, most).at[0].set(0.0)
    return lax.scan(row, first, costs)[0][-1]


def recurrent(x: Any) -> Any:
    def step(state: Any, row: Any) -> Any:
        state = jnp.tanh(row + state @ x[:4] / 4)
        return state, state

    return lax.scan(step, jnp.zeros(4), jnp.tile(x, (20, 1)))[1]


CHAINS: dict[str, tuple[Program, Any]] = {
    "a running mean": (
        lambda x: lax.fori_loop(0, 3000, lambda i, c: 0.999 * c + 0.001 * x, jnp.zeros(3)),
        normal(2, 3),
    ),
    "a recurrent network": (recurrent, normal(4, 6, 4)),
    "warped time": (warped, np.abs(normal(5, 6, 6))),
    "a hidden layer": (
        lambda x: (lambda h: (h @ x.T + jnp.tanh(h) @ x.T).sum(0))(jax.nn.gelu(x @ x.T @ x)),
        normal(9, 6, 4),
    ),
    "normalized residuals": (
        lambda x: x + jax.nn.standardize(x + jax.nn.standardize(x) @ x[:4]) @ x[:4],
        normal(10, 6, 4),
    ),
}


@pytest.mark.parametrize("dtype", FORMATS)
def test_chains_and_their_gradients(dtype: Any) -> None:
    def both(program: Program) -> Program:
        def run(x: Any) -> Any:
            y, pull = jax.vjp(program, x)
            return y, pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))[0]

        return run

    table = {name: (both(f), narrow(x, dtype)) for name, (f, x) in CHAINS.items()}
    check(table, atol=6 * float(jnp.finfo(dtype).eps))


# -- plain arrays and numbers beside scaled ones ---------------------------------------------------

# Programs of a float16 array with a scale and a plain array, each near the size m.
BESIDE: dict[str, Program] = {
    "sum": lambda x, y, m: x + y,
    "where": lambda x, y, m: jnp.where(y > 0, x, y),
    "maximum": lambda x, y, m: jnp.maximum(x, y),
    "concatenate": lambda x, y, m: jnp.concatenate([x, y]),
    "set": lambda x, y, m: y.at[1].set(x[1]),
    "add to": lambda x, y, m: y.at[1].add(x[1]),
    "add to zeros": lambda x, y, m: (0 * y).at[1].add(x[1]),
    "moment that starts at an array": lambda x, y, m: lax.scan(
        lambda c, a: (0.9 * c + 0.1 * a, c), y[0], x
    ),
    "moment that starts at a number": lambda x, y, m: lax.scan(
        lambda c, a: (c + a, c), jnp.full(3, 2 * min(m, 1e6)), x
    ),
    "cond": lambda x, y, m: [
        lax.cond(test, lambda: x, lambda: y) for test in (x[0, 0] > 9 * m, x[0, 0] < 9 * m)
    ],
    "chosen number": lambda x, y, m: jnp.where(x > 0, x, 2 * min(m, 1e6)),
    "less than a number": lambda x, y, m: 2 * m - x,
    "gradient of labels' logits": lambda x, y, m: (
        x + jax.grad(lambda z: (m * jnp.take_along_axis(z, LABELS, -1)).sum())(x)
    ),
    "clipped labels": lambda x, y, m: (
        x - jax.grad(lambda z: (m * jnp.take_along_axis(z, 4 - LABELS, 1, mode="clip")).sum())(x)
    ),
    "indices that are promised to differ": lambda x, y, m: (
        x - jnp.zeros(3).at[jnp.array([2, 0])].add(m * jnp.ones(2), unique_indices=True)
    ),
    "an index that comes back": lambda x, y, m: x + jnp.zeros(3).at[jnp.zeros(200, int)].add(m),
}
LABELS = jnp.asarray([[2], [0]])


@pytest.mark.parametrize("size", [1e-9, pytest.param(1e11, marks=pytest.mark.slow)])
def test_what_has_no_scale_is_met_at_its_own_size(size: float) -> None:
    """Arrays without a scale are measured at run time; at scale 1, float16 would lose 1e-9."""
    x, y = (jnp.asarray(size * normal(i, 2, 3), jnp.float32) for i in range(2))
    half = as_scaled(x, dtype=jnp.float16)
    table = {name: (lambda x, y, f=f: f(x, y, size), half, y) for name, f in BESIDE.items()}
    check(table, atol=4 * HALF)


# Programs of an array near 1 with a scale and a plain array of large numbers: few are chosen.
BESIDE_LARGE: dict[str, Program] = {
    "where": lambda x, y: jnp.where(x < 2, x, y),
    "minimum": lambda x, y: jnp.minimum(x, y),
    "clamp": lambda x, y: lax.clamp(-y, x, y),
    "concatenate": lambda x, y: jnp.concatenate([x, y])[:3],
    "set": lambda x, y: y.at[:3].set(x[:3]),
    "where, with a number": lambda x, y: jnp.where(x < 2, x, y[0]),
}


def test_elements_beside_an_array_of_large_numbers_are_kept() -> None:
    x = narrow([0.3, -1.2, 1.7, 3.0])
    table = {
        (name, large): (lambda x, y, f=f: 3 * f(x, y)[:3], x, large * np.float32([1, 1.5, 2, 1]))
        for name, f in BESIDE_LARGE.items()
        for large in (np.float32(1e4), np.float32(1e30))
    }
    check(table, rtol=2 * HALF)


# The product of number and scale may overflow float32 although the value does not.
UNITS_APART = (100, 2.0**-12, 3.2e11), (-100, 2.0**12, 3e-11), (100, 0.5, 1e-20)
BEYOND: dict[str, tuple[Program, list[float], int]] = {
    "log of a floor": (lambda x: jnp.log(jnp.maximum(x, 1e-30)), [0, 1e4 / 2**20], 20),
    "sum": (lambda x: jnp.log(x + 1e-36), [0, 2.0**-10, 2.0**-9], 20),
    "choice": (lambda x: jnp.log(jnp.where(x > 0, x, 1e-36)), [0, 2.0**-10, 2.0**-9], 20),
    "gradient": (
        jax.grad(lambda x: jnp.sum(jnp.sqrt(jnp.maximum(x, 1e-30)))),
        [0, 1e4 / 2**20],
        20,
    ),
    **{
        f"{n} times 2^{log2}": (lambda x, n=n: jnp.where(x != 0, x * n, 1.0), [m, -m / 2], log2)
        for log2, m, n in UNITS_APART
    },
}


def test_numbers_far_from_the_scale_keep_their_value() -> None:
    table = {
        (name, dtype): (f, scaled(data, 2.0**log2, dtype))
        for name, (f, data, log2) in BEYOND.items()
        for dtype in ("float32", "float16")
    }
    check(table, rtol=2 * HALF)


A = narrow([1.0, 2.0, 3.0])
SAME = ScaledArray(A.data * 2, A.scale / 2)
TINIER = narrow([1e-12, 2e-12, 3e-12])
ZERO = ScaledArray(jnp.zeros(3, jnp.float16), jnp.float32(1))

# Of numbers, the same numbers at another scale, small ones, zeros, and a zero without a scale.
ADDED_TO_ZEROS: dict[str, Callable[..., Any]] = {
    "a moment": lambda a, b, y, z, n: 0.9 * z + 0.1 * y,
    "of squares": lambda a, b, y, z, n: 0.9 * z + 0.1 * y * y,
    "difference": lambda a, b, y, z, n: (a - b) + y,
    "product of a difference": lambda a, b, y, z, n: (a - b) * a + y,
    "dot product": lambda a, b, y, z, n: jnp.vdot(a - b, a) + y,
    "maximum": lambda a, b, y, z, n: jnp.maximum(a - b, y),
    "relu": lambda a, b, y, z, n: jax.nn.relu(-a) + y,
    "where": lambda a, b, y, z, n: jnp.where(a > 5, a, y),
    "sum": lambda a, b, y, z, n: jnp.sum(jnp.where(a > 5, a, 0.0)) + y,
    "concatenate": lambda a, b, y, z, n: jnp.concatenate([a - b, y, z]),
    "scan": lambda a, b, y, z, n: lax.scan(lambda c, _: (0.9 * c + y, c), z, length=3),
    "set": lambda a, b, y, z, n: (a - b).at[1].set(y[1]),
    "cond": lambda a, b, y, z, n: lax.cond(a[0] > 5, lambda: a, lambda: y) + z,
    "a number": lambda a, b, y, z, n: y + n,
}


def test_what_is_added_to_zeros_keeps_its_precision() -> None:
    args = A, SAME, TINIER, ZERO, jnp.zeros(())
    check({name: (f, *args) for name, f in ADDED_TO_ZEROS.items()}, rtol=4 * HALF)


# -- a cast to float32, as users write it, against float64 -----------------------------------------


ISLANDS: dict[str, tuple[Program, Program]] = {
    "var": (lambda x: x.var(-1), lambda x: x.var(-1)),
    # As Flax computes the variance of its LayerNorm.
    "mean of squares": (lambda x: (x * x).mean(-1) - x.mean(-1) ** 2, lambda x: x.var(-1)),
    "logarithm of softmax": (
        lambda x: jax.nn.log_softmax(x)[:, :1] - jax.nn.log_softmax(x)[:, 1:2],
        lambda x: x[:, :1] - x[:, 1:2],
    ),
}


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_follows_a_cast_is_float32(dtype: Any) -> None:
    mean = 60.0
    given = as_scaled(jnp.asarray(mean + normal(0, 16, 512), jnp.float32), dtype=dtype)
    exact = np.asarray(to_array(given), np.float64)
    table = {
        name: (lambda x, f=f: to_array(scalify(lambda x: f(x.astype(jnp.float32)))(x)), given)
        for name, (f, _) in ISLANDS.items()
    }
    # One rounding at the end, and float32 before: of sums of 512 squares, the largest term.
    step = float(jnp.finfo(dtype).eps)
    before = 8 * float(jnp.finfo(jnp.float32).eps) * (mean + 4) ** 2
    for name, found in compute(table).items():
        expected = ISLANDS[name][1](exact)
        size = np.max(np.abs(expected))
        atol = step * size + before * max(size, 1)
        with entry(name):
            np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def test_an_island_of_products_is_asked_for() -> None:
    dtype = jnp.float16
    given = as_scaled(jnp.asarray(16 + normal(0, 16, 512), jnp.float32), dtype=dtype)
    exact = np.asarray(to_array(given), np.float64)

    def program(x: Any) -> Any:
        wide = cast_data(x, jnp.float32)
        y = (wide * wide) @ jnp.ones(512) / 512 - wide.mean(-1) ** 2
        return y, y.astype(dtype), x * 2, lax.add(wide, x)

    wide, cast, beside, total = jax.jit(scalify(program))(given)
    assert (wide.dtype, cast.dtype, beside.dtype) == (jnp.float32, dtype, dtype)
    np.testing.assert_allclose(to_array(wide), exact.var(-1), rtol=1e-3)
    np.testing.assert_allclose(to_array(total), 2 * exact, rtol=1e-6)


# -- what `python -m recipes bench fuzz` has found wrong -------------------------------------------


ROWS = scaled([[1.0, 2.0], [1.0, 3.0]], [[0.5], [16.0]])
NO_ROWS = scaled(jnp.zeros((0, 2)), jnp.zeros((0, 1)))
NEAR_ZERO = scaled([0.5, 1.25, 2.0], 2.0**-24)
EIGHT = scaled([1.0, -0.5, 1.5], 0.5, jnp.float8_e4m3fn)

FOUND: dict[str, tuple[Program, Any]] = {
    "a number and a scale per row": (lambda x: 1 - x, ROWS),
    "clamped at numbers with a scale per row": (lambda x: lax.clamp(1.0, x, 4.0), ROWS),
    "a row at a scale per item and a scale per row": (lambda x: x[:, -1] - x, ROWS),
    "a scale per row without rows": (lambda x: (1 - x).T, NO_ROWS),
    "a scale per item and one item": (
        lambda x: (lambda y: y - y.mean(-1, keepdims=True))(lax.map(lambda v: 2 * v, x)),
        scaled([1.0, 1.0, 5.0]),
    ),
    "a maximum so far, row by row, from the lowest number": (
        lambda x: lax.scan(
            lambda c, i: (c.at[i].set(jnp.maximum(c[i], x[i] * x[i])), None),
            jnp.full(x.shape, jnp.finfo(jnp.float32).min / 2),
            jnp.arange(2),
        )[0][:2],
        scaled([[1.0, 2.0], [-1.0, 3.0], [0.0, 1.0]], 2.0**-8, jnp.float32),
    ),
    "a number far above the operand, squared": (
        lambda x: (x + 1) ** 2 * (x + 1) + x,
        scaled([1.0, 2.0], 2.0**-40),
    ),
    "a moment that starts at zero": (lambda x: 0.1 * x + 0.9 * jnp.zeros_like(x), NEAR_ZERO),
    "an angle near zero": (lambda x: jnp.arctan2(x, jnp.ones_like(x)), NEAR_ZERO),
    "a part that is zero, at a large scale": (
        lambda x: (lambda y: jnp.angle(lax.complex(y * y + 1, y)))((1j * x).real),
        scaled([1.0], 2.0**37),
    ),
    "cotangents that cancel": (
        jax.grad(lambda x: jnp.sum(x - (x * x + x))),
        scaled([1.0], 2.0**-40),
    ),
    "a transform of what was small": (
        lambda x: jnp.fft.irfft(jnp.fft.rfft(lax.erf(x))),
        scaled([1.0, 1.0, 1.0], 2.0**-26),
    ),
    "turns of a loop whose first is zero, laid out anew": (
        lambda x: lax.scan(lambda c, _: (0.9 * c + 0.1 * x, c), jnp.zeros_like(x), length=3)[1].T,
        scaled([[1.0, 0.7]], [[2.0**-24]]),
    ),
    "the tail of a sigmoid": (lambda x: x * jax.nn.sigmoid(x), scaled([-1.0], 32.0)),
    **{
        f"{f.__name__} near zero": (f, NEAR_ZERO)
        for f in (jnp.tanh, jnp.log1p, jnp.arcsinh, lax.erf)
    },
}


EIGHT_BITS: dict[str, tuple[Program, Any]] = {
    "8 bits compared with more": (lambda x: jnp.minimum(x, x.min()), EIGHT),
    "8 bits beside infinity": (lambda x: x.at[IDS].get(mode="fill", fill_value=jnp.inf), EIGHT),
    "sums of fewer bits than float16": (
        lambda x: jax.ops.segment_sum(x.astype(jnp.bfloat16), IDS, 4).astype(jnp.float32),
        narrow(50 * TABLE),
    ),
}


def test_found() -> None:
    def both(function: Program) -> Program:
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))
        return lambda x: (function(x), gradient(x))

    for table, step in ((FOUND, HALF), (EIGHT_BITS, 8 * HALF)):  # results in bfloat16
        check({name: (both(f), x) for name, (f, x) in table.items()}, atol=8 * step)


def reduce(x: Any) -> Any:
    return lax.reduce_precision(x, 5, 2)


def largest(x: Any) -> Any:
    return jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"))


def least(x: Any) -> Any:
    return jnp.sum(lax.reduce_window(x, jnp.inf, lax.min, (2, 3), (1, 1), "SAME"))


EXACT: dict[Any, tuple[Program, Any]] = {
    **{("bits", s): (reduce, scaled([1.0, -1.3, 6.1, 0.7], s)) for s in (2.0**-100, 3.0)},
    **{
        (pool.__name__, dtype): (jax.grad(pool), narrow(normal(0, 4, 6), dtype))
        for pool in (largest, least)
        for dtype in ("float16", "float8_e4m3fn")
    },
}


def test_rounding_of_values_and_choices_of_narrow_data_are_exact() -> None:
    check(EXACT)
