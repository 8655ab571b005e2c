from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

from unitscale.core import ScaledArray, as_scaled, format_of, rebalance
from unitscale.optim import apply_updates, scaled

FORMATS = ["float16", "bfloat16", "float32", "float8_e4m3fn"]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 24)).astype(np.float32)


def scale_params(params, dtype="float16"):
    return scaled(optax.sgd(0.1), weights=dtype).scale_params(params)


def rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


@pytest.mark.parametrize("size", [1.0, 3e-5, 7e8])
@pytest.mark.parametrize("dtype", FORMATS)
def test_parameters_are_near_rms_1_and_round_once(dtype: str, size: float) -> None:
    x = X * np.float32(size)
    w = scale_params({"w": x, "n": np.arange(3)}, dtype)
    assert w["w"].dtype == format_of(dtype).dtype
    assert 0.6 < rms(w["w"].data) < 1.5
    assert np.frexp(float(w["w"].scale))[0] == 0.5
    fmt = format_of(dtype)
    error = np.abs(np.asarray(w["w"].value) - x) / float(w["w"].scale)
    data = np.abs(x) / float(w["w"].scale)
    assert (error <= np.maximum(fmt.eps / 2 * data, fmt.smallest_subnormal / 2)).all()
    np.testing.assert_array_equal(w["n"], np.arange(3))


def test_scaled_parameters_take_the_format_and_zeros_a_real_scale() -> None:
    w = scale_params(ScaledArray(jnp.asarray(X), 2.0**9))
    assert w.dtype == jnp.float16
    np.testing.assert_allclose(w.value, X * 512, rtol=2**-11, atol=2.0**-24 * 512)
    zeros = scale_params(as_scaled(jnp.zeros(4)))
    assert float(zeros.scale) == 2.0**-8
    np.testing.assert_array_equal(zeros.value, np.zeros(4))


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
def test_zeros_are_trained_from_the_first_update_on(dtype: str, size: float) -> None:
    fmt = format_of(dtype)
    update = jnp.asarray([size, -size])
    w = apply_updates(scale_params(jnp.zeros(2), dtype), update)
    np.testing.assert_allclose(w.value, update, rtol=fmt.eps / 2)
    w = apply_updates(w, jnp.zeros(2))
    assert 0.5 <= rms(w.data) <= 2


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_sum_is_rounded_once(dtype: str) -> None:
    w = scale_params(X, dtype)
    update = jnp.asarray(RNG.normal(size=X.shape), jnp.float32) / 8
    out = apply_updates(w, update)
    exact = (np.asarray(w.value, np.float64) + np.asarray(update, np.float64)) / float(out.scale)
    fmt = format_of(dtype)
    error = np.abs(np.asarray(out.data).astype(np.float64) - exact)
    bound = np.maximum(fmt.eps / 2 * np.abs(exact), fmt.smallest_subnormal / 2)
    assert (error <= bound * (1 + 1e-3) + 2.0**-24).all()  # the sum itself is float32
    assert out.dtype == w.dtype


@pytest.mark.parametrize(("factor", "moves"), [(0.6, False), (1.9, False), (0.3, True), (5, True)])
def test_a_fresh_scale_when_the_rms_has_left_a_half_to_two(factor: float, moves: bool) -> None:
    sign = np.where(X > 0, 1, -1)
    w = ScaledArray(jnp.asarray(sign * factor, jnp.float16), 4.0)
    out = apply_updates(w, jnp.zeros(X.shape))
    np.testing.assert_array_equal(out.value, w.value)
    assert (float(out.scale) != 4.0) == moves
    assert 0.5 <= rms(out.data) <= 2


def test_per_channel_and_block_scales_are_kept_apart() -> None:
    size = np.array([1.0, 16.0, 2.0**-6, 1.0], np.float32)
    w = ScaledArray(jnp.asarray(np.ones((8, 4)) * size), jnp.ones(4))
    out = apply_updates(w, jnp.zeros((8, 4)))
    np.testing.assert_array_equal(out.scale.ravel(), size)
    np.testing.assert_array_equal(out.value, w.value)
    blocks = ScaledArray(jnp.ones((4, 4)), jnp.asarray([[1.0, 8.0]]), block_shape=(4, 2))
    out = apply_updates(blocks, jnp.ones((4, 4)))
    assert out.block_shape == (4, 2)
    np.testing.assert_array_equal(out.value, blocks.value + 1)


def test_large_arrays_are_judged_by_evenly_spaced_rows() -> None:
    w = ScaledArray(jnp.full((3, 700, 100), 64.0, jnp.float16), 1.0)
    assert w.scale == 1
    w = ScaledArray(w.data, jnp.float32(1))
    out = apply_updates(w, jnp.zeros(w.shape))
    assert float(out.scale) == 64.0


@given(power=st.integers(-8, 8), seed=st.integers(0, 2**16))
def test_the_split_into_data_and_scale_changes_no_value(power: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = rng.uniform(0.5, 2, 8) * rng.choice([-1, 1], 8)
    w = ScaledArray(jnp.asarray(data, jnp.float16), jnp.float32(1))
    update = jnp.asarray(rng.normal(size=8) / 64, jnp.float32)
    once = apply_updates(w, update)
    moved = apply_updates(rebalance(w, 2.0**power), update)
    np.testing.assert_array_equal(once.value, moved.value)


def test_small_updates_are_lost_to_nearest_rounding_and_kept_by_stochastic() -> None:
    """512 updates of an eighth of the distance of neighbours, of 4096 weights."""
    n, steps = 4096, 512
    start = ScaledArray(jnp.ones(n, jnp.float16), jnp.float32(1))
    update = jnp.full(n, 2.0**-13)

    def body(w, key):
        return apply_updates(w[0], update), apply_updates(w[1], update, key=key)

    def step(w, key):
        return body(w, key), None

    (nearest, random), _ = jax.lax.scan(
        step, (start, start), jax.random.split(jax.random.key(0), steps)
    )
    np.testing.assert_array_equal(nearest.value, 1.0)
    gained = np.asarray(random.value, np.float64) - 1
    # Each step goes up by 2**-10 with probability 1/8.
    error = 2.0**-10 * np.sqrt(steps * 7 / 64 / n)
    assert abs(gained.mean() - steps * 2.0**-13) < 5 * error


def test_plain_parameters_none_and_infinity() -> None:
    params = {"a": jnp.ones(2, jnp.float16), "b": jnp.arange(2), "c": None, "d": jnp.ones(1)}
    updates = {"a": jnp.full(2, 2.0**-9), "b": jnp.ones(2, int), "c": None, "d": None}
    out = apply_updates(params, updates)
    np.testing.assert_array_equal(out["a"], np.full(2, 1 + 2.0**-9))
    assert out["a"].dtype == jnp.float16
    np.testing.assert_array_equal(out["b"], [1, 2])
    assert out["c"] is None
    np.testing.assert_array_equal(out["d"], 1)
    for dtype in ("float16", "float8_e4m3fn"):
        w = apply_updates(scale_params(jnp.ones(3), dtype), jnp.array([jnp.inf, 0.0, 1.0]))
        np.testing.assert_array_equal(np.isnan(w.value), [True, False, False])
    static = ScaledArray(jnp.ones(3, jnp.bfloat16), 1)
    assert apply_updates(static, jnp.ones(3)).scale == 1


def test_errors() -> None:
    with pytest.raises(ValueError, match="updates must have the structure of params; got"):
        apply_updates({"a": jnp.ones(2)}, [jnp.ones(2)])
    with pytest.raises(ValueError, match="not the special zero; got one that as_scaled made"):
        apply_updates(as_scaled(jnp.zeros(3)), jnp.ones(3))
