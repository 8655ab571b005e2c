"""Collectives in FP8 against means, or gathered arrays, in float64."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from recipes.bench.wire import bytes_on_wire, collectives
from tests.exported import assert_is_read_again
from tests.parallel.devices import mesh_of, on_each
from unitscale import ScaledArray, cast
from unitscale.core import format_of, to_array
from unitscale.parallel import AutoScale, ParallelState, all_gather, all_reduce, reduce_scatter

FORMATS = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32"]


def reduced(rows: Any, devices: int = 8, dtype: Any = "float8_e4m3fn", **settings: Any) -> Any:
    """Return the result of each device."""
    f = on_each(lambda g: all_reduce(g, "data", dtype, **{"small": 0} | settings), devices)
    return jax.tree.map(np.asarray, f(rows))


@pytest.mark.parametrize(("devices", "shape"), [(8, (64, 33)), (3, (5, 5)), (2, ())])
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


def test_ends_of_the_range() -> None:
    sizes = np.float32([1e-37, 1e38])
    assert reduced((), 2) == ()
    got = reduced([np.full((4, 9), size) for size in sizes], 4)
    for mean, size in zip(got, sizes, strict=True):
        np.testing.assert_allclose(mean, size, rtol=2.0**-3)


def test_mu() -> None:
    """mu = 4 saturates above a quarter of the range, and represents values two binades smaller."""
    rows = np.full((4, 4), 448.0, np.float32)
    rows[:, 1], rows[:, 2], rows[:, 3] = 100.0, 2.0**-11, 0.0
    np.testing.assert_array_equal(reduced(rows, 4, mu=4)[0], [112, 96, 2.0**-11, 0])
    got = reduced({"a": rows, "b": rows}, 4, mu={"a": 1.0, "b": jnp.float32(7)})
    np.testing.assert_array_equal(got["a"][0], [448, 96, 0, 0])
    assert got["b"][0, 0] == 112


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
    """Gradients of ScaledArrays, with a scale of zero as jax.grad makes them, keep it."""
    grads = ScaledArray(jnp.full((4, 6), 3.0, jnp.float16), jnp.zeros((4, 1)))
    f = on_each(lambda g: all_reduce(g, "data", small=4), 4, P())
    got = f(grads)
    np.testing.assert_array_equal(got.data, np.full(6, 3.0))
    assert got.dtype == jnp.float16
    assert float(jnp.max(got.scale)) == 0


def test_summed_gradients_are_refused() -> None:
    """With check_vma, jax.grad has already summed the gradients of replicated parameters."""
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
    with pytest.raises(ValueError, match=r"grads must differ.*pcast"):
        maps[0](w, x)
    np.testing.assert_allclose(maps[1](w, x), x.mean(0), rtol=2.0**-3)


def test_reduce_scatter() -> None:
    rows = np.random.default_rng(1).normal(size=(4, 8, 12, 4)).astype(np.float32)
    ways = [*itertools.product(("float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"), (0, 1, -1))]

    def in_all(g):
        return [reduce_scatter(g, "data", dtype, axis=axis) for dtype, axis in ways]

    exact = rows.astype(np.float64).mean(0)
    for (dtype, axis), parts in zip(ways, on_each(in_all, 4)(rows), strict=True):
        fmt, got = format_of(dtype), np.concatenate(np.asarray(parts), axis)
        assert got.shape == exact.shape
        # One rounding of the terms: half a step each, below the normal numbers the smallest.
        bound = (fmt.eps / 2 + 1e-6) * np.abs(rows).mean(0)
        bound += 2 * np.abs(rows).max() / fmt.max * fmt.smallest_subnormal
        assert (np.abs(got - exact) <= bound).all(), (dtype, axis)


def gathered(rows: Any, dtype: Any = "float8_e4m3fn", **settings: Any) -> Any:
    return on_each(lambda w: all_gather(w, "data", dtype, **settings), 4, P())(rows)


def test_all_gather() -> None:
    rows = np.random.default_rng(0).normal(size=(4, 3, 6)).astype(np.float32)
    rows[2, 1, 1] = 5.5  # the largest of all
    ways = [*itertools.product(FORMATS[:4], (0, 1, -1))]

    def in_all(w):
        return [all_gather(w, "data", dtype, axis=axis) for dtype, axis in ways]

    for (dtype, axis), got in zip(ways, on_each(in_all, 4, P())(rows), strict=True):
        fmt = format_of(dtype)
        scale = 1.0 if dtype == "bfloat16" else 2.0 ** np.ceil(np.log2(5.5 / fmt.max))
        assert (float(got.scale), got.dtype) == (scale, fmt.dtype)
        expected = np.float32(cast(np.concatenate(rows, axis) / scale, dtype)) * scale
        np.testing.assert_array_equal(got.value, expected)


def test_bytes_on_the_wire() -> None:
    x = np.zeros((4, 4096), np.float32)
    program = on_each(lambda g: reduce_scatter(g, "data"), 4).lower(x).compile()
    assert bytes_on_wire(program) == (4096 + 2 * 4) * (4 - 1) / 4
    program = on_each(lambda w: all_gather(w, "data"), 4, P()).lower(x[:, :1024]).compile()
    assert bytes_on_wire(program) == (4096 + 2 * 4) * (4 - 1) / 4
    assert {c.dtype for c in collectives(program)} == {"u8", "s32"}


def test_halves_on_overflow() -> None:
    rows = {"w": np.ones((4, 64), np.float32)}
    auto, step, found = AutoScale.create({"w": 0.0}, recovery=1), stepper(), []
    for _ in range(5):
        means, auto = step(auto, rows)
        found.append(float(auto.mu["w"]))
        assert float(means["w"][0]) in (1.0, 448 / 512)
    assert found == [2, 1, 2, 1, 2]


def test_one_device_overflows_for_all() -> None:
    rows = np.full((4, 100), 1.0, np.float32)
    rows[:, 0] = 256.0
    rows[2, 1] = 256.0
    auto = AutoScale(mu=jnp.float32(2), threshold=4.5 / 400)  # 5 of 400 saturate at mu = 2
    means, after = stepper()(auto, rows)
    assert float(after.mu) == 1.0
    assert float(stepper()(AutoScale(mu=jnp.float32(2), threshold=5.5 / 400), rows)[1].mu) > 2
    assert float(means[0]) == 224.0  # 448 / 2


def test_tensors_have_their_own() -> None:
    rows = {"a": np.ones((4, 8), np.float32), "b": np.ones((4, 8), np.float32)}
    rows["b"][1, 1] = np.inf
    means, auto = stepper()(AutoScale.create({"a": 0, "b": 0}), rows)
    np.testing.assert_allclose(auto.mu["a"], 2.0**0.001, rtol=1e-6)
    assert float(auto.mu["b"]) == 0.5
    assert np.isnan(means["b"]).all()


def test_bounds() -> None:
    for wrong in ({"threshold": 1.0}, {"threshold": -0.1}, {"recovery": 0}, {"largest": 0.5}):
        with pytest.raises(ValueError, match="threshold"):
            AutoScale.create(0.0, **wrong)
    auto = AutoScale.create(0.0, largest=4.0, recovery=1)
    for _ in range(5):
        auto = auto.updated(0.0)
    assert float(auto.mu) == 4.0
    for _ in range(50):
        auto = auto.updated(1.0)
    assert float(auto.mu) == 2.0**-8
    assert float(auto.updated(0.0).mu) == 2.0**-7


def test_the_state_of_a_step() -> None:
    params = {"w": jnp.ones(3)}
    assert_is_read_again(ParallelState(params, jnp.zeros(3), AutoScale.create(params)))


@functools.cache
def stepper(**settings: Any) -> Any:
    def local(auto, rows):
        grads = jax.tree.map(lambda x: x[0], rows)
        return auto.all_reduce(grads, "data", **{"small": 0} | settings)

    mesh = mesh_of(data=4)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))


ONES = np.ones((4, 6), np.float32)
STORED = ScaledArray(jnp.ones((4, 8)), jnp.full((4, 1), 2.0))
WRONG: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("rounding", all_reduce, ONES, {"rounding": "up"}),
    ("key", all_reduce, ONES, {"rounding": "stochastic"}),
    ("mu", all_reduce, ONES, {"mu": 0.0}),
    ("mu", all_reduce, ONES, {"mu": [1.0, 1.0]}),
    ("dtype", all_reduce, ONES, {"dtype": "float4_e2m1fn"}),
    ("grads", all_reduce, ONES.astype(int), {}),
    ("axis 0", reduce_scatter, ONES, {}),
    ("dtype", reduce_scatter, ONES, {"dtype": "E4M3"}),
    ("grads", reduce_scatter, STORED, {}),
    ("key", reduce_scatter, ONES, {"rounding": "stochastic"}),
    ("dtype", all_gather, ONES, {"dtype": "float32"}),
    ("weights", all_gather, ONES.astype(int), {}),
    ("weights must have axis 1", all_gather, ONES, {"axis": 1}),
    ("key", all_gather, ONES, {"rounding": "stochastic"}),
]


@pytest.mark.parametrize(("name", "exchange", "rows", "settings"), WRONG)
def test_refusals(name: str, exchange: Any, rows: Any, settings: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        on_each(lambda x: exchange(x, "data", **settings), 4)(rows)
    with pytest.raises(ValueError, match="axis_name"):
        exchange(rows, "data")


def test_exchanges_have_no_derivative() -> None:
    for exchange in (reduce_scatter, all_gather):
        with pytest.raises(TypeError, match="an exchange has no derivative"):
            on_each(jax.grad(lambda x, f=exchange: jnp.sum(to_array(f(x, "data")))), 4)(
                np.ones((4, 8), np.float32)
            )


def test_zeros_and_what_is_not_finite() -> None:
    rows = {name: np.ones((4, 8), np.float32) for name in ("0", "inf", "nan", "1")}
    for name, x in rows.items():
        x[...] = 0 if name == "0" else 1
        x[1, 5] = float(name)

    def each(x):
        parts = reduce_scatter(x, "data")
        return jax.tree.map(lambda part: lax.all_gather(part, "data", tiled=True), parts)

    for found in (on_each(each, 4)(rows), to_array(gathered(rows)), reduced(rows, 4)):
        found = {name: np.asarray(x) for name, x in found.items()}
        assert np.isnan([found["inf"], found["nan"]]).all()
        assert (found["0"] == 0).all()
        assert np.isfinite(found["1"]).all()


def test_stochastic_rounding_is_unbiased() -> None:
    """Random bits differ between devices, so that the mean of four has half the deviation."""
    rows, share = np.full((4, 4096), 1.03, np.float32), (1.03 - 1) / 0.125

    def each(x):
        options: dict[str, Any] = {"rounding": "stochastic", "key": jax.random.key(0)}
        parts = reduce_scatter(x, "data", **options)
        mean = all_reduce(x, "data", **options, small=0)
        return lax.all_gather(parts, "data", tiled=True), all_gather(x, "data", **options), mean

    # The mean is rounded again by all_reduce, to the same steps.
    for got, devices in zip(on_each(each, 4, P(), check_vma=False)(rows), (4, 1, 1), strict=True):
        got = np.asarray(to_array(got), np.float64)
        spread = 0.125 * np.sqrt(share * (1 - share) / devices)
        assert abs(got.mean() - 1.03) < 5 * spread / 64
        assert abs(got.std() / spread - 1) < 0.2


def test_the_largest_numbers_stay_finite() -> None:
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        top = jnp.finfo(dtype).max
        np.testing.assert_array_equal(
            reduced(jnp.full((2, 4), top, dtype), 2), np.full((2, 4), top)
        )


def test_a_tensor_that_is_not_finite_halves_mu() -> None:
    rows = np.ones((2, 4), np.float32)
    rows[0, 0] = np.nan
    auto = AutoScale.create(rows[0])
    update = on_each(lambda g: auto.all_reduce(g, "data", small=0)[1].mu, 2)
    np.testing.assert_array_equal(update(rows), 0.5)
