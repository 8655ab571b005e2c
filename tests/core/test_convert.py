"""Trees of ScaledArrays: conversion, rescaling, statistics, export."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tests.batching import compute, entry
from unitscale import scalify
from unitscale.core import (
    ScaledArray,
    amax,
    as_scaled,
    cast,
    is_scaled,
    map_values,
    rebalance,
    rescale,
    rms,
    to_array,
    to_float,
)

from .arrays import DTYPES, exact
from .grids import LAYOUTS, nearest

X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
SCALES = {
    "none": None,
    "tensor": 8.0,
    "channel": np.float32([1, 2, 4, 8, 16, 32]),
    "e8m0": jnp.asarray([[1], [2], [4], [0.5]], jnp.float8_e8m0fnu),
}


class TestAsScaled:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_there_and_back(self, dtype: str) -> None:
        x = np.random.default_rng(0).uniform(0.5, 2, 200).astype(np.float32)
        for size in (1e-30, 1.0, 1e30):
            values = x * np.float32(size)
            y = as_scaled(jnp.asarray(values), dtype=dtype)
            assert y.dtype == jnp.dtype(dtype)
            rtol = 0 if dtype == "float32" else float(jnp.finfo(dtype).eps) / 2
            np.testing.assert_allclose(to_array(y), values, rtol=rtol)
            assert np.frexp(float(y.scale))[0] == 0.5
            assert 0.74 <= np.sqrt(np.mean(np.asarray(y.data, np.float64) ** 2)) <= 1.51

    def test_a_tree_keeps_its_structure_and_other_leaves(self) -> None:
        tree = {"w": jnp.ones(2), "n": jnp.arange(3), "k": jax.random.key(0), "s": "x"}
        tree |= {"i": 3, "f": 2.0, "none": None, "numpy": np.float64(3)}
        scaled = as_scaled(tree)
        assert {k for k, v in scaled.items() if is_scaled(v)} == {"w", "f", "numpy"}
        for name in ("n", "k", "s", "i"):
            assert scaled[name] is tree[name]
        assert (float(scaled["numpy"].scale), float(scaled["numpy"].data)) == (4, 0.75)
        back = to_array(scaled, jnp.float16)
        assert jax.tree.structure(back) == jax.tree.structure(tree)
        assert (float(back["f"]), back["f"].dtype, back["n"].dtype) == (2, jnp.float16, jnp.int32)

    def test_zeros_have_scale_1(self) -> None:
        for x in (jnp.zeros(3), jnp.zeros((0, 2)), 0.0, jnp.zeros(2, jnp.float16)):
            for scaled in (as_scaled(x), as_scaled(x, dtype=jnp.float16)):
                assert float(scaled.scale) == 1
                np.testing.assert_array_equal(scaled.value, np.zeros_like(x))
        zeros, ones = as_scaled(jnp.zeros(3)), as_scaled(jnp.ones(3))
        assert jax.tree.structure(zeros) == jax.tree.structure(ones)
        bias = as_scaled(jnp.zeros(2), dtype="float16")
        grad = jax.grad(lambda b: (to_array(b) * jnp.asarray([1.0, -2.0])).sum())(bias)
        np.testing.assert_array_equal(grad.data, [1, -2])  # it learns
        with jax.enable_x64(True):
            assert float(as_scaled(jnp.asarray([1e-300])).value[0]) == 1e-300

    @pytest.mark.parametrize("dtype", [None, "float16", "bfloat16", "float8_e5m2", "e4m3fn"])
    def test_infinity_and_nan_survive_and_do_not_reach_the_scale(self, dtype: str | None) -> None:
        values = np.float32([np.inf, -np.inf, np.nan, 3e-20, -2e-20])
        x = as_scaled(jnp.asarray(values), dtype=dtype)
        assert float(x.scale) == 2.0**-66
        if dtype == "e4m3fn":
            values[:2] = np.nan
        rtol = 0 if dtype is None else float(jnp.finfo(x.dtype).eps) / 2
        np.testing.assert_allclose(to_array(x), values, rtol=rtol)
        assert float(as_scaled(jnp.asarray([np.inf, 0.0])).scale) == 1

    def test_a_given_scale(self) -> None:
        np.testing.assert_array_equal(as_scaled({"w": X}, 4.0)["w"].data, X / 4)
        channels = as_scaled(jnp.asarray(X), jnp.asarray(SCALES["channel"]))
        np.testing.assert_array_equal(channels.value, X)
        assert channels.scale.shape == (1, 6)
        moved = as_scaled(ScaledArray(jnp.ones(2, jnp.float8_e4m3fn), 8.0), 2.0)
        assert moved.dtype == jnp.float8_e4m3fn
        np.testing.assert_array_equal(moved.data.astype(jnp.float32), [4, 4])
        x = ScaledArray(jnp.asarray([1000.0]), 2.0)
        assert as_scaled(x) is x
        y = as_scaled(x, dtype="e4m3fn")
        assert (y.dtype, float(y.value[0])) == (jnp.float8_e4m3fn, 896)

    def test_stack_axes(self) -> None:
        sizes = np.float32([1, 32, 2.0**-20, 0])
        stack = sizes[:, None, None] * np.ones((4, 3, 3), np.float32)
        x = as_scaled({"w": jnp.asarray(stack), "b": jnp.asarray(stack[:, 0])}, stack_axes=1)
        np.testing.assert_array_equal(x["w"].scale, np.float32([1, 32, 2.0**-20, 1])[:, None, None])
        np.testing.assert_array_equal(x["w"].value, stack)
        assert as_scaled(x["w"], stack_axes=2).scale.shape == (4, 3, 1)
        assert as_scaled(jnp.asarray(stack), 2.0, stack_axes=1).scale.shape == (4, 1, 1)
        assert as_scaled(jnp.arange(1.0, 4), stack_axes=1).scale.shape == (3,)
        none = as_scaled(ScaledArray(jnp.asarray(stack)), stack_axes=1)
        np.testing.assert_array_equal(none.scale, np.ones((4, 1, 1)))
        tiles = ScaledArray(jnp.ones((4, 8)), jnp.ones((4, 4)), block_shape=(1, 2))
        assert as_scaled(tiles, stack_axes=1) is tiles

        def layer(v, p):
            return (v @ p["w"] + p["b"]).value, (v @ p["w"]).sum().value

        expected, v = [], np.ones(3)
        for w in np.float64(stack):
            expected.append((v @ w).sum())
            v = v @ w + w[0]
        last, sums = jax.lax.scan(lambda v, p: layer(ScaledArray(v, 1), p), jnp.ones(3), x)
        np.testing.assert_allclose(last, v, rtol=1e-6)
        np.testing.assert_allclose(sums, expected, rtol=1e-6)
        each = jax.vmap(lambda p: (p["w"] @ p["b"]).value)(x)
        np.testing.assert_allclose(each, 3 * stack[:, 0] ** 2, rtol=1e-6)

    def test_gradients_flow_through(self) -> None:
        grad = jax.grad(lambda x: (to_array(as_scaled(x)) * 3).sum())(jnp.ones(2) * 100)
        np.testing.assert_array_equal(grad, [3, 3])


TILES = ScaledArray(jnp.ones((4, 8)), jnp.ones((2, 4)), block_shape=(2, 2))


@pytest.mark.parametrize(
    ("f", "args", "match"),
    [
        *[(as_scaled, (jnp.ones(2), s), "scale must be") for s in (0, -1.0, np.inf, np.nan)],
        (as_scaled, (jnp.ones((2, 3)), jnp.ones((4, 2, 3))), "scale must broadcast"),
        (functools.partial(as_scaled, stack_axes=2), (jnp.ones(3),), "stack_axes=2"),
        (functools.partial(as_scaled, stack_axes=1), (TILES,), "stack_axes=1"),
        *[(rebalance, (X, s), "s must be positive") for s in (0, -1.0, np.inf, np.float32(0))],
        *[(rebalance, (X, np.ones(s)), "s must broadcast") for s in ((2,), (3, 1), (5, 4, 6))],
        (rebalance, (TILES, jnp.ones(3)), r"s must broadcast against \(2, 4\)"),
        (rescale, (X, "max"), "strategy must be one of rms, amax, mse; got 'max'"),
        (functools.partial(rescale, dtype="e5m9"), (X, "mse"), "floating-point format"),
        (functools.partial(map_values, jnp.add), ({"w": X}, {"v": X}), "pytree structure"),
    ],
)
def test_wrong_arguments(f: Callable[..., Any], args: tuple, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        f(*args)


def test_values_are_mapped() -> None:
    a, b = ScaledArray(jnp.ones(2), 1.0), ScaledArray(jnp.full(2, 0.5, jnp.float16), 8.0)
    mean = map_values(lambda x, y: (x + y) / 2, {"w": a, "n": 1}, {"w": b, "n": 3})
    np.testing.assert_array_equal(mean["w"], [2.5, 2.5])
    assert (mean["w"].dtype, mean["n"]) == (jnp.float32, 2)
    # A ScaledArray here, an array there.
    np.testing.assert_array_equal(map_values(jnp.subtract, [b], [jnp.ones(2)])[0], [3, 3])


class TestRebalance:
    def test_by_a_power_of_two_is_exact(self) -> None:
        # Twice the smallest normal and more, so that halving leaves no bit behind.
        data = np.sign(X) * np.maximum(np.abs(X), 0.1)
        factors = {"twice": 2.0, "one": 1, "rows": jnp.asarray([[2.0], [4.0], [1.0], [0.5]])}

        def rebalanced(s, x):
            y = rebalance(x, s)
            return y, y.value, to_float(y.scale) / to_float(x.scale)

        table = {
            (dtype, name, kind): (
                functools.partial(rebalanced, factors[name]),
                ScaledArray(data.astype(jnp.dtype(dtype)), scale),
            )
            for dtype, name, (kind, scale) in itertools.product(DTYPES, factors, SCALES.items())
        }
        for key, (y, of_y, ratio) in compute(table).items():
            with entry(key):
                assert y.dtype == key[0]
                np.testing.assert_array_equal(np.float64(of_y), exact(table[key][1]))
                expected = np.broadcast_to(factors[key[1]], (4, 6))
                np.testing.assert_array_equal(np.broadcast_to(ratio, (4, 6)), expected)

    def test_entries_that_cannot_divide_change_nothing(self) -> None:
        y = rebalance(ScaledArray(jnp.ones(4), 4.0), jnp.asarray([0, 2.0, np.inf, np.nan]))
        np.testing.assert_array_equal(y.data, [1, 0.5, 1, 1])
        np.testing.assert_array_equal(y.value, [4] * 4)

    def test_a_scale_stays_within_float32(self) -> None:
        """Powers of two beyond the range of the scale stay in the data."""
        for size in (2.0**100, 2.0**-100):
            y = rebalance(ScaledArray(jnp.array([0.0, 1.0]), size), size)
            assert 2.0**-126 <= float(y.scale) <= 2.0**127
            np.testing.assert_array_equal(y.value, np.float32([0, size]))
        blocks = ScaledArray(jnp.ones((1, 4)), jnp.float32([[2.0**100, 1.0]]), block_shape=(1, 2))
        np.testing.assert_array_equal(rebalance(blocks, 2.0**60).value, blocks.value)

    def test_the_largest_numbers_are_kept(self) -> None:
        """XLA divides by multiplying with the inverse, and the inverse of 2^127 is subnormal."""
        x = jnp.array([3e38, 1e38])
        ways = {s: functools.partial(rebalance, s=s) for s in (2.0**126, 2.0**127, 1.7 * 2.0**126)}
        ways |= {s: functools.partial(rescale, strategy=s) for s in ("rms", "amax", "mse")}
        ways |= {"axis": lambda x: rescale(x, axis=0), "as_scaled": as_scaled}
        shapes = (2,), (2, 1)
        table = {(n, s): (ways[n], x.reshape(s)) for n, s in itertools.product(ways, shapes)}
        for name, y in compute(table).items():
            with entry(name):
                np.testing.assert_allclose(exact(y), np.float64(table[name][1]), rtol=1e-6)
        np.testing.assert_allclose(rebalance(x, 2.0**127).value, x, rtol=1e-6)


STRATEGIES = ["rms", "amax", "mse"]


class TestRescale:
    @pytest.mark.parametrize("axis", [pytest.param(None, marks=pytest.mark.slow), 1])
    def test_reaches_its_target(self, axis: int | None) -> None:
        x = {dtype: jnp.asarray((X * 0.05 + 0.1).astype(jnp.dtype(dtype))) for dtype in DTYPES}
        options = {"rms": {}, "amax": {"dtype": "e4m3fn"}, "mse": {"dtype": "e2m1"}}
        table = {
            (s, dtype): (functools.partial(rescale, strategy=s, axis=axis, **options[s]), x[dtype])
            for s, dtype in itertools.product(STRATEGIES, DTYPES)
        }
        for (strategy, dtype), y in compute(table).items():
            with entry((strategy, dtype)):
                data, value = np.float64(y.data), np.float64(x[dtype])
                if (strategy, dtype) != ("mse", "float8_e4m3fn"):
                    np.testing.assert_array_equal(exact(y), value)
                assert (np.frexp(np.asarray(y.scale))[0] == 0.5).all()
                assert y.scale.shape == (() if axis is None else (4, 1))
                if strategy == "rms":
                    # Nearest in value: from 3/4 to 3/2 of a power of two; data is rounded.
                    root = np.sqrt((data**2).mean(axis))
                    assert ((root > 0.74) & (root < 1.51)).all()
                elif strategy == "amax" and dtype != "float8_e4m3fn":  # which has no room to round
                    top = np.abs(data).max(axis)
                    assert ((top > 224) & (top <= 448)).all()
        y = rescale(jnp.asarray([3.0], jnp.float16), "amax")
        assert 65504 / 2 < float(y.data[0]) <= 65504

    @pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1fn"])
    def test_no_power_of_two_has_less_error(self, name: str) -> None:
        sizes = np.float32([[1e-20], [1.0], [300.0]])
        x = (np.random.default_rng(1).standard_t(3, 400) * sizes).astype(np.float32)
        for row, scale in zip(x, rescale(x, "mse", dtype=name, axis=1).scale[:, 0], strict=True):
            errors = [
                np.mean((nearest(row / s, LAYOUTS[name]) * s - row.astype(np.float64)) ** 2)
                for s in float(scale) * 2.0 ** np.arange(-8, 9)
            ]
            # Float32 sums of the squares decide between neighbours of nearly the same error.
            assert errors[8] <= min(errors) * (1 + 400 * 2.0**-23)

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_special_values(self, strategy: str) -> None:
        for special in (0.0, np.inf, np.nan, 1e-45):
            x = rescale(jnp.full(4, special, jnp.float32), strategy, dtype="e4m3fn")
            assert 0 < float(x.scale) < np.inf
        assert float(rescale(ScaledArray(jnp.zeros(3), 4.0), strategy).scale) == 4
        assert rescale(jnp.zeros((0, 3)), strategy).shape == (0, 3)

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_blocks_become_one_scale(self, strategy: str) -> None:
        data = jnp.asarray([[1.0, 2.0], [4.0, 8.0]], jnp.float8_e4m3fn)
        x = ScaledArray(data, jnp.asarray([[2.0**20], [2.0**18]]), block_shape=(1, 2))
        y = rescale(x, strategy)
        assert (y.block_shape, y.dtype) == (None, x.dtype)
        np.testing.assert_array_equal(y.value, x.value)

    def test_a_scaled_array_by_its_data(self) -> None:
        y = rescale(ScaledArray(jnp.full(4, 8.0, jnp.float16), 4.0))
        assert (float(y.scale), float(y.data[0])) == (32, 1)
        grad = jax.jit(jax.grad(lambda x: (rescale(x).value * X).sum()))(jnp.full((4, 6), 3.0))
        np.testing.assert_array_equal(grad, X)
        best = rescale(X, "mse", dtype="e2m1")
        np.testing.assert_array_equal(cast(best, "e2m1").scale, best.scale)


class TestStatistics:
    def test_against_float64(self) -> None:
        x = np.random.default_rng(0).standard_normal((4, 50, 3)).astype(np.float32)
        arrays = {s: (x * np.float32(s)).astype(np.float32) for s in (1e-30, 1e-3, 1.0, 1e30)}
        arrays["bfloat16"] = x.astype(jnp.bfloat16)
        table = {
            (name, axis): (lambda x, axis=axis: (amax(x, axis), rms(x, axis)), jnp.asarray(array))
            for name, array in arrays.items()
            for axis in (None, 0, -1, (0, 2))
        }
        for (name, axis), (largest, root) in compute(table).items():
            with entry((name, axis)):
                values, keep = arrays[name].astype(np.float64), axis is not None
                np.testing.assert_array_equal(largest, np.abs(values).max(axis, keepdims=keep))
                expected = np.sqrt((values**2).mean(axis, keepdims=keep))
                np.testing.assert_allclose(root, expected, rtol=x.size * 2.0**-24)
                assert largest.dtype == root.dtype == jnp.float32

    def test_the_largest_numbers(self) -> None:
        for dtype in (jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2):
            top = float(jnp.finfo(dtype).max)
            assert float(amax(jnp.full(1000, top, dtype))) == top
            assert float(rms(jnp.full(1000, top, dtype))) == pytest.approx(top, rel=2.0**-20)
        x = jnp.array([3e38, 1e38])
        np.testing.assert_allclose([rms(x), rms(x, 0)[0]], [np.sqrt(5e76)] * 2, rtol=1e-6)
        with jax.enable_x64(True):
            assert float(amax(jnp.asarray([1e-200]))) == 1e-200

    @pytest.mark.parametrize("statistic", [amax, rms])
    def test_special_values(self, statistic: Callable[..., jax.Array]) -> None:
        for shape in ((), (0,), (5,)):
            assert float(statistic(jnp.zeros(shape))) == 0
        assert statistic(jnp.zeros((3, 0)), -1).shape == (3, 1)
        assert float(statistic(jnp.asarray([1.0, -np.inf]))) == np.inf
        for wrong in (np.nan, -np.nan):  # XLA's CPU backend ignores NaN in large arrays
            assert np.isnan(float(statistic(jnp.ones(2**16).at[777].set(wrong))))


@pytest.mark.slow
def test_a_scalified_program_of_any_batch() -> None:
    """A symbolic dimension has no number during tracing."""
    dtype = jnp.float16
    (batch,) = export.symbolic_shape("batch")
    rng = np.random.default_rng(0)
    w = as_scaled(jnp.asarray(rng.normal(size=(8, 8)), jnp.float32), dtype=dtype)
    x = as_scaled(jnp.asarray(rng.normal(size=(5, 8)), jnp.float32), dtype=dtype)
    signature = jax.tree.map(lambda a: jax.ShapeDtypeStruct((batch, 8)[: a.ndim], a.dtype), x)

    def program(x, w):
        square = jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w)
        chosen = jnp.where(x > 0, x * 3, jnp.maximum(x, -0.5))
        sums = x.sum(), x.mean(0), jnp.cumsum(x, 0)
        return x + jnp.tanh(x @ w), *sums, jax.nn.softmax(x @ w), chosen, square

    found = export.export(jax.jit(scalify(program)))(signature, w).call(x, w)
    for got, expected in zip(to_array(found), program(to_array(x), to_array(w)), strict=True):
        # A few roundings, and XLA's tanh of float32, which errs by several units itself.
        atol = 4 * float(jnp.finfo(dtype).eps) * float(jnp.max(jnp.abs(expected)))
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


def test_rescaled_data_is_finite() -> None:
    outlier = jnp.zeros(1 << 16).at[0].set(448.0).astype(jnp.float8_e4m3fn)
    assert bool(jnp.isfinite(rescale(outlier).value).all())
    wide = jnp.array([60000.0, 1.0], jnp.float16)
    assert bool(jnp.isfinite(rescale(wide, "amax", dtype="bfloat16").value).all())
    assert rescale(jnp.array([1.0, 2.0, jnp.nan]), "mse", dtype="e4m3fn").scale == 1
    np.testing.assert_array_equal(rescale(jnp.float32([100.0]), "amax").value, 100)
