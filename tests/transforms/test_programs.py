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

FORMATS = [jnp.float16, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]
HALF = float(jnp.finfo(jnp.float16).eps)
Program = Callable[..., Any]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def check(table: dict[Any, tuple[Any, ...]], rtol: float = 0.0, atol: float = 0.0) -> None:
    """Compare scalified programs with plain ones on the same values.

    Rows are a function and its arguments; `atol` is relative to the largest element.
    """

    def both(f: Program) -> Program:
        return lambda *args: (f(*to_array(args, jnp.float32)), to_array(scalify(f)(*args)))

    results = compute({name: (both(f), *args) for name, (f, *args) in table.items()})
    for name, (expected, found) in jax.device_get(results).items():
        for e, a in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            with entry(name):
                most = np.max(np.abs(e), initial=0)
                np.testing.assert_allclose(np.float32(a), e, rtol=rtol, atol=atol * most)


def narrow(x: Any, dtype: Any) -> ScaledArray:
    return as_scaled(jnp.asarray(x, jnp.float32), dtype=dtype)


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


# One small positive number beside large negative ones; columns in units of their own; a table.
SMALL = np.array([1e-2, *[-100.0] * 7])
FOUR = np.array([1500.0, 800.0, 0.1, 0.2])
STEEP = normal(0, 8, 8) + np.linspace(-30, 30, 8)
UNITS = np.stack([40 + 10 * normal(1, 64), 5e4 + 1e4 * normal(2, 64), 0.05 + 0.01 * normal(3, 64)])
PLACES = np.array([[1e-3, 100.0] * 4, [100.0, 1e-3] * 4])
WINDOW = (lax.add, (7,), (1,), "VALID")
NEAR_ONE = 0.7 + 0.02 * normal(0, 64)

VALUES: dict[str, tuple[Program, np.ndarray]] = {
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
}


@pytest.mark.parametrize("dtype", FORMATS)
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
    x = narrow([0.3, -1.2, 1.7, 3.0], jnp.float16)
    table = {
        (name, large): (lambda x, y, f=f: 3 * f(x, y)[:3], x, large * np.float32([1, 1.5, 2, 1]))
        for name, f in BESIDE_LARGE.items()
        for large in (np.float32(1e4), np.float32(1e30))
    }
    check(table, rtol=2 * HALF)


TINY: dict[str, tuple[Program, list[float]]] = {
    "log of a floor": (lambda x: jnp.log(jnp.maximum(x, 1e-30)), [0, 1e4]),
    "sum": (lambda x: jnp.log(x + 1e-36), [0, 1e3, 2e3]),
    "choice": (lambda x: jnp.log(jnp.where(x > 0, x, 1e-36)), [0, 1e3, 2e3]),
    "gradient": (jax.grad(lambda x: jnp.sum(jnp.sqrt(jnp.maximum(x, 1e-30)))), [0, 1e4]),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tiny_numbers_are_kept_beside_large_scales(dtype: str) -> None:
    table = {
        name: (f, as_scaled(jnp.asarray(numbers, jnp.float32), 2.0**20, dtype=dtype))
        for name, (f, numbers) in TINY.items()
    }
    check(table, rtol=2**-7)


A = narrow([1.0, 2.0, 3.0], jnp.float16)
SAME = ScaledArray(A.data * 2, A.scale / 2)
TINIER = narrow([1e-12, 2e-12, 3e-12], jnp.float16)
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


# Arrays of one number that a cast changes, by NumPy's and XLA's rules.
CASTS: dict[str, tuple[Callable[[], Any], complex]] = {
    "cut below zero": (lambda: jnp.full(3, -2.7).astype(jnp.int32), -2),
    "the largest byte": (lambda: jnp.full(3, 300.0).astype(jnp.uint8), 255),
    "the least byte": (lambda: -jnp.full(3, -128.0).astype(jnp.int8), -128),
    "8 bits": (lambda: jnp.full(3, 1.06).astype(jnp.float8_e4m3fn).astype(jnp.float32), 1),
    "infinity": (lambda: jnp.full(3, 1e5).astype(jnp.float16).astype(jnp.float32), jnp.inf),
    "complex": (lambda: jnp.full(3, 2.5).astype(jnp.complex64), 2.5),
    "minus zero, complex": (lambda: -jnp.zeros(3).astype(jnp.complex64), 0),
}


def _with_number(x: Any, c: Any) -> list[Any]:
    return [x * c, x + c, c - x, c / x, jnp.abs(lax.exp(x + 1j) * c)]


def test_a_number_is_what_a_cast_makes_of_it() -> None:
    x = jnp.array([1.5, -2.0, 3.0])
    table = {
        name: (
            lambda x, make=make: to_array(scalify(lambda x: _with_number(x, make()))(x)),
            as_scaled(x, dtype=jnp.float16),
        )
        for name, (make, _) in CASTS.items()
    }
    for name, found in compute(table).items():
        with np.errstate(invalid="ignore"):
            expected = _with_number(x, np.full(3, CASTS[name][1]))
        for a, e in zip(found, expected, strict=True):
            with entry(name):
                np.testing.assert_allclose(a, e, rtol=2e-3, atol=1e-6)


# -- a cast to float32, as users write it, against float64 -----------------------------------------


ISLANDS: dict[str, tuple[Program, Program]] = {
    "var": (lambda x: x.var(-1), lambda x: x.var(-1)),
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


def scaled(data: Any, scale: Any = 1.0, dtype: Any = jnp.float16) -> ScaledArray:
    return ScaledArray(jnp.asarray(data, dtype), jnp.asarray(scale, jnp.float32))


ROWS = scaled([[1.0, 2.0], [1.0, 3.0]], [[0.5], [16.0]])
NO_ROWS = scaled(jnp.zeros((0, 2)), jnp.zeros((0, 1)))
NEAR_ZERO = scaled([0.5, 1.25, 2.0], 2.0**-24)
TINY_ROWS = [[2.0**-33], [2.0**-38]]
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
    "8 bits compared with more": (lambda x: jnp.minimum(x, x.min()), EIGHT),
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


def test_found() -> None:
    def both(function: Program) -> Program:
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))
        return lambda x: (function(x), gradient(x))

    # bfloat16, as which 8 bits are computed with, is the widest step.
    for eight, step in ((False, HALF), (True, float(jnp.finfo(jnp.bfloat16).eps))):
        rows = {name: row for name, row in FOUND.items() if (row[1] is EIGHT) == eight}
        check({name: (both(f), x) for name, (f, x) in rows.items()}, atol=8 * step)


def test_numbers_of_64_bits_of_no_rows() -> None:
    with jax.enable_x64(True):
        x = ScaledArray(jnp.zeros((0, 1), jnp.float64), jnp.float32(1.0))
        gradient = scalify(jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) ** 2)))
        divide = scalify(lambda x: x / jnp.full((3, 0), 2.0))
        found = jax.jit(lambda x: (gradient(x), divide(x.T.reshape(1, 0))))(x)
    assert [y.shape for y in found] == [(0, 1), (3, 0)]
