"""Single rules: moving data, casts, comparisons, functions, sums, calls, the default."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import get_data_scale, scalify
from unitscale.transforms._interpreter import Interpreter

from .table import IDS, A, clipped_gradient, steep

MOVES = [jnp.ravel, jnp.transpose, jnp.flip, lambda x: x[1], lambda x: -x, jnp.abs, jnp.sort]


def test_data_moves_and_the_scale_stays() -> None:
    """A scale per row becomes a single scale if elements move between rows."""
    x = ScaledArray(jnp.arange(6.0).reshape(2, 3), jnp.float32(3.0))
    rows = ScaledArray(jnp.ones((2, 3)), jnp.asarray([[1.0], [8.0]]))
    moved = jax.jit(lambda x: [(f(x.data), scalify(f)(x)) for f in MOVES])(x)
    for expected, result in moved:
        assert float(result.scale) == 3.0
        np.testing.assert_array_equal(result.data, expected)
    flat, negative = jax.jit(lambda x: [scalify(f)(x) for f in (jnp.ravel, jnp.negative)])(rows)
    np.testing.assert_array_equal(flat.value, [1, 1, 1, 8, 8, 8])
    assert negative.scale.shape == (2, 1)


@pytest.mark.parametrize("dtype", [jnp.float16, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_scatters_of_narrow_data(dtype: Any) -> None:
    def function(x: jax.Array) -> Any:
        ends = jax.ops.segment_max(x, IDS, 4), jax.ops.segment_min(x, IDS, 4)
        return *ends, x.at[IDS[1:3]].apply(jnp.sin), jnp.zeros_like(x).at[IDS].add(x)

    def within(x: jax.Array) -> Any:
        return jax.ops.segment_sum(x.astype(jnp.bfloat16), IDS, 4).astype(jnp.float32)

    x, step = as_scaled(50 * A, dtype=dtype), float(jnp.finfo(jnp.bfloat16).eps)
    both = jax.jit(lambda x: [(f(x.value), to_array(scalify(f)(x))) for f in (function, within)])
    for expected, actual in both(x):
        for e, a in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
            np.testing.assert_allclose(a, np.float32(e), rtol=4 * step, atol=step)


def test_casts_are_measured_in_narrow_types_and_keep_the_scale_in_others() -> None:
    dtypes = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
    x = ScaledArray(jnp.asarray([1e30, -1e30]), jnp.float32(2.0))
    results = jax.jit(lambda x: [scalify(lambda a, d=d: a.astype(d))(x) for d in dtypes])(x)
    for dtype, result in zip(dtypes, results, strict=True):
        assert result.dtype == dtype
        assert float(result.scale) == (2.0 if dtype == "bfloat16" else 2.0**101)
        value = np.asarray(result.data).astype(np.float32) * float(result.scale)
        np.testing.assert_allclose(value, x.value, rtol=2.0**-3)


@pytest.mark.parametrize("factor", [2.0**-100, 3.0])
def test_precision_is_reduced_of_values(factor: float) -> None:
    x = ScaledArray(jnp.asarray([1.0, -1.3, 6.1, 0.7], jnp.float16), jnp.float32(factor))
    reduce = lambda x: lax.reduce_precision(x, 5, 2)  # noqa: E731
    wide = scalify(lambda a: lax.reduce_precision(a, 8, 23))  # no less than its own
    run = jax.jit(lambda x: (to_array(scalify(reduce)(x)), reduce(x.value), wide(x)))
    found, expected, result = run(x)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(result.data, x.data)
    assert result.scale == x.scale


def test_float64_computes_in_float64() -> None:
    def run(x: Any) -> Any:
        wide = jnp.cumsum(x.astype(jnp.float64))[-1], jnp.sum(x, dtype=jnp.float64)
        return [y - 1e8 for y in wide]

    with jax.enable_x64(True):
        x = as_scaled(jnp.asarray([1e8] + [1.0] * 7, jnp.float32))
        assert to_array(jax.jit(scalify(run))(x)) == [7, 7]


def test_constant_fills_take_the_scale_of_the_other_operand() -> None:
    x, fills = np.float32([1e-3, -2e-3, 3e-3]), (0.0, -np.inf, np.inf, np.nan)
    keep = np.asarray([True, False, True])
    run = jax.jit(scalify(lambda a: [jnp.where(keep, a, fill) for fill in fills]))
    for fill, result in zip(fills, run(as_scaled(x, dtype=jnp.float16)), strict=True):
        np.testing.assert_allclose(result.value, np.where(keep, x, fill), rtol=1e-3)


def test_gradient_of_a_maximum_of_different_scales() -> None:
    x = as_scaled(jnp.asarray([1.0, 300.0, -2.0]), dtype=jnp.float16)
    y = as_scaled(jnp.asarray([2e-3, -1e-3, 1e-3]), dtype=jnp.float16)
    gradient = scalify(jax.grad(lambda a, b: jnp.sum(jnp.maximum(a, b)), argnums=(0, 1)))
    gradient = jax.jit(gradient)(x, y)
    np.testing.assert_array_equal(to_array(gradient[0]), [1.0, 1.0, 0.0])
    np.testing.assert_array_equal(to_array(gradient[1]), [0.0, 0.0, 1.0])


@pytest.mark.parametrize("scale", [2.0**-40, 1.0, 3.0])
def test_roots_have_the_scale_of_their_own_size(scale: float) -> None:
    for dtype, rtol in ((jnp.float16, 1e-3), (jnp.float32, 1e-6)):
        x = ScaledArray(jnp.asarray([1.0, 0.25, 4.0], dtype), jnp.float32(scale))
        run = scalify(lambda a: (jnp.sqrt(a), get_data_scale(jnp.sqrt(a))[1]))
        value, root = jax.jit(run)(x)
        assert dtype == jnp.float32 or 0.5 < float(root) / np.sqrt(scale) <= 2.0
        expected = np.sqrt(scale * np.asarray(x.data, np.float64))
        np.testing.assert_allclose(to_array(value), expected, rtol=rtol)


def test_small_second_moments_survive_float16() -> None:
    """g**2, its average, and g over its root are rounded only once, at the end."""
    g = as_scaled(jnp.asarray([1e-4, 3e-8, -2e-7]), dtype=jnp.float16)
    update = jax.jit(scalify(lambda x: x / (jnp.sqrt(0.001 * x**2) + 1e-12)))(g)
    assert update.dtype == jnp.float16
    np.testing.assert_allclose(update.value, np.sign(g.value) * 1000**0.5, rtol=2e-3)


POOLS: list[Callable[..., Any]] = [
    lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
    lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2, 3), (1, 1), "SAME"),
]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn])
def test_gradients_without_a_scale_are_chosen_by_narrow_data(dtype: Any) -> None:
    x = as_scaled(jnp.asarray(np.random.default_rng(0).normal(size=(4, 6))), dtype=dtype)
    gradients = [jax.grad(lambda x, pool=pool: jnp.sum(pool(x))) for pool in POOLS]
    both = jax.jit(lambda x: [(f(to_array(x, "float32")), scalify(f)(x)) for f in gradients])
    for expected, found in both(x):
        np.testing.assert_array_equal(to_array(found), expected)


def test_many_terms_of_one_place() -> None:
    """Terms of one sign grow with their number, here beyond float16."""
    x = as_scaled(jnp.ones(100_000), dtype=jnp.float16)
    found = jax.jit(scalify(lambda x: jax.ops.segment_sum(x, jnp.zeros(x.shape, int), 1)))(x)
    np.testing.assert_allclose(to_array(found), [1e5], rtol=2**-11)


def test_jit_keeps_its_name_and_donation() -> None:
    def named(x: jax.Array) -> jax.Array:
        return x * 2 + 1

    x = ScaledArray(jnp.ones(3), jnp.float32(2.0))
    inner = jax.jit(named, donate_argnums=0)
    equations = jax.make_jaxpr(scalify(lambda a: inner(a)))(x).eqns
    (call,) = [e for e in equations if e.primitive.name == "jit"]
    assert call.params["name"] == "named"
    assert call.params["donated_invars"][0]


def test_each_branch_leaves_with_its_own_scale() -> None:
    run = scalify(lambda a: lax.cond(a[0] > 0, lambda b: b * 2**20, lambda b: b / 2**20, a))
    for value in (1.0, -1.0):
        result = jax.jit(run)(ScaledArray(jnp.full(4, value, jnp.float16), jnp.float32(1.0)))
        assert float(result.scale) == 2.0 ** (20 * value)
        np.testing.assert_array_equal(np.abs(result.data), 1)


def test_branches_in_branches_are_interpreted_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = [], Interpreter.run
    monkeypatch.setattr(Interpreter, "run", lambda *args: runs.append(1) or run(*args))

    def nested(depth: int, x: jax.Array) -> jax.Array:
        if depth == 0:
            return jnp.sin(x)
        inner = functools.partial(nested, depth - 1)
        return lax.cond(x[0] > depth, inner, lambda y: y * y + 1, x * 1.5)

    x, f = jnp.linspace(0.5, 2, 4), functools.partial(nested, 4)
    found, expected = jax.jit(lambda x: (to_array(scalify(f)(as_scaled(x))), f(x)))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert len(runs) == 1 + 2 * 4


def test_the_users_rule_is_used_outside_too() -> None:
    """Outside of scalify, gradients are by data, with constant scales."""
    x = ScaledArray(jnp.asarray([0.3, 2.0]), jnp.float32(4.0))

    def outside(data: jax.Array) -> jax.Array:
        return jnp.sum(to_array(scalify(clipped_gradient)(ScaledArray(data, x.scale))))

    expected = 4.0 * jax.grad(lambda v: jnp.sum(clipped_gradient(v)))(x.value)
    np.testing.assert_allclose(jax.jit(jax.grad(outside))(x.data), expected, rtol=1e-6)

    def tangent(data: jax.Array) -> jax.Array:
        return to_array(scalify(steep)(ScaledArray(data, x.scale)))

    _, slope = jax.jit(lambda data: jax.jvp(tangent, (data,), (jnp.ones(2),)))(x.data)
    np.testing.assert_allclose(slope, 12.0, rtol=1e-6)


@pytest.mark.parametrize("size", [1e-9, pytest.param(1e9, marks=pytest.mark.slow)])
def test_factorizations_of_any_size(size: float) -> None:
    """`lu` returns both factors in one array: L near 1, U as large as the matrix."""
    wide = size * np.float32([[4.0, 1.0], [1.0, 3.0]])
    matrix, right = as_scaled(wide, dtype=jnp.float16), jnp.asarray([1.0, -2.0])
    solvers = jnp.linalg.solve, lambda a, b: jnp.linalg.inv(a) @ b * 1.0

    def run(matrix: Any, right: Any) -> Any:
        solved = [(f(matrix.value, right), to_array(scalify(f)(matrix, right))) for f in solvers]
        return solved, scalify(jnp.linalg.cholesky)(matrix)

    solved, factor = jax.jit(run)(matrix, right)
    step = float(jnp.finfo(jnp.float16).eps)
    for expected, found in solved:
        np.testing.assert_allclose(found, expected, rtol=0, atol=step * np.abs(expected).max())
    assert factor.dtype == jnp.float16
    assert 0.5 <= np.sqrt(np.mean(np.square(np.asarray(factor.data, np.float32)))) <= 2
    exact = np.linalg.cholesky(np.asarray(matrix.value, np.float64))
    np.testing.assert_allclose(factor.value, exact, rtol=2**-9, atol=0)


@pytest.mark.parametrize("size", [1e5, 1e-9])
def test_magnitudes_of_complex_results(size: float) -> None:
    matrix = jnp.asarray([[1.0, -2.0], [3.0, 0.5]]) * size

    def radius(a: jax.Array) -> jax.Array:
        return jnp.abs(jnp.linalg.eigvals(a)).max()

    found = jax.jit(scalify(radius))(as_scaled(matrix, dtype="float16"))
    exact = np.abs(np.linalg.eigvals(np.asarray(matrix, np.float64))).max()
    np.testing.assert_allclose(to_array(found, jnp.float32), exact, rtol=2e-3)


def test_a_reference_that_starts_from_a_scaled_array() -> None:
    def double(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        ref[...] = 2 * ref[...]
        return ref[...] + 1

    found = jax.jit(scalify(double))(as_scaled(jnp.arange(4.0), dtype=jnp.float16))
    np.testing.assert_array_equal(to_array(found, jnp.float32), [1, 3, 5, 7])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_what_a_gradient_needs_is_computed_again_from_16_bits(dtype: Any) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum((jnp.tanh(x @ w) @ w) ** 2)

    args = as_scaled((jnp.ones((4, 4)), jnp.ones((2, 4))), dtype=dtype)
    text = str(jax.make_jaxpr(scalify(jax.grad(loss)))(*args))
    assert (text.count("= tanh ") == 1) == (dtype == jnp.float32)


def test_a_value_that_many_arrays_make_is_stored_before_a_contraction() -> None:
    def program(arrays: list[jax.Array]) -> jax.Array:
        total = sum(arrays[1:], arrays[0])
        return total + jnp.tanh(total) @ arrays[0]

    arrays = as_scaled([jnp.full((4, 4), n) for n in (0.1, 0.2, 0.3, 0.4)], dtype=jnp.bfloat16)
    text = str(jax.make_jaxpr(scalify(program))(arrays))
    assert "bf16[4,4] = optimization_barrier" in text


def test_the_gradient_of_a_choice_by_class_is_no_scatter() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jax.nn.log_softmax(x), jnp.asarray([[1], [0]]), -1).mean()

    text = str(jax.make_jaxpr(scalify(jax.grad(loss)))(as_scaled(jnp.ones((2, 3)))))
    assert "scatter" not in text
