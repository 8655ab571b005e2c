"""Optimizers in few bits against themselves in float32.

Gradients are positive and within two binades, so that nothing cancels and nothing is subnormal:
each rounding then moves a moment by at most half the distance of neighbours, and after T steps an
update of any of these rules by at most T times the sum of the two, a first moment by eps / 2 and a
root of a second by eps / 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

from unitscale.core import ScaledArray, format_of, is_scaled, rebalance, to_array
from unitscale.optim import apply_updates, scaled
from unitscale.optim._moments import is_stored, load

STEPS = 6
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.uniform(0.5, 2, (8, 16)), "b": RNG.uniform(0.5, 2, 16)}
PARAMS = {name: jnp.asarray(x, jnp.float32) for name, x in PARAMS.items()}
GRADS = [
    {name: jnp.asarray(RNG.uniform(0.5, 2, x.shape), jnp.float32) for name, x in PARAMS.items()}
    for _ in range(STEPS)
]
STACKED = jax.tree.map(lambda *x: jnp.stack(x), *GRADS)
LABELS = {"w": "matrix", "b": "vector"}
RATE = 0.01

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(RATE),
    "momentum": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(RATE),
    "adamw": lambda: optax.adamw(RATE, weight_decay=0.1),
    "amsgrad": lambda: optax.amsgrad(RATE),
    "lion": lambda: optax.lion(RATE),
    "rmsprop": lambda: optax.rmsprop(RATE),
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=8),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(RATE, 0.0, 10))
    ),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=RATE),
    "masked": lambda: optax.chain(
        optax.masked(optax.trace(0.9), {"w": True, "b": False}), optax.scale(-RATE)
    ),
    "partition": lambda: optax.partition(
        {"matrix": optax.lion(RATE), "vector": optax.adam(RATE)}, LABELS
    ),
    "multi steps": lambda: optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
}
FORMATS = {
    "float32": ("float32", ("float32", "float32"), None),
    "bfloat16": ("bfloat16", ("bfloat16", "bfloat16"), None),
    "6 bytes": ("float16", ("float8_e4m3fn", "float16"), None),
    "4 bytes": ("float16", ("float8_e4m3fn", "float8_e4m3fn"), None),
    "e5m2, blocks": ("float16", ("float8_e5m2", "float8_e4m3fn"), 4),
    "no weights": (None, ("float8_e4m3fn", "float16"), None),
}


@functools.cache
def reference(name: str) -> tuple[Any, Any]:
    """Parameters after all steps in float32, and the sum of the magnitudes of the updates."""
    inner = OPTIMIZERS[name]()
    params, state = PARAMS, inner.init(PARAMS)
    total = jax.tree.map(jnp.zeros_like, params)
    update = jax.jit(inner.update)
    for grads in GRADS:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        total = jax.tree.map(lambda t, u: t + jnp.abs(u), total, updates)
    return params, total


def tolerance(name: str, total: Any, weights: Any, moments: Any) -> Any:
    first, second = (format_of(m).eps / 2 for m in moments)
    half = 0 if weights is None else format_of(weights).eps / 2
    return {
        key: STEPS * (half * 2.5 + (first + second) * 1.1 * np.asarray(total[key])) + 2e-6
        for key in PARAMS
    }


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_near_the_same_optimizer_in_float32(name: str, formats: str) -> None:
    weights, moments, block = FORMATS[formats]
    expected, total = reference(name)
    tx = scaled(OPTIMIZERS[name](), weights=weights, moments=moments, block=block)
    params = tx.scale_params(PARAMS)

    def step(carry, grads):
        return tx.step(*carry, grads), None

    (params, _), _ = jax.jit(jax.lax.scan, static_argnums=0)(
        step, (params, tx.init(params)), STACKED
    )
    within = tolerance(name, total, weights, moments)
    for key, value in to_array(params).items():
        error = np.abs(np.asarray(value, np.float64) - np.asarray(expected[key]))
        assert (error <= within[key]).all(), (key, error.max(), within[key].min())


@pytest.mark.parametrize("name", ["adamw", "partition"])
def test_jit_donation_and_separate_update_are_the_same(name: str) -> None:
    tx = scaled(OPTIMIZERS[name]())
    donated = jax.jit(tx.step, donate_argnums=(0, 1))
    update = jax.jit(tx.update)
    apply = jax.jit(apply_updates)
    one = tx.scale_params(PARAMS)
    two, one_state, two_state = one, tx.init(one), tx.init(one)
    one = jax.tree.map(jnp.copy, one)
    for grads in GRADS:
        old = one
        one, one_state = donated(one, one_state, grads)
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
        updates, two_state = update(grads, two_state, two)
        two = apply(two, updates)
        assert not any(map(is_scaled, jax.tree.leaves(updates, is_leaf=is_scaled)))
    for a, b in zip(jax.tree.leaves(to_array(one)), jax.tree.leaves(to_array(two)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-10)  # a fused sum may round the other way
    assert jax.tree.structure(one_state) == jax.tree.structure(tx.init(one))


def test_arithmetic_is_that_of_inner_on_float32_values() -> None:
    """The update equals that of inner, called with the values of everything."""
    seen = {}

    def record(updates, state, params):
        seen.update(updates=updates, state=state, params=params)
        return updates, state

    spy = optax.GradientTransformation(lambda p: optax.trace(0.9).init(p), record)
    tx = scaled(spy, weights="float16", moments=("float8_e4m3fn", "float16"))
    params = tx.scale_params(PARAMS)
    state = tx.init(params)
    grads = jax.grad(lambda p: jnp.sum(to_array(p)["w"] ** 2))(params)
    tx.update(grads, state, params)
    dtypes = {x.dtype for x in jax.tree.leaves(seen)}
    assert dtypes == {np.dtype("float32")}
    np.testing.assert_allclose(seen["updates"]["w"], 2 * params["w"].value, rtol=2**-10)
    np.testing.assert_array_equal(seen["params"]["b"], params["b"].value)
    np.testing.assert_array_equal(seen["state"].trace["w"], np.zeros((8, 16)))


@settings(max_examples=15)
@given(powers=st.lists(st.integers(-6, 6), min_size=3, max_size=3), name=st.sampled_from(["adamw"]))
def test_a_rescale_of_weights_never_changes_the_values(powers: list[int], name: str) -> None:
    """Rebalanced between steps, with cotangents of data as gradients."""
    still, moved = trajectory(name, (0, 0, 0)), trajectory(name, tuple(powers))
    for (params, state), (others, other_state) in zip(still, moved, strict=True):
        jax.tree.map(np.testing.assert_array_equal, to_array(params), to_array(others))
        jax.tree.map(np.testing.assert_array_equal, state, other_state)


def trajectory(name: str, powers: tuple[int, ...]) -> list[Any]:
    tx, step = make_trajectory(name)
    params = tx.scale_params(PARAMS)
    state, seen = tx.init(params), []
    for power, slope in zip(powers, GRADS, strict=False):
        params = {k: rebalance(w, 2.0**power) for k, w in params.items()}
        params, state = step(params, state, slope)
        seen.append((params, state))
    return seen


@functools.cache
def make_trajectory(name: str) -> Any:
    tx = scaled(OPTIMIZERS[name]())

    @jax.jit
    def step(params, state, slope):
        def loss(params):
            values = to_array(params)
            return sum(jnp.vdot(slope[k], values[k]) for k in values)

        return tx.step(params, state, jax.grad(loss)(params))

    return tx, step


def test_stochastic_rounding_has_a_key_of_its_own() -> None:
    def run(key, seeds=1):
        tx = scaled(optax.adam(RATE), rounding="stochastic", key=key)
        params = tx.scale_params(PARAMS)
        state = tx.init(params)
        return tx.step(params, state, GRADS[0]), state

    (one, one_state), start = run(0)
    (again, _), _ = run(jax.random.key(0))
    (other, _), _ = run(1)
    np.testing.assert_array_equal(one["w"].data, again["w"].data)
    assert (np.asarray(one["w"].data) != np.asarray(other["w"].data)).any()
    assert (jax.random.key_data(one_state.key) != jax.random.key_data(start.key)).any()
    assert scaled(optax.adam(RATE)).init(one).key is None


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_an_8_bit_second_moment_follows_its_mean_only_if_rounded_at_random(rounding: str) -> None:
    """From 1 down to gradients of 1/4: to nearest, b2 = 0.95 moves e4m3 roots no step down."""
    inner = optax.scale_by_rms(decay=0.95, initial_scale=1.0)
    tx = scaled(inner, weights=None, moments=(None, "float8_e4m3fn"), rounding=rounding)
    params = jnp.ones(4096)
    state = tx.init(params)
    grads = jnp.full(4096, 0.25)
    steps = 200

    def step(state, _):
        return tx.update(grads, state, params)[1], None

    state, _ = jax.jit(lambda s: jax.lax.scan(step, s, None, length=steps))(state)
    mean = float(jnp.mean(state.inner.nu.value))
    if rounding == "nearest":
        assert mean == 1.0
    else:
        # The root is unbiased, its square by the variance of one rounding over 1 - b2: (eps / 2)^2
        # / 2 at most, relative to the square, each step.
        assert 0.0625 < mean < 0.0625 * (1 + (2**-3) ** 2 / 2 / 0.05)


def test_bytes_per_parameter() -> None:
    params = {"w": jnp.ones((512, 512)), "b": jnp.ones(512)}
    count = 512 * 513
    for moments, expected in [
        (("float8_e4m3fn", "float16"), 5),
        (("float8_e4m3fn", "float8_e4m3fn"), 4),
    ]:
        tx = scaled(optax.adamw(RATE), moments=moments)
        state = tx.scale_params(params)
        total = sum(x.nbytes for x in jax.tree.leaves((state, tx.init(state))))
        assert 0 <= total - expected * count <= 64  # scales and the count


def test_state_follows_the_sharding_of_params() -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"w": P("x", "y"), "b": P("y")}
    sharding = {k: NamedSharding(mesh, s) for k, s in specs.items()}
    tx = scaled(optax.adamw(RATE), rounding="nearest")
    step = jax.jit(tx.step, donate_argnums=(0, 1))
    params = tx.scale_params(jax.device_put(PARAMS, sharding))
    state = tx.init(params)
    alone = tx.scale_params(PARAMS)
    alone_state = tx.init(alone)
    for grads in GRADS[:3]:
        for key, spec in sharding.items():
            (adam, *_) = state.inner
            for stored in (params[key], adam.mu[key], adam.nu[key].root):
                assert stored.data.sharding.is_equivalent_to(spec, stored.ndim), (key, stored)
        params, state = step(params, state, jax.device_put(grads, sharding))
        alone, alone_state = tx.step(alone, alone_state, grads)
    for a, b in zip(
        jax.tree.leaves(to_array(params)), jax.tree.leaves(to_array(alone)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2**-10)


def test_muon_is_that_of_its_stored_momentum() -> None:
    """Its polynomial amplifies small singular values, so the bound of the table is not for it."""
    inner = optax.contrib.muon(RATE)
    tx = scaled(inner)
    params = tx.scale_params(PARAMS)
    _, state = tx.update(GRADS[0], tx.init(params), params)
    momenta = [x for x in jax.tree.leaves(state.inner, is_leaf=is_stored) if is_stored(x)]
    assert {"w", "b"} == {"w" if x.shape == (8, 16) else "b" for x in momenta}
    assert all(x.nbytes < 2 * np.prod(x.shape) + 8 for x in momenta)
    updates, _ = tx.update(GRADS[1], state, params)
    values = jax.tree.map(load, state.inner, is_leaf=is_stored)
    expected, _ = inner.update(GRADS[1], values, to_array(params, jnp.float32))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates, expected)


def test_accumulated_cotangents_are_their_sum() -> None:
    """MultiSteps sees values: a scale that moves between microbatches changes nothing."""
    tx = scaled(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())
    w = tx.scale_params(jnp.full(4, 2.0))
    state = tx.init(w)
    for power in (3, -5):
        w = rebalance(w, 2.0**power)
        grads = jax.grad(lambda w: jnp.sum(w.value * jnp.array([0.25, 0.5, 1.0, 0.0])))(w)
        w, state = tx.step(w, state, grads)
    np.testing.assert_array_equal(w.value, 2 - np.array([0.25, 0.5, 1.0, 0.0]))


def test_extra_arguments_reach_inner() -> None:
    def update(updates, state, params=None, *, times, **_):
        return jax.tree.map(lambda u: times * u, updates), state

    tx = scaled(optax.GradientTransformationExtraArgs(lambda params: (), update))
    params = tx.scale_params(PARAMS)
    updates, _ = tx.update(GRADS[0], tx.init(params), params, times=4.0)
    np.testing.assert_array_equal(updates["w"], 4 * GRADS[0]["w"])
    adam = scaled(optax.adam(RATE))
    chain = optax.chain(adam, optax.identity())
    chain.update(GRADS[0], chain.init(params), params, value=1.0)


def test_loaded_state_is_the_inner_state() -> None:
    tx = scaled(optax.adam(RATE), moments=("float32", "float32"))
    params = tx.scale_params(PARAMS)
    _, state = tx.update(GRADS[0], tx.init(params), params)
    plain = optax.adam(RATE)
    _, expected = plain.update(GRADS[0], plain.init(PARAMS), PARAMS)
    found = jax.tree.map(load, state.inner, is_leaf=is_stored)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_errors() -> None:
    adam = optax.adam(RATE)
    with pytest.raises(TypeError, match=r"scaled: inner must be an optax transformation, with"):
        scaled(optax.adam)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="rounding must be 'nearest' or 'stochastic'; got 'up'"):
        scaled(adam, rounding="up")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="scaled: weights must be a float8, float16, bfloat16"):
        scaled(adam, weights="float64")
    tx = scaled(adam)
    with pytest.raises(ValueError, match=r"params must hold ScaledArrays; got plain arrays only"):
        tx.init(PARAMS)
    params = tx.scale_params(PARAMS)
    with pytest.raises(ValueError, match=r"update needs params, .* got None"):
        tx.update(GRADS[0], tx.init(params))
    with pytest.raises(ValueError, match="gradients must have the structure of params"):
        tx.update({"w": GRADS[0]["w"]}, tx.init(params), params)
    assert isinstance(params["w"], ScaledArray)
