"""Rules: of all functions of the table, by values and gradients; of single primitives."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.batching import compute, entry
from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import get_data_scale, scalify
from unitscale.transforms._interpreter import Interpreter

from .agreement import HALF, SCALES, at_scales, close, scaled
from .table import ENTRIES, Entry, clipped_gradient, steep

EPSILON = float(np.finfo(np.float32).eps)
QUICK = [name for name, entry in ENTRIES.items() if not entry.slow]
PARTS = [QUICK[i : i + 32] for i in range(0, len(QUICK), 32)]
LONG = pytest.param([name for name in ENTRIES if name not in QUICK], marks=pytest.mark.slow)


def _both(entry: Entry) -> Any:
    """Return the gradient of a scalar that depends on all elements of the results, and results."""

    def objective(*args: Any) -> Any:
        total, results = 0.0, entry.function(*args)
        for leaf in jax.tree.leaves(results):
            if leaf.dtype.kind == "f":
                leaf = jnp.where(jnp.isfinite(leaf), leaf, 0.0)
                total += jnp.sum(leaf * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape))
        return total, results

    if not entry.grad:
        return entry.function
    return jax.grad(objective, argnums=tuple(range(len(entry.args))), has_aux=True)


@pytest.mark.parametrize("names", [*PARTS, LONG])
def test_value_and_gradient(names: list[str]) -> None:
    results = compute({n: (at_scales(_both(ENTRIES[n])), *ENTRIES[n].args) for n in names})
    for name, (expected, found) in jax.device_get(results).items():
        for i, scale in enumerate(SCALES):
            with entry(f"{name} at scale {scale}"):
                at = jax.tree.map(operator.itemgetter(i), found)
                close(at, expected, atol=ENTRIES[name].steps * EPSILON)


MOVES = [jnp.ravel, jnp.transpose, jnp.flip, lambda x: x[1], lambda x: -x, jnp.abs, jnp.sort]
MOVES += [lambda x: lax.reduce_precision(x, 8, 23)]  # no less than its own


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


def test_casts_are_measured_in_narrow_types_and_keep_the_scale_in_others() -> None:
    dtypes = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
    x = ScaledArray(jnp.asarray([1e30, -1e30]), jnp.float32(2.0))
    results = jax.jit(lambda x: [scalify(lambda a, d=d: a.astype(d))(x) for d in dtypes])(x)
    for dtype, result in zip(dtypes, results, strict=True):
        assert result.dtype == dtype
        assert float(result.scale) == (2.0 if dtype == "bfloat16" else 2.0**101)
        value = np.asarray(result.data).astype(np.float32) * float(result.scale)
        np.testing.assert_allclose(value, x.value, rtol=2.0**-3)


def test_roots_have_the_scale_of_their_own_size() -> None:
    scales = 2.0**-40, 1.0, 3.0
    run = jax.jit(lambda xs: [scalify(lambda a: get_data_scale(jnp.sqrt(a)))(x) for x in xs])
    found = run([scaled([1.0, 0.25, 4.0], scale) for scale in scales])
    for (data, root), scale in zip(to_array(found), scales, strict=True):
        assert 0.5 < float(root) / np.sqrt(scale) <= 2.0
        np.testing.assert_allclose(data * root, np.sqrt(scale) * np.array([1, 0.5, 2]), rtol=HALF)


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


@jax.custom_vjp
def half_residual(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


def _twice(slope: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    half = g.astype(jnp.float16)
    return (lax.fori_loop(0, 2, lambda i, c: lax.mul(c, slope), half).astype(g.dtype),)


half_residual.defvjp(lambda x: (jnp.sin(x), jnp.cos(x).astype(jnp.float16)), _twice)


def test_the_users_rule_is_used_outside_too() -> None:
    """Outside of scalify, gradients are by data, with constant scales."""
    x = ScaledArray(jnp.asarray([0.3, 2.0]), jnp.float32(4.0))
    for function, rtol in ((clipped_gradient, 1e-6), (half_residual, 2**-9)):

        def outside(data: jax.Array, function=function) -> jax.Array:
            return jnp.sum(to_array(scalify(function)(ScaledArray(data, x.scale))))

        expected = 4.0 * jax.grad(lambda v, function=function: jnp.sum(function(v)))(x.value)
        np.testing.assert_allclose(jax.jit(jax.grad(outside))(x.data), expected, rtol=rtol)

    def tangent(data: jax.Array) -> jax.Array:
        return to_array(scalify(steep)(ScaledArray(data, x.scale)))

    _, slope = jax.jit(lambda data: jax.jvp(tangent, (data,), (jnp.ones(2),)))(x.data)
    np.testing.assert_allclose(slope, 12.0, rtol=1e-6)


def text_of(function: Any, *args: Any, **options: Any) -> str:
    return str(jax.make_jaxpr(scalify(function, **options))(*args))


@pytest.mark.parametrize(
    ("dtype", "length", "count"), [("bfloat16", 64, 128), ("bfloat16", 65, 65), ("float32", 2, 2)]
)
def test_chains_of_16_bits_are_computed_again(dtype: str, length: int, count: int) -> None:
    """Chains of up to 64 functions are recomputed behind a contraction, instead of stored."""

    def program(x: jax.Array) -> jax.Array:
        y = functools.reduce(lambda y, _: jnp.sin(y), range(length), x)
        return y + y @ y

    assert text_of(program, as_scaled(jnp.ones((4, 4)), dtype=dtype)).count("= sin ") == count


@pytest.mark.parametrize("count", [3, 4])
def test_a_value_that_many_arrays_make_is_stored_before_a_contraction(count: int) -> None:
    def program(arrays: list[jax.Array]) -> jax.Array:
        total = sum(arrays[1:], arrays[0])
        return total + jnp.tanh(total) @ arrays[0]

    arrays = as_scaled([jnp.full((4, 4), 0.1 * n) for n in range(count)], dtype=jnp.bfloat16)
    assert ("bf16[4,4] = optimization_barrier" in text_of(program, arrays)) == (count > 3)


@pytest.mark.parametrize("log2", [-1, 0, 10, 11])
def test_float16_products_are_written_narrow_if_their_growth_can_be_divided_before(
    log2: int,
) -> None:
    x = as_scaled(jnp.ones((4, 4)), dtype=jnp.float16)
    text = text_of(jnp.matmul, x, x, static_scaling=lambda *_: 2.0**log2)
    assert ("f16[4,4] = dot_general" in text) == (0 <= log2 <= 10)


def test_the_gradient_of_a_choice_by_class_is_no_scatter() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jax.nn.log_softmax(x), jnp.asarray([[1], [0]]), -1).mean()

    assert "scatter" not in text_of(jax.grad(loss), as_scaled(jnp.ones((2, 3))))
