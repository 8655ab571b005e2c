"""Infinities, zeros, masks, and scales at the ends of their range."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

from tests.batching import compute, entry
from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import dynamic_rescale, get_data_scale, scalify

from .agreement import HALF, SCALES, at_scales, check, close, narrow, scaled

INF, NAN = float("inf"), float("nan")
X = jnp.asarray([[0.5, -2.0, 3.0, 1.0], [0.0, 1.5, -0.25, 7.0]], jnp.float32)

CAREFUL: dict[str, Callable[..., Any]] = {
    "logsumexp": nn.logsumexp,
    "log_softmax": nn.log_softmax,
    "softmax": nn.softmax,
    "var": lambda x: jnp.var(x, axis=-1),
    "sum": lambda x: jnp.sum(x, axis=0),
    "relu": nn.relu,
    "gelu": nn.gelu,
    "add other": lambda x: x + jnp.flip(x) * 3,
    "multiply": lambda x: x * x,
    "divide": lambda x: 1 / x,
    "log": lambda x: jnp.log(jnp.abs(x)),
    "exp": jnp.exp,
    "matmul": lambda x: x @ x.T,
    "where": lambda x: jnp.where(x > 0, x, -INF),
    "argmax": lambda x: jnp.argmax(x, axis=-1),
    "cumsum": lambda x: jnp.cumsum(x, axis=-1),
    "layer norm": lambda x: (
        (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    ),
}
INPUTS = {
    "finite": X,
    "zeros": jnp.zeros_like(X),
    "one infinity": X.at[0, 1].set(INF),
    "both infinities": X.at[0, 1].set(INF).at[1, 2].set(-INF),
    "minus infinity row": X.at[0].set(-INF),
    "nan": X.at[1, 1].set(NAN),
}


def test_same_pattern_of_infinities_and_nans() -> None:
    xs = np.stack(list(INPUTS.values()))
    programs = {name: (lambda xs, f=f: lax.map(at_scales(f), xs)) for name, f in CAREFUL.items()}
    results = compute({name: (program, xs) for name, program in programs.items()})
    for name, (plain, found) in jax.device_get(results).items():
        for i, kind in enumerate(INPUTS):
            for j, scale in enumerate(SCALES):
                with entry((name, kind, scale)):
                    close(found[i, j], plain[i], atol=1e-5)


def test_scales_at_the_ends_of_their_range() -> None:
    def function(a: jax.Array) -> Any:
        unit = a / jnp.max(jnp.abs(a))
        return unit, jnp.sum(a), -a, jnp.sort(a), jnp.where(a > 0, a, 0), a + a * 0.5

    ends = {log2: (function, ScaledArray(X, jnp.float32(2.0**log2))) for log2 in (-110, 110)}
    check(ends, atol=1e-5)


MASKS = {
    "infinite": -INF,
    "lowest": float(np.finfo(np.float32).min),
    "large": -1e9,
    "moderate": -1e4,
}


def masked(mask: float, added: bool) -> Callable[..., Any]:
    keep = np.asarray([[True, False, True, True], [True, True, False, True]])

    def chosen(x: jax.Array) -> jax.Array:
        return nn.softmax(x + jnp.where(keep, 0.0, mask) if added else jnp.where(keep, x, mask))

    def scaled(x: jax.Array, scale: jax.Array) -> Any:
        return chosen(X * scale), to_array(scalify(chosen)(ScaledArray(x, scale)))

    return lambda x, scales: lax.map(lambda scale: scaled(x, scale), scales)


def test_masks_do_not_take_the_scale() -> None:
    scales = np.asarray([2.0**-18, 2.0**-4, 1.0, 2.0**8], np.float32)
    table = {
        (dtype, name, added): (masked(MASKS[name], added), X.astype(dtype), scales)
        for dtype in ("float32", "float16")
        for name in MASKS
        for added in (False, True)
    }
    for name, (plain, found) in jax.device_get(compute(table)).items():
        for expected, actual, scale in zip(plain, found, scales, strict=True):
            most = 4 * HALF * max(1.0, float(np.max(X * scale)))
            with entry((*name, scale)):
                close(actual, expected, atol=most if name[0] == "float16" else 1e-6)


HALF_FUNCTIONS = {k: CAREFUL[k] for k in ("log_softmax", "softmax", "gelu", "layer norm", "exp")}
ANY_SCALE: dict[str, Callable[..., Any]] = {
    "var": CAREFUL["var"],
    "cube": lambda x: x**3,
    "norm": lambda x: x / jnp.sqrt(jnp.sum(x * x)),
    "product": lambda x: x @ jnp.ones((4, 300)) @ jnp.ones((300, 5)),
}


def test_functions_of_float16_data_at_small_and_large_scales() -> None:
    table = {
        (name, log2): (f, scaled(X, 2.0**log2))
        for functions, most in ((HALF_FUNCTIONS, 1), (ANY_SCALE, 30))
        for name, f in functions.items()
        for log2 in (-most, most)
    }
    check(table, atol=16 * HALF)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_a_result_that_is_put_in_again_keeps_value_and_scale(dtype: Any) -> None:
    """The scale depends on the value, not on how often it is recomputed."""
    start = as_scaled(jnp.asarray([1.0, -3.0]), dtype=dtype)
    functions = lambda x: 2 * x - x, lambda x: 0.5 * x + x * 0.5, lambda x: x * x / x
    step = jax.jit(lambda xs: [scalify(f)(x) for f, x in zip(functions, xs, strict=True)])
    found = [start] * 3
    for _ in range(200):
        found = step(found)
    for x in found:
        np.testing.assert_array_equal(x.value, start.value)
        assert 0.25 <= float(x.scale) <= 4


def sums(x: Any) -> Any:
    wide = jnp.cumsum(x.astype(jnp.float64))[-1], jnp.sum(x, dtype=jnp.float64)
    return [y - 1e8 for y in wide]


def test_64_bits() -> None:
    """Numbers beyond a scale, arrays without rows, and sums that float32 would round."""
    programs = (
        lambda x: x * 1e40,
        lambda x: x / 1e50,
        lambda x: jnp.sqrt(x * x * 1e80) * 1e-40,
        lambda x: (x * 1e50 - x * 1e50 * 2) * 1e-50,
    )
    empty = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) ** 2)), lambda x: x.T / jnp.ones((3, 0))
    with jax.enable_x64(True):
        x, none = as_scaled((jnp.asarray([1.5, -0.25]), jnp.zeros((0, 1))))
        table = {f"far {i}": (f, x) for i, f in enumerate(programs)}
        table |= {f"empty {i}": (f, none) for i, f in enumerate(empty)}
        large = as_scaled(jnp.asarray([1e8] + [1.0] * 7, jnp.float32))
        check(table | {"sums": (sums, large)}, rtol=1e-12)


# Pairs of types by the type of their results.
TYPES = {
    "float16": [("float8_e4m3fn", "float16")],
    "float32": [("float16", "bfloat16"), ("float16", "float32"), ("bfloat16", "float32")],
    "float64": [("float16", "float64"), ("float32", "float64")],
}


def met(x: Any, y: Any) -> Any:
    """Combine arrays of two types in every way."""
    chosen = jnp.where(x > 0, x, y), jnp.maximum(x, y), jnp.concatenate([y, x]), lax.clamp(-y, y, y)
    placed = x.astype(y.dtype).at[0].add(y[0]), y.at[0].set(x[1]), y.at[0].add(x[1]), x - y, y / x
    return *chosen, *placed, x @ y.T, lax.cond(x[0, 0] > 9, lambda: x.astype(y.dtype), lambda: y)


def test_operands_of_two_types_meet_in_the_wider() -> None:
    with jax.enable_x64(True):
        for wide, pairs in TYPES.items():
            table = {p: (met, *(as_scaled(jnp.asarray(X), dtype=t) for t in p)) for p in pairs}
            check(table, atol=4 * float(jnp.finfo(wide).eps))


def _unit(rows: Any) -> Any:
    return rows / jnp.sqrt(jnp.mean(rows * rows, axis=-1, keepdims=True))


def _shrinking(x: Any) -> Any:
    turns = lax.scan(lambda c, _: (c * 2.0**-8, jnp.exp(c * 0) * c), x, None, length=4)[1]
    return _unit(turns[::-1])


UNLIKE = np.float32([1.0, 1.0, 2.0**-20])
FEW: dict[str, tuple[Callable[..., Any], Any]] = {
    "reciprocal": (lambda x: 1 / x, UNLIKE),
    "reciprocal of a square": (lambda x: 1 / x**2, np.sqrt(UNLIKE)),
    "power of -2": (lambda x: x**-2, np.sqrt(UNLIKE)),
    "quotient in a product": (lambda x: (jnp.ones(3) / x) @ jnp.ones(3), UNLIKE),
    "square of few": (lambda x: x * x, np.float32(np.arange(2**20) == 3)),
    "fourth power": (lambda x: (x**4) @ jnp.ones(512), np.float32([48.0] + [1.0] * 511)),
    "turns of a loop": (_shrinking, np.float32([1.0, 2.0])),
}


def test_few_elements_that_are_far_larger_do_not_saturate() -> None:
    check({name: (f, narrow(x)) for name, (f, x) in FEW.items()}, atol=4 * HALF)


def test_rows_of_other_scales() -> None:
    """If rows do not mix, small ones are not lost next to rows with larger scales."""
    x = scaled([[1, 2, 3, 0], [1, 3, 2, 0]], [[1.0], [2.0**-40]])
    program = lambda x: (jnp.argmax(x, -1), _unit(x[:, ::-1]), _unit(x.reshape(2, 1, 4)))  # noqa: E731
    check({"rows": (program, x)}, rtol=2 * HALF)


@jax.jit
def units_of(arrays: list[Any]) -> list[Any]:
    """Return the scales measured from plain numbers: RMS and amax, as powers of two."""

    def measure(x: Any) -> Any:
        both = [get_data_scale(dynamic_rescale(x, s))[1] for s in ("rms", "amax")]
        return jnp.stack(both)

    def each(x: Any) -> Any:
        return to_array(scalify(measure)(ScaledArray(x, jnp.float32(1))))

    return [each(x) for x in arrays]


NEAREST = [
    *(np.full(3, 1.5), np.full(3, 1.49), np.asarray([3e30, -1e30]), np.asarray([3e-30, 1e-31])),
    *(np.asarray([0, 0, 0, 100.0]), np.asarray(-0.3)),
    # One number among equal ones or zeros: the RMS is not the largest.
    *(
        np.where(np.arange(2**log2) == 3, most, least) * 2.0**exponent
        for log2 in (2, 10, 20)
        for exponent in (-84, 103)
        for most, least in ((4.0, 1.0), (1.0, 0.0))
    ),
]
NOTHING = [np.zeros(3), np.zeros(()), np.full(2, np.nan), np.zeros((0, 2))]
FEW_LARGE: list[tuple[list[float], float]] = [
    ([3e38, 0.0], 2.0**126),
    ([1.0] * 7 + [2.0**10], 2.0**8),
    ([0.0] * 2**16 + [2.0**20], 2.0**12),
    ([0.0] * (2**18 - 1) + [2.0**20 - 1], 2.0**11),
    ([1e-9] * 2**12 + [2.0**-9], 2.0**-15),
]


def test_measured_scales_are_the_nearest_power_of_two() -> None:
    """Ties round up; without numbers the scale is 1; a few large numbers raise the RMS."""
    few = [numbers for numbers, _ in FEW_LARGE]
    found = units_of([np.asarray(x, np.float32) for x in (*NEAREST, *NOTHING, *few)])
    for x, units in zip(NEAREST, found, strict=False):
        for unit, size in zip(units, (np.sqrt(np.mean(x**2)), np.max(np.abs(x))), strict=True):
            assert np.frexp(unit)[0] == 0.5
            assert 0.75 - 1e-6 < size / unit < 1.5
    rest = found[len(NEAREST) :]
    np.testing.assert_array_equal([units[0] for units in rest[: len(NOTHING)]], 1.0)
    np.testing.assert_array_equal([u[0] for u in rest[len(NOTHING) :]], [u for _, u in FEW_LARGE])


def test_results_have_the_scale_that_they_have_alone() -> None:
    """Results of one shape are measured together: small ones, large ones, and ones with inf."""
    factors = (3.0, 1e-4, 0.0, 1e20, -0.7)

    def program(x: jax.Array) -> list[jax.Array]:
        return [(x * n).at[0, 0].set(INF if n == 3 else n) for n in factors]

    for shape in (8, 16), (280, 300):
        values = np.random.default_rng(0).normal(size=shape)
        x = as_scaled(jnp.asarray(values, jnp.float32), dtype=jnp.float16)
        for i, found in enumerate(jax.jit(scalify(program))(x)):
            alone = jax.jit(scalify(lambda x, i=i: program(x)[i]))(x)
            assert found.scale == alone.scale
            np.testing.assert_array_equal(found.data, alone.data)


def test_vmap_of_results_that_are_not_mapped() -> None:
    rows, row = (as_scaled(jnp.ones(shape), dtype=jnp.float16) for shape in ((2, 4), (4,)))
    program = scalify(lambda x, y: (x * 3, y * 5))
    axes = jax.tree.map(lambda leaf: 0 if leaf.ndim else None, rows), None
    found = jax.jit(jax.vmap(program, axes, (0, None)))(rows, row)
    np.testing.assert_array_equal(to_array(found[0]), np.full((2, 4), 3))
    np.testing.assert_array_equal(to_array(found[1]), np.full(4, 5))
