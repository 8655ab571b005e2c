import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

from tests.batching import compute, entry
from tests.optimizers import scaled
from unitscale.core import ScaledArray, as_scaled, format_of, rebalance
from unitscale.optim import apply_updates
from unitscale.optim._storage import scale_weight

FORMATS = ["float16", "bfloat16", "float32", "float8_e4m3fn"]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 24)).astype(np.float32)


def scale_params(params, dtype="float16"):
    return scaled(optax.sgd(0.1), weights=dtype).scale_params(params)


def rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def test_parameters_are_near_rms_1_and_round_once() -> None:
    def make(x, dtype):
        params = scale_params({"w": x, "n": jnp.arange(3)}, dtype)
        return params, params["w"].value

    names = list(itertools.product(FORMATS, (1.0, 3e-5, 7e8)))
    table = {n: (functools.partial(make, dtype=n[0]), X * np.float32(n[1])) for n in names}
    for (dtype, size), (params, value) in compute(table).items():
        with entry((dtype, size)):
            w, fmt = params["w"], format_of(dtype)
            assert w.dtype == fmt.dtype
            assert 0.6 < rms(w.data) < 1.5
            scale = float(w.scale)
            assert np.frexp(scale)[0] == 0.5
            x = X * np.float32(size)
            half = np.maximum(fmt.eps / 2 * np.abs(x) / scale, fmt.smallest_subnormal / 2)
            assert (np.abs(value - x) / scale <= half).all()
            np.testing.assert_array_equal(params["n"], np.arange(3))


def test_scaled_parameters_take_the_format_and_zeros_a_real_scale() -> None:
    w = scale_params(ScaledArray(jnp.asarray(X), 2.0**9))
    assert w.dtype == jnp.float16
    np.testing.assert_allclose(w.value, X * 512, rtol=2**-11, atol=2.0**-24 * 512)
    zeros = scale_params(as_scaled(jnp.zeros(4)))
    assert float(zeros.scale) == 2.0**-8
    np.testing.assert_array_equal(zeros.value, np.zeros(4))


def test_zeros_are_trained_from_the_first_update_on() -> None:
    def train(update, dtype):
        first = apply_updates(scale_params(jnp.zeros(2), dtype), update)
        return first.value, apply_updates(first, jnp.zeros(2)).data

    names = list(itertools.product(("float16", "float8_e4m3fn"), (1e-4, 1e-2, 1.0)))
    table = {n: (functools.partial(train, dtype=n[0]), np.array([n[1], -n[1]])) for n in names}
    for (dtype, size), (value, data) in compute(table).items():
        np.testing.assert_allclose(value, [size, -size], rtol=format_of(dtype).eps / 2)
        assert 0.5 <= rms(data) <= 2, (dtype, size)


def test_the_sum_is_rounded_once() -> None:
    update = RNG.normal(size=X.shape).astype(np.float32) / 8

    def add(x, update, dtype):
        w = scale_params(x, dtype)
        return w.value, apply_updates(w, update)

    table = {dtype: (functools.partial(add, dtype=dtype), X, update) for dtype in FORMATS}
    for dtype, (value, out) in compute(table).items():
        exact = (np.asarray(value, np.float64) + update) / float(out.scale)
        fmt = format_of(dtype)
        error = np.abs(np.asarray(out.data).astype(np.float64) - exact)
        bound = np.maximum(fmt.eps / 2 * np.abs(exact), fmt.smallest_subnormal / 2)
        assert (error <= bound * (1 + 1e-3) + 2.0**-24).all(), dtype  # the sum itself is float32
        assert out.dtype == fmt.dtype


@pytest.mark.parametrize(("factor", "moves"), [(0.6, False), (1.9, False), (0.3, True), (5, True)])
def test_a_fresh_scale_when_the_rms_has_left_a_half_to_two(factor: float, moves: bool) -> None:
    data = (np.where(X > 0, 1, -1) * factor).astype(np.float16)
    out = rescaled(data, 4.0)
    np.testing.assert_array_equal(np.float32(out.data) * np.float32(out.scale), 4 * data)
    assert (float(out.scale) != 4.0) == moves
    assert 0.5 <= rms(out.data) <= 2


@jax.jit
def rescaled(data, scale):
    """After an update of zeros."""
    return apply_updates(ScaledArray(data, scale), jnp.zeros(data.shape))


def test_per_channel_and_block_scales_are_kept_apart() -> None:
    size = np.array([1.0, 16.0, 2.0**-6, 1.0], np.float32)
    data = (np.ones((8, 4)) * size).astype(np.float32)
    out = rescaled(data, np.ones(4, np.float32))
    np.testing.assert_array_equal(out.scale.ravel(), size)
    np.testing.assert_array_equal(out.data * size, data)

    def add(blocks):
        out = apply_updates(blocks, jnp.ones((4, 4)))
        return out, out.value - blocks.value

    out, moved = jax.jit(add)(
        ScaledArray(np.ones((4, 4), np.float32), np.float32([[1, 8]]), block_shape=(4, 2))
    )
    assert out.block_shape == (4, 2)
    np.testing.assert_array_equal(moved, 1)


def test_large_arrays_are_judged_by_evenly_spaced_entries() -> None:
    data = np.full((3, 700, 100), 64.0, np.float16)
    assert float(rescaled(data, np.float32(1)).scale) == 64.0


@pytest.mark.parametrize(("dtype", "size"), [("float16", 1e-6), ("float8_e4m3fn", 1e-2)])
@pytest.mark.parametrize("small", [np.s_[::64], np.s_[:, ::128]], ids=str)
def test_small_rows_or_columns_that_are_looked_at_clip_no_others(small, dtype, size) -> None:
    value = np.random.default_rng(0).standard_normal((4096, 256)).astype(np.float32)
    value[small] *= size
    weight = first = scale_weight(value, dtype)
    for _ in range(3):
        weight = apply_updates(weight, jnp.zeros(value.shape))
    np.testing.assert_array_equal(weight.value, first.value)


@given(power=st.integers(-8, 8), seed=st.integers(0, 2**16))
def test_the_split_into_data_and_scale_changes_no_value(power: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = rng.uniform(0.5, 2, 8) * rng.choice([-1, 1], 8)
    update = (rng.normal(size=8) / 64).astype(np.float32)
    np.testing.assert_array_equal(*still_and_moved(data.astype(np.float16), update, 2.0**power))


@jax.jit
def still_and_moved(data, update, factor):
    w = ScaledArray(data, jnp.float32(1))
    return [apply_updates(v, update).value for v in (w, rebalance(w, factor))]


def test_small_updates_are_lost_to_nearest_rounding_and_kept_by_stochastic() -> None:
    """512 updates of an eighth of the distance of neighbours, of 4096 weights."""
    n, steps = 4096, 512

    def step(w, key):
        update = jnp.full(n, 2.0**-13)
        return (apply_updates(w[0], update), apply_updates(w[1], update, key=key)), None

    @jax.jit
    def run():
        start = ScaledArray(jnp.ones(n, jnp.float16), jnp.float32(1))
        keys = jax.random.split(jax.random.key(0), steps)
        (nearest, random), _ = jax.lax.scan(step, (start, start), keys)
        return nearest.value, random.value

    nearest, random = run()
    np.testing.assert_array_equal(nearest, 1.0)
    gained = np.asarray(random, np.float64) - 1
    # Each step goes up by 2**-10 with probability 1/8.
    error = 2.0**-10 * np.sqrt(steps * 7 / 64 / n)
    assert abs(gained.mean() - steps * 2.0**-13) < 5 * error


def test_plain_parameters_none_and_infinity() -> None:
    params = {"a": np.ones(2, np.float16), "b": np.arange(2), "c": None, "d": np.ones(1)}
    updates = {"a": np.full(2, 2.0**-9), "b": np.ones(2, int), "c": None, "d": None}
    steps = apply_updates({"n": jnp.arange(2)}, {"n": jnp.full(2, -0.0)})  # as SGD returns them
    assert steps["n"].dtype == jnp.int32
    out = jax.jit(apply_updates)(params, updates)
    np.testing.assert_array_equal(out["a"], np.full(2, 1 + 2.0**-9))
    assert out["a"].dtype == jnp.float16
    np.testing.assert_array_equal(out["b"], [1, 2])
    assert out["c"] is None
    np.testing.assert_array_equal(out["d"], 1)

    def add(update, dtype):
        return apply_updates(scale_params(jnp.ones(3), dtype), update).value

    for dtype in ("float16", "float8_e4m3fn"):
        w = jax.jit(add, static_argnums=1)(np.array([np.inf, 0.0, 1.0]), dtype)
        np.testing.assert_array_equal(np.isnan(w), [True, False, False])
    unscaled = ScaledArray(jnp.ones(3, jnp.bfloat16))
    assert apply_updates(unscaled, jnp.ones(3)).scale is None


def test_errors() -> None:
    with pytest.raises(ValueError, match="updates must have the structure of params; got"):
        apply_updates({"a": jnp.ones(2)}, [jnp.ones(2)])


SIZES = np.float32([1, 2.0**9, 2.0**-9])
STACK = SIZES[:, None, None] * RNG.normal(size=(3, 8, 16)).astype(np.float32)


@pytest.mark.parametrize("dtype", FORMATS)
def test_items_of_a_stack_have_their_own_scales_and_keep_them(dtype: str) -> None:
    """By default of all axes but the last two; what is updated scans as before."""
    params = {"w": STACK, "b": STACK[:, 0]}
    axes = {"w": None, "b": 1}
    changed = jax.tree.map(lambda x: x * np.float32(16), params)

    @jax.jit
    def run(params, changed):
        tx = scaled(optax.sgd(0.1), weights=dtype)
        first = tx.scale_params(params, stack_axes=axes)
        updates = jax.tree.map(lambda new, old: new - old.value, changed, first)
        second = apply_updates(first, updates)
        third = apply_updates(second, jax.tree.map(jnp.zeros_like, updates))
        values = [jax.lax.map(lambda w: w.value, p["w"]) for p in (first, third)]
        return first, third, values

    first, third, values = run(params, changed)
    eps = float(jnp.finfo(dtype).eps)
    for tree, value, factor in ((first, values[0], 1), (third, values[1], 16)):
        assert tree["w"].scale.shape == (3, 1, 1)
        assert tree["b"].scale.shape == (3, 1)
        ratio = np.asarray(tree["w"].scale).ravel() / (factor * SIZES)
        assert ((ratio >= 0.5) & (ratio <= 2)).all()
        size = np.maximum(np.abs(STACK), SIZES[:, None, None] * 2.0**-5)
        assert (np.abs(value - factor * STACK) <= 2 * eps * factor * size).all()


def test_matrices_and_vectors_have_one_scale() -> None:
    params = scale_params({"w": X, "b": X[0]})
    assert params["w"].scale.shape == params["b"].scale.shape == ()
    everywhere = scaled(optax.sgd(0.1)).scale_params({"w": X, "b": X[0]}, stack_axes=1)
    assert everywhere["w"].scale.shape == (16, 1)
    assert everywhere["b"].scale.shape == (24,)
