"""Optimizers in few bits against themselves in float32.

Gradients are positive and within two binades, so that nothing cancels and nothing is subnormal:
each rounding then moves a moment by at most half the distance of neighbours, and after T steps an
update of any of these rules by at most T times the sum of the two, a first moment by eps / 2 and a
root of a second by eps / 2.
"""

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

import unitscale
from tests.batching import compute
from tests.optimizers import scaled
from unitscale.core import ScaledArray, format_of, is_scaled, rebalance, to_array
from unitscale.optim import apply_updates
from unitscale.optim._storage import is_stored, load

STEPS = 6
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.uniform(0.5, 2, (8, 16)), "b": RNG.uniform(0.5, 2, 16)}
PARAMS = {name: jnp.asarray(x, jnp.float32) for name, x in PARAMS.items()}
GRADS = [
    {name: jnp.asarray(RNG.uniform(0.5, 2, x.shape), jnp.float32) for name, x in PARAMS.items()}
    for _ in range(STEPS)
]
STACKED = jax.tree.map(lambda *x: np.stack(x), *GRADS)
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


# Every optimizer in what most use and in blocks, and those whose states are unlike in all formats.
EVERYWHERE = ("momentum", "adam", "partition")
COMMON = ("6 bytes", "e5m2, blocks")


def reference(name: str) -> Callable[..., Any]:
    """Parameters after all steps in float32, and the sum of the magnitudes of the updates."""
    inner = OPTIMIZERS[name]()

    def step(carry, grads):
        params, state, total = carry
        updates, state = inner.update(grads, state, params)
        total = jax.tree.map(lambda t, u: t + jnp.abs(u), total, updates)
        return (optax.apply_updates(params, updates), state, total), None

    def run(params, stacked):
        start = params, inner.init(params), jax.tree.map(jnp.zeros_like, params)
        (params, _, total), _ = jax.lax.scan(step, start, stacked)
        return params, total

    return run


def in_formats(name: str, formats: str) -> Callable[..., Any]:
    weights, moments, block = FORMATS[formats]
    tx = scaled(OPTIMIZERS[name](), weights=weights, moments=moments, block=block)

    def run(params, stacked):
        params = tx.scale_params(params)
        start = params, tx.init(params)
        (params, _), _ = jax.lax.scan(lambda c, g: (tx.step(*c, g), None), start, stacked)
        return to_array(params)

    return run


def test_a_state_may_gain_arrays() -> None:
    tx = scaled(optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.sgd(RATE, 0.9)))
    params, state = begin(tx, {"w": jnp.ones(4)})
    _, state = jax.jit(tx.step)(params, state, {"w": jnp.ones(4)})
    assert float(optax.tree.get(state, "norm")) == 2.0
    assert optax.tree.get(state, "trace")["w"].dtype == jnp.float16


def begin(tx: Any, params: Any = PARAMS) -> tuple[Any, Any]:
    """Parameters in the format of `tx`, and its first state."""

    @jax.jit
    def make(params):
        params = tx.scale_params(params)
        return params, tx.init(params)

    return make(params)


def value(w: ScaledArray) -> np.ndarray:
    """In NumPy, which compiles nothing."""
    return np.asarray(w.data, np.float32) * np.asarray(w.scale)


def tolerance(total: Any, weights: Any, moments: Any) -> Any:
    first, second = (format_of(m).eps / 2 for m in moments)
    half = 0 if weights is None else format_of(weights).eps / 2
    return {
        key: STEPS * (half * 2.5 + (first + second) * 1.1 * np.asarray(total[key])) + 2e-6
        for key in PARAMS
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_near_the_same_optimizer_in_float32(name: str) -> None:
    programs = {f: in_formats(name, f) for f in (FORMATS if name in EVERYWHERE else COMMON)}
    programs["reference"] = reference(name)
    results = compute({f: (program, PARAMS, STACKED) for f, program in programs.items()})
    expected, total = results.pop("reference")
    for formats, found in results.items():
        within = tolerance(total, *FORMATS[formats][:2])
        for key, value in found.items():
            error = np.abs(np.asarray(value, np.float64) - np.asarray(expected[key]))
            assert (error <= within[key]).all(), (formats, key, error.max(), within[key].min())


@pytest.mark.parametrize("name", ["adamw", "partition"])
def test_jit_donation_and_separate_update_are_the_same(name: str) -> None:
    tx = scaled(OPTIMIZERS[name]())
    donated = jax.jit(tx.step, donate_argnums=(0, 1))
    update = jax.jit(tx.update)
    apply = jax.jit(apply_updates)
    two, two_state = begin(tx)
    one, one_state = begin(tx)
    for grads in GRADS[:3]:
        old = one
        one, one_state = donated(one, one_state, grads)
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
        updates, two_state = update(grads, two_state, two)
        two = apply(two, updates)
        assert not any(map(is_scaled, jax.tree.leaves(updates, is_leaf=is_scaled)))
    for key, w in one.items():  # a fused sum may round the other way
        np.testing.assert_allclose(value(w), value(two[key]), rtol=2**-10)
    assert jax.tree.structure(one_state) == jax.tree.structure(two_state)


def test_arithmetic_is_that_of_inner_on_float32_values() -> None:
    """The update equals that of inner, called with the values of everything."""
    seen = {}

    def record(updates, state, params):
        seen.update(updates=updates, state=state, params=params)
        return updates, state

    spy = optax.GradientTransformation(lambda p: optax.trace(0.9).init(p), record)
    tx = scaled(spy, weights="float16", moments=("float8_e4m3fn", "float16"))
    params, state = begin(tx)

    @jax.jit
    def step(params, state):
        tx.update(unitscale.grad(lambda p: jnp.sum(to_array(p)["w"] ** 2))(params), state, params)
        return dict(seen)

    seen = step(params, state)
    dtypes = {x.dtype for x in jax.tree.leaves(seen)}
    assert dtypes == {np.dtype("float32")}
    np.testing.assert_allclose(seen["updates"]["w"], 2 * params["w"].value, rtol=2**-10)
    np.testing.assert_array_equal(seen["params"]["b"], params["b"].value)
    np.testing.assert_array_equal(seen["state"].trace["w"], np.zeros((8, 16)))


@settings(max_examples=8)
@given(powers=st.tuples(*[st.integers(-6, 6)] * 3))
def test_a_rescale_of_weights_never_changes_the_values(powers: tuple[int, ...]) -> None:
    """Rebalanced between steps, with cotangents of data as gradients."""
    still, moved = trajectory((0, 0, 0)), trajectory(powers)
    for (params, state), (others, other_state) in zip(still, moved, strict=True):
        for key, w in params.items():
            np.testing.assert_array_equal(value(w), value(others[key]))
        jax.tree.map(np.testing.assert_array_equal, state, other_state)


@functools.cache
def trajectory(powers: tuple[int, ...]) -> list[Any]:
    start, step = make_trajectory()
    (params, state), seen = start, []
    for power, slope in zip(powers, GRADS, strict=False):
        params, state = step(params, state, slope, 2.0**power)
        seen.append((params, state))
    return seen


@functools.cache
def make_trajectory() -> Any:
    tx = scaled(OPTIMIZERS["adamw"]())

    @jax.jit
    def step(params, state, slope, factor):
        params = {k: rebalance(w, factor) for k, w in params.items()}

        def loss(params):
            values = to_array(params)
            return sum(jnp.vdot(slope[k], values[k]) for k in values)

        return tx.step(params, state, unitscale.grad(loss)(params))

    return begin(tx), step


def test_stochastic_rounding_has_a_key_of_its_own() -> None:
    def run(key):
        tx = scaled(optax.adam(RATE), rounding="stochastic", key=key)
        params = tx.scale_params(PARAMS)
        state = tx.init(params)
        return tx.step(params, state, GRADS[0]), state

    keys = (0, 1, jax.random.key(0))
    results = compute({i: (functools.partial(run, key),) for i, key in enumerate(keys)})
    ((one, one_state), start), ((other, _), _), ((again, _), _) = results.values()
    np.testing.assert_array_equal(one["w"].data, again["w"].data)
    assert (np.asarray(one["w"].data) != np.asarray(other["w"].data)).any()
    assert (jax.random.key_data(one_state.key) != jax.random.key_data(start.key)).any()
    assert jax.eval_shape(scaled(optax.adam(RATE)).init, one).key is None


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_an_8_bit_second_moment_follows_its_mean_only_if_rounded_at_random(rounding: str) -> None:
    """From 1 down to gradients of 1/4: to nearest, b2 = 0.95 moves e4m3 roots no step down."""
    inner = optax.scale_by_rms(decay=0.95, initial_scale=1.0)
    tx = scaled(inner, weights=None, moments=(None, "float8_e4m3fn"), rounding=rounding)
    params, grads = np.ones(4096, np.float32), np.full(4096, 0.25, np.float32)

    def step(state, _):
        return tx.update(grads, state, params)[1], None

    state, _ = jax.jit(lambda: jax.lax.scan(step, tx.init(params), None, length=200))()
    mean = float(jnp.mean(state.inner.nu.value))
    if rounding == "nearest":
        assert mean == 1.0
    else:
        # The root is unbiased, its square by the variance of one rounding over 1 - b2: (eps / 2)^2
        # / 2 at most, relative to the square, each step.
        assert 0.0625 < mean < 0.0625 * (1 + (2**-3) ** 2 / 2 / 0.05)


def test_bytes_per_parameter() -> None:
    params = {"w": np.ones((512, 512), np.float32), "b": np.ones(512, np.float32)}
    count = 512 * 513
    for second, expected in (("float16", 5), ("float8_e4m3fn", 4)):
        tx = scaled(optax.adamw(RATE), moments=("float8_e4m3fn", second))
        kept = jax.eval_shape(lambda p, tx=tx: (p := tx.scale_params(p), tx.init(p)), params)
        total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
        assert 0 <= total - expected * count <= 64  # scales and the count


def test_state_follows_the_sharding_of_params() -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("x", "y"))
    tx = scaled(optax.adamw(RATE), rounding="nearest")
    step = jax.jit(tx.step, donate_argnums=(0, 1))
    params = tx.scale_params(jax.device_put(PARAMS["w"], sharding))
    state = tx.init(params)
    alone, alone_state = begin(tx, PARAMS["w"])
    for grads in (GRADS[0]["w"], GRADS[1]["w"]):
        for stored in (params, state.inner[0].mu, state.inner[0].nu.root):
            assert stored.data.sharding.is_equivalent_to(sharding, stored.ndim), stored
        params, state = step(params, state, jax.device_put(grads, sharding))
        alone, alone_state = step(alone, alone_state, grads)
    np.testing.assert_allclose(value(params), value(alone), rtol=2**-10)


def test_muon_is_that_of_its_stored_momentum() -> None:
    """Its polynomial amplifies small singular values, so the bound of the table is not for it."""
    inner = optax.contrib.muon(RATE)
    tx = scaled(inner)
    params, state = begin(tx)
    update = jax.jit(tx.update)
    _, state = update(GRADS[0], state, params)
    momenta = [x for x in jax.tree.leaves(state.inner, is_leaf=is_stored) if is_stored(x)]
    assert {"w", "b"} == {"w" if x.shape == (8, 16) else "b" for x in momenta}
    assert all(x.nbytes < 2 * np.prod(x.shape) + 8 for x in momenta)
    updates, _ = update(GRADS[1], state, params)

    @jax.jit
    def inner_update(state, params):
        values = jax.tree.map(load, state.inner, is_leaf=is_stored)
        return inner.update(GRADS[1], values, to_array(params, jnp.float32))

    expected, _ = inner_update(state, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates, expected)


def test_accumulated_cotangents_are_their_sum() -> None:
    """MultiSteps sees values: a scale that moves between microbatches changes nothing."""
    tx = scaled(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())
    w, state = begin(tx, np.full(4, 2.0, np.float32))

    @jax.jit
    def step(w, state, factor):
        w = rebalance(w, factor)
        grads = unitscale.grad(lambda w: jnp.sum(w.value * jnp.array([0.25, 0.5, 1.0, 0.0])))(w)
        return tx.step(w, state, grads)

    for power in (3, -5):
        w, state = step(w, state, 2.0**power)
    np.testing.assert_array_equal(w.value, 2 - np.array([0.25, 0.5, 1.0, 0.0]))


def test_extra_arguments_reach_inner() -> None:
    def update(updates, state, params=None, *, times, **_):
        return jax.tree.map(lambda u: times * u, updates), state

    tx = scaled(optax.GradientTransformationExtraArgs(lambda params: (), update))
    params, state = begin(tx)
    updates, _ = jax.jit(tx.update)(GRADS[0], state, params, times=4.0)
    np.testing.assert_array_equal(updates["w"], 4 * GRADS[0]["w"])
    chain = optax.chain(scaled(optax.adam(RATE)), optax.identity())
    state = jax.eval_shape(chain.init, params)
    jax.eval_shape(chain.update, GRADS[0], state, params, value=1.0)


def test_loaded_state_is_the_inner_state() -> None:
    tx = scaled(optax.adam(RATE), moments=("float32", "float32"))
    plain = optax.adam(RATE)

    @jax.jit
    def both(params, grads):
        _, state = tx.update(grads, tx.init(params), params)
        found = jax.tree.map(load, state.inner, is_leaf=is_stored)
        return found, plain.update(grads, plain.init(PARAMS), PARAMS)[1]

    found, expected = both(begin(tx)[0], GRADS[0])
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
    params, state = begin(tx)
    with pytest.raises(ValueError, match=r"update needs params, .* got None"):
        tx.update(GRADS[0], state)
    with pytest.raises(ValueError, match="gradients must have the structure of params"):
        tx.update({"w": GRADS[0]["w"]}, state, params)


def test_moments_of_a_stack_have_the_scales_of_its_items() -> None:
    """Layers whose gradients are 2^24 apart: one scale would lose the smallest in E4M3."""
    sizes = jnp.float32([1, 2.0**12, 2.0**-12])[:, None, None]
    params = {"w": sizes * PARAMS["w"]}
    gradient = {"w": sizes * GRADS[0]["w"]}

    @jax.jit
    def run(params, gradient):
        tx, plain = scaled(optax.adam(RATE)), optax.adam(RATE)
        ours = tx.scale_params(params)
        updates, state = tx.update(gradient, tx.init(ours), ours)
        return updates, state, plain.update(gradient, plain.init(params), params)[0]

    updates, state, expected = run(params, gradient)
    adam = state.inner[0]
    assert adam.mu["w"].scale.shape == adam.nu["w"].root.scale.shape == (3, 1, 1)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)
    read = load(adam.mu["w"])
    np.testing.assert_allclose(read, 0.1 * gradient["w"], rtol=float(format_of("e4m3fn").eps) / 2)


def test_a_step_under_strict_promotion() -> None:
    with jax.numpy_dtype_promotion("strict"):
        tx = scaled(optax.adam(RATE))
        params = tx.scale_params(PARAMS)
        params, state = tx.step(params, tx.init(params), GRADS[0])
    assert is_stored(state.inner[0].mu["w"])
