"""`all_reduce` against the mean in float64, over tables of formats, shapes and bad values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.parallel.devices import heavy_tailed, mesh_of, on_each, relative_error
from unitscale import ScaledArray
from unitscale.core import format_of
from unitscale.parallel import all_reduce

FORMATS = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32"]


def reduced(rows: Any, devices: int = 8, dtype: Any = "float8_e4m3fn", **settings: Any) -> Any:
    """What each of the devices gets."""
    f = on_each(lambda g: all_reduce(g, "data", dtype, **{"small": 0} | settings), devices)
    return jax.tree.map(np.asarray, f(rows))


@pytest.mark.parametrize(("devices", "shape"), [(8, (64, 33)), (4, (7,)), (3, (5, 5)), (2, ())])
def test_mean(devices: int, shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(1).normal(size=(devices, *shape)).astype(np.float32)
    exact = rows.astype(np.float64).mean(0)

    def in_all(grads):
        return {dtype: all_reduce(grads, "data", dtype, small=0) for dtype in FORMATS}

    for dtype, got in on_each(in_all, devices)(rows).items():
        got, fmt = np.asarray(got), format_of(dtype)
        assert got.shape == rows.shape
        assert got.dtype == np.float32
        assert (got == got[0]).all()  # bit for bit the same on all devices
        # Two roundings to nearest, each at most half a step: of the terms, then of the mean. Below
        # the normal numbers the step is that of the smallest, at a scale of at most 2 amax / max.
        half = fmt.eps / 2
        bound = half * (np.abs(rows).mean(0) + np.abs(exact) * (1 + half)) * (1 + 1e-6)
        steps = 2 * np.abs(rows).max() / fmt.max * fmt.smallest_subnormal
        error = np.abs(got[0] - exact)
        assert (error <= bound + steps + 1e-6 * np.abs(rows).mean(0)).all(), dtype


def test_heavy_tails_within_four_percent() -> None:
    """Three of every hundred is what one rounding to e4m3fn costs, and there are two."""
    rows = heavy_tailed((8, 64, 64))
    exact = rows.astype(np.float64).mean(0)
    got = reduced(rows)[0]
    assert relative_error(got, exact) <= 0.04
    assert relative_error(reduced(rows, dtype="float32")[0], exact) < 1e-6


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean of many exchanges comes as near to the exact one as independent errors allow."""
    draws, devices = 400, 8
    rows = heavy_tailed((devices, 256), seed=3)

    def many(g):
        keys = jax.random.split(jax.random.key(5), draws)
        return lax.map(lambda k: all_reduce(g, "data", rounding="stochastic", key=k, small=0), keys)

    got = np.asarray(on_each(many, devices, P())(rows), np.float64)
    exact = rows.astype(np.float64).mean(0)
    spread = got.std(0, ddof=1) / np.sqrt(draws)
    moved = spread > 0
    assert moved.mean() > 0.9
    z = (got.mean(0) - exact)[moved] / spread[moved]
    # Of entries far below one step few draws differ from zero, and z is not normal there.
    often = (np.abs(got[:, moved] - got[:, moved].mean(0)) > 0).mean(0) > 0.1
    often &= (got[:, moved] != 0).mean(0) > 0.1
    z = z[often]
    assert z.size > 100
    assert np.abs(z).max() < 5
    assert abs(z.mean()) < 4 / np.sqrt(z.size)
    # Nearest rounding of the same gradients is not: it loses the small ones, each time.
    nearest = reduced(rows)[0]
    small = (np.abs(exact) < 2.0**-12) & (exact != 0)
    assert (nearest[small] == 0).all()


def test_devices_round_differently() -> None:
    """With one noise for all, eight roundings of a value would be eight times the same."""
    rows = np.full((8, 1024), 1.0625, np.float32)  # half way between neighbours
    rows[:, 0] = 448.0
    key = jax.random.key(0)
    got = reduced(rows, dtype="float8_e4m3fn", rounding="stochastic", key=key)[0]
    # Sums of eight independent halves mostly miss the neighbours, and round to 1 or 1.125 then.
    assert set(np.unique(got[1:])) == {1.0, 1.125}
    assert abs(got[1:].mean() - 1.0625) < 5 * 0.0625 / np.sqrt(1023)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16"])
def test_what_is_not_finite_is_not_hidden(dtype: str) -> None:
    rows = {name: np.ones((4, 3, 5), np.float32) for name in ("inf", "-inf", "nan", "1")}
    for bad in list(rows):
        rows[bad][2, 1, 1] = float(bad)
    got = reduced(rows, 4, dtype)
    np.testing.assert_array_equal(got.pop("1"), 1)
    assert all(np.isnan(mean).all() for mean in got.values())


def test_zeros_stay_zeros() -> None:
    def in_all(grads):
        return [all_reduce(grads, "data", dtype, small=0) for dtype in FORMATS]

    for mean in on_each(in_all, 4)(np.zeros((4, 9), np.float32)):
        np.testing.assert_array_equal(mean, 0)


def test_ends_of_the_range() -> None:
    sizes = np.float32([1e-37, 1e38])
    got = reduced([np.full((4, 9), size) for size in sizes], 4)
    for mean, size in zip(got, sizes, strict=True):
        np.testing.assert_allclose(mean, size, rtol=2.0**-3)


def test_gradients_keep_their_dtype() -> None:
    rows = {dtype: np.ones((4, 9), jnp.dtype(dtype)) for dtype in ("float16", "bfloat16")}
    f = on_each(lambda g: all_reduce(g, "data", small=0), 4)
    assert all(mean.dtype == dtype for dtype, mean in jax.eval_shape(f, rows).items())


def test_mu() -> None:
    """mu = 4 saturates what is above a quarter of the range, and reaches two binades deeper."""
    rows = np.full((4, 4), 448.0, np.float32)
    rows[:, 1], rows[:, 2], rows[:, 3] = 100.0, 2.0**-11, 0.0
    np.testing.assert_array_equal(reduced(rows, 4, mu=4)[0], [112, 96, 2.0**-11, 0])
    got = reduced({"a": rows, "b": rows}, 4, mu={"a": 1.0, "b": jnp.float32(7)})
    np.testing.assert_array_equal(got["a"][0], [448, 96, 0, 0])
    assert got["b"][0, 0] == 112


def test_small_leaves_are_exchanged_in_their_own_format() -> None:
    rows = np.random.default_rng(0).normal(size=(4, 10)).astype(np.float32)
    exact = rows.mean(0)
    np.testing.assert_allclose(reduced(rows, 4, small=11)[0], exact, rtol=1e-5, atol=1e-7)
    half = reduced(rows, 4, small=11, small_dtype="bfloat16")[0]
    assert 0 < relative_error(half, exact) < 2.0**-7
    assert relative_error(reduced(rows, 4, small=10)[0], exact) > 2.0**-7


def test_two_axes_count_as_one() -> None:
    rows = np.random.default_rng(2).normal(size=(4, 50)).astype(np.float32)
    axes = ("data", "fsdp")
    f = jax.shard_map(
        lambda g: all_reduce(g[0], axes, small=0),
        mesh=mesh_of(data=2, fsdp=2),
        in_specs=P(axes),
        out_specs=P(),
    )
    np.testing.assert_array_equal(jax.jit(f)(rows), reduced(rows, 4)[0])


def test_gradients_of_scaled_arrays() -> None:
    """data beside a scale of zero, as jax.grad makes them, stay that."""
    grads = ScaledArray(jnp.full((4, 6), 3.0, jnp.float16), jnp.zeros((4, 1)))
    f = on_each(lambda g: all_reduce(g, "data", small=4), 4, P())
    got = f(grads)
    np.testing.assert_array_equal(got.data, np.full(6, 3.0))
    assert got.dtype == jnp.float16
    assert float(jnp.max(got.scale)) == 0


def test_summed_gradients_are_refused() -> None:
    """Under shard_map's own checks, jax.grad has summed those of replicated parameters."""
    mesh = mesh_of(data=4)

    def loss(w, x):
        return jnp.sum(w * x)

    def summed(w, x):
        return all_reduce(jax.grad(loss)(w, x[0]), "data", small=0)

    def local(w, x):
        return all_reduce(jax.grad(loss)(lax.pcast(w, "data", to="varying"), x[0]), "data", small=0)

    w, x = jnp.ones(8), jnp.arange(32.0).reshape(4, 8)
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    maps = [jax.jit(jax.shard_map(f, mesh=mesh, **specs)) for f in (summed, local)]
    with pytest.raises(ValueError, match=r"grads must differ between the devices of 'data'.*pcast"):
        maps[0](w, x)
    np.testing.assert_allclose(maps[1](w, x), x.mean(0), rtol=2.0**-3)


WRONG = [
    ({"rounding": "up"}, ValueError, "rounding must be 'nearest' or 'stochastic'; got 'up'"),
    ({"rounding": "stochastic"}, ValueError, "rounding='stochastic' needs key="),
    ({"mu": 0.0}, ValueError, "mu must be positive and finite; got 0"),
    ({"mu": [1.0, 1.0]}, ValueError, "mu must be a number, or a tree of numbers as grads"),
    ({"dtype": "float4_e2m1fn"}, ValueError, "dtype must be a float8"),
]


@pytest.mark.parametrize(("settings", "error", "message"), WRONG, ids=lambda x: str(x)[:20])
def test_refusals(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"unitscale\.parallel\.all_reduce: {message}"):
        reduced(np.ones((2, 4), np.float32), 2, **settings)


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"grads\['n'\] must be floating; got dtype int32"):
        reduced({"n": np.ones((2, 4), np.int32)}, 2)


def test_outside_of_shard_map() -> None:
    with pytest.raises(ValueError, match="Call it inside shard_map"):
        all_reduce(jnp.ones(3), "data")


def test_an_empty_tree_and_empty_leaves() -> None:
    assert reduced((), 2) == ()
    assert reduced(np.ones((2, 0), np.float32), 2).shape == (2, 0)
