"""Optimizers with 16- and 8-bit state against the same optimizers in float32.

Gradients are positive and within two binades, so that nothing cancels or is subnormal. Then each
rounding changes a moment, or the root of a second moment, by at most eps / 2, relative to it. After
T steps, an update of any of these rules is off by at most T times the sum of the two.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec as P

import unitscale
from tests.batching import compute
from tests.exported import assert_computes_the_same
from tests.optimizers import scaled
from tests.refusals import refuses
from unitscale import optim
from unitscale.core import ScaledArray, format_of, is_scaled, to_array
from unitscale.optim import apply_updates, skip_nonfinite
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
    "adam": lambda: optax.adam(RATE),
    "partition": lambda: optax.partition(
        {"matrix": optax.lion(RATE), "vector": optax.adam(RATE)}, LABELS
    ),
    "muon": lambda: optax.contrib.muon(RATE),
}
FORMATS = {
    "float32": ("float32", ("float32", "float32"), None),
    "bfloat16": ("bfloat16", ("bfloat16", "bfloat16"), None),
    "6 bytes": ("float16", ("float8_e4m3fn", "float16"), None),
    "4 bytes": ("float16", ("float8_e4m3fn", "float8_e4m3fn"), None),
    "e5m2, blocks": ("float16", ("float8_e5m2", "float8_e4m3fn"), 4),
    "no weights": (None, ("float8_e4m3fn", "float16"), None),
}
# Adam in all formats, Muon, whose updates are no bounded function of a moment's error, exactly.
TESTED = {"adam": (*FORMATS,), "muon": ("float32",), "partition": ("6 bytes", "e5m2, blocks")}


def reference(name: str) -> Callable[..., Any]:
    """Return the parameters after all steps in float32, and the summed magnitudes of updates."""
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
    """Return parameters in the format of `tx`, and its initial state."""

    @jax.jit
    def make(params):
        params = tx.scale_params(params)
        return params, tx.init(params)

    return make(params)


def value(w: ScaledArray) -> np.ndarray:
    """Convert to float32 in NumPy, without compiling."""
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
    check_formats(name)


def check_formats(name: str) -> None:
    programs = {f: in_formats(name, f) for f in TESTED[name]}
    programs["reference"] = reference(name)
    results = compute({f: (program, PARAMS, STACKED) for f, program in programs.items()})
    expected, total = results.pop("reference")
    for formats, found in results.items():
        within = tolerance(total, *FORMATS[formats][:2])
        for key, value in found.items():
            error = np.abs(np.asarray(value, np.float64) - np.asarray(expected[key]))
            assert (error <= within[key]).all(), (formats, key, error.max(), within[key].min())


def test_jit_donation_and_separate_update_are_the_same() -> None:
    tx = scaled(OPTIMIZERS["partition"]())
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
    """The update equals that of the inner optimizer, called with float32 values."""
    seen = {}

    def record(updates, state, params):
        seen.update(updates=updates, state=state, params=params)
        return updates, state

    spy = optax.GradientTransformation(lambda p: optax.trace(0.9).init(p), record)
    tx = scaled(spy, weights="float16", moments=("float8_e4m3fn", "float16"))
    params, state = begin(tx)

    @jax.jit
    def step(params, state):
        grads = unitscale.grad(lambda p: jnp.sum(to_array(p)["w"] ** 2))(params)
        tx.update(grads | {"b": jnp.full(16, 0.5, jnp.bfloat16)}, state, params)
        return dict(seen)

    seen = step(params, state)
    dtypes = {x.dtype for x in jax.tree.leaves(seen)}
    assert dtypes == {np.dtype("float32")}
    np.testing.assert_allclose(seen["updates"]["w"], 2 * params["w"].value, rtol=2**-10)
    np.testing.assert_array_equal(seen["updates"]["b"], 0.5)
    np.testing.assert_array_equal(seen["params"]["b"], params["b"].value)
    np.testing.assert_array_equal(seen["state"].trace["w"], np.zeros((8, 16)))


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
    """Gradients fall from 1 to 1/4: with b2 = 0.95, E4M3 roots rounded to nearest stay at 1."""
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


@pytest.mark.slow
def test_scales_chosen_together_on_a_gpu_are_those_chosen_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More layers than one group holds, with some arrays large enough to be sampled."""
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 8), "large": (130, 512), "bias": (8,), "stack": (2, 4, 8)}
    params = {
        f"layer{i}": {
            name: jnp.asarray(2.0 ** rng.integers(-6, 6) * rng.normal(size=shape), jnp.float32)
            for name, shape in shapes.items()
            if name == "w" or i < 2
        }
        for i in range(18)
    }
    grads = [jax.tree.map(lambda x, k=k: x**2 * 4.0**k, params) for k in range(3)]

    def run() -> Any:
        tx = scaled(optax.adamw(RATE), rounding="stochastic")
        own, step = tx.scale_params(params), jax.jit(tx.step)
        state = tx.init(own)
        for gradient in grads:
            own, state = step(own, state, gradient)
        return jax.tree.map(np.asarray, (own, state.inner))

    alone = run()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.tree.map(np.testing.assert_array_equal, run(), alone)


def test_bytes_per_parameter() -> None:
    params = {"w": np.ones((512, 512), np.float32), "b": np.ones(512, np.float32)}
    count = 512 * 513
    for second, expected in (("float16", 5), ("float8_e4m3fn", 4)):
        tx = scaled(optax.adamw(RATE), moments=("float8_e4m3fn", second))
        kept = jax.eval_shape(lambda p, tx=tx: (p := tx.scale_params(p), tx.init(p)), params)
        total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
        assert 0 <= total - expected * count <= 64  # scales and the count


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


def test_moments_of_a_stack_have_the_scales_of_its_items() -> None:
    """Gradients of layers differ by 2^24: with one scale, E4M3 would lose the smallest."""
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


def test_small_parameters_and_moments_stay_in_float32() -> None:
    """In bfloat16, updates of a gain by 2^-10 would be lost."""
    shapes = {"kernel": (64, 64), "thin": (63, 65), "gain": (), "scaled": (64,), "few": (64,)}
    grads = {name: jnp.full(s, 0.5) for name, s in shapes.items()}
    params = {name: jnp.ones(s) for name, s in shapes.items()} | {
        "few": jnp.ones(64, jnp.bfloat16),
        "scaled": ScaledArray(jnp.full(64, 0.5, jnp.float8_e4m3fn), 2.0),
    }
    plain, tx = optax.adamw(2.0**-10), optim.scaled(optax.adamw(2.0**-10))
    ours, wide = tx.scale_params(params), to_array(params, jnp.float32)
    wide["few"] = jnp.ones(64)
    ours, state = jax.jit(tx.step)(ours, tx.init(ours), grads)
    updates, inner = plain.update(grads, plain.init(wide), wide)
    for name in ("thin", "gain", "scaled", "few"):
        assert ours[name].dtype == state.inner[0].mu[name].dtype == jnp.float32
        np.testing.assert_allclose(ours[name], wide[name] + updates[name], rtol=1e-6)
        np.testing.assert_allclose(state.inner[0].nu[name], inner[0].nu[name], rtol=1e-6)
    assert ours["kernel"].dtype == jnp.float16
    assert all(is_stored(moment["kernel"]) for moment in state.inner[0][1:])
    assert tx.scale_params(jnp.arange(3)).dtype == jnp.int32
    sizes = optim.scaled(plain, min_size=4097).scale_params(params)
    assert not any(map(is_scaled, sizes.values()))
    assert all(sizes[name] is not x for name, x in params.items())  # a step may donate them
    jax.jit(lambda p: p, donate_argnums=0)(sizes)
    assert not params["thin"].is_deleted()
    # Stacked vectors count one by one.
    stack = {"gain": jnp.ones((3, 2048)), "kernel": jnp.ones((3, 64, 64))}
    stack = scaled(plain, min_size=4096).scale_params(stack, stack_axes=1)
    state = scaled(plain, min_size=4096).init(stack)
    assert is_scaled(stack["kernel"])
    assert is_stored(state.inner[0].mu["kernel"])
    assert stack["gain"].dtype == state.inner[0].mu["gain"].dtype == jnp.float32


def test_sharded_state_under_strict_promotion() -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("x", "y"))
    tx, grads = scaled(optax.adamw(RATE)), GRADS[0]["w"]
    with jax.numpy_dtype_promotion("strict"):
        params = tx.scale_params(jax.device_put(PARAMS["w"], sharding))
        step = jax.jit(tx.step)
        params, state = step(params, tx.init(params), jax.device_put(grads, sharding))
    for stored in (params, state.inner[0].mu, state.inner[0].nu.root):
        assert stored.data.sharding.is_equivalent_to(sharding, stored.ndim), stored
    alone, _ = step(*begin(tx, PARAMS["w"]), grads)
    np.testing.assert_allclose(value(params), value(alone), rtol=2**-10)


GOOD = GRADS[0]
INNERS = {
    "optax": lambda: optax.adam(0.1),
    "stochastic": lambda: scaled(optax.adam(0.1), rounding="stochastic"),
}


def bad(value: float):
    w = np.array(GOOD["w"])
    w[2] = value
    return {**GOOD, "w": w}


@pytest.mark.parametrize("name", INNERS)
def test_a_bad_step_changes_nothing_and_is_counted(name: str) -> None:
    """A good step equals that of the inner optimizer."""
    inner = INNERS[name]()
    tx = skip_nonfinite(inner)
    step = jax.jit(tx.step)

    @jax.jit
    def first(grads):
        params = tx.scale_params(PARAMS)
        if name == "optax":
            updates, state = inner.update(grads, inner.init(params), params)
            expected = optax.apply_updates(params, updates), state
        else:
            expected = inner.step(params, inner.init(params), grads)
        return tx.step(params, tx.init(params), grads), expected

    (params, state), expected = first(GOOD)
    chex.assert_trees_all_equal((params, state.inner), expected)
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    chex.assert_trees_all_equal(tx.update(bad(np.inf), state, params)[0], zeros)
    for count, value in enumerate((np.nan, np.inf, -np.inf), 1):
        after, state_after = step(params, state, bad(value))
        chex.assert_trees_all_equal((after, state_after.inner), (params, state.inner))
        assert (int(state_after.skipped), int(state_after.consecutive)) == (count, count)
        state = state_after
    _, state = step(params, state, GOOD)
    assert (int(state.skipped), int(state.consecutive)) == (3, 0)
    alone, z = skip_nonfinite(optax.sgd(0.1)), np.ones(2, np.complex64)
    assert alone.update(z * np.nan, alone.init(z), z)[1].skipped == 1


SQUARE = np.arange(64.0, dtype=np.float32).reshape(8, 8)
SGD = scaled(optax.sgd(1.0), weights=None)


def by_sgd(grads: jax.Array) -> jax.Array:
    return SGD.update(grads, SGD.init(SQUARE), SQUARE)[0]


def test_one_device_has_the_constraint() -> None:
    lowered = jax.jit(lambda x: by_sgd(x @ x.T)).lower(jnp.asarray(SQUARE))
    assert "LayoutConstraint" in lowered.as_text()


def test_sharded_arrays_are_not_gathered() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))
    program = jax.jit(lambda x: by_sgd(2 * x), out_shardings=sharding)
    compiled = program.lower(jax.device_put(SQUARE, sharding)).compile().as_text() or ""
    assert "all-gather" not in compiled


def test_it_is_the_identity_under_every_transformation() -> None:
    np.testing.assert_array_equal(by_sgd(SQUARE), -SQUARE)
    np.testing.assert_array_equal(
        jax.vmap(jax.jit(by_sgd), 1, 1)(np.stack([SQUARE, SQUARE], 1))[:, 0], -SQUARE
    )
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(by_sgd(x) * SQUARE))(SQUARE), -SQUARE)


def test_a_step_is_read_with_its_state() -> None:
    tx = optim.skip_nonfinite(scaled(optax.adamw(0.1)))
    params = tx.scale_params({"w": jnp.ones((4, 8))})
    state, grads = tx.init(params), {"w": jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)}
    for kind in (optax.ScaleByAdamState, optax.EmptyState):
        export.register_namedtuple_serialization(kind, serialized_name=f"optax.{kind.__name__}")
    allowed = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
    assert_computes_the_same(tx.step, params, state, grads, disabled_checks=allowed)


def update_with(grads: Any, params: Any = None) -> None:
    tx, own = scaled(optax.sgd(1.0)), {"w": ScaledArray(jnp.ones((4, 6)), 4.0), "b": jnp.ones(3)}
    tx.update(grads, tx.init(own), own if params is None else None)


def first_step_of(inner: Any, **settings: Any) -> None:
    tx = scaled(inner, **settings)
    jax.eval_shape(lambda p: tx.init(tx.scale_params(p)), PARAMS)


BY_DATA = {"w": ScaledArray(jnp.ones((4, 6)), 1.0), "b": jnp.ones(3)}
ADAM, NOTE = optax.adam(RATE), optax.GradientTransformation(lambda p: {"n": "x"}, lambda *a: a)
ANY: Any = optim  # as wrong types are given
OTHER = optax.sgd(0.1, momentum=0.9).init(PARAMS), ADAM.init({**PARAMS, "b": jnp.ones(5)})
WRONG: list[tuple[str, Callable[[], Any]]] = [
    ("scaled: inner", lambda: ANY.scaled(optax.adam)),
    ("scaled: inner", lambda: ANY.scaled(SimpleNamespace(init=len))),
    ("skip_nonfinite: inner", lambda: ANY.skip_nonfinite(optax.adam)),
    ("rounding", lambda: ANY.scaled(ADAM, rounding="up")),
    ("weights", lambda: scaled(ADAM, weights="float64")),
    ("min_size", lambda: scaled(ADAM, min_size=-1)),
    ("min_size", lambda: ANY.scaled(ADAM, min_size=0.5)),
    ("moments", lambda: ANY.scaled(ADAM, moments="float16")),
    ("moments", lambda: ANY.scaled(ADAM, moments=("float16",))),
    ("second moment", lambda: scaled(ADAM, moments=(None, optim.Moment("float8_e4m3fn")))),
    (
        r"moments of 0\.nu\.b",
        lambda: first_step_of(ADAM, moments=lambda *_: optim.Moment("float8_e5m2")),
    ),
    (r"str at n\.", lambda: first_step_of(NOTE)),
    ("DoGState", lambda: first_step_of(optax.contrib.dog(1.0))),
    ("weights in bfloat16", lambda: first_step_of(optax.contrib.prodigy(), weights="bfloat16")),
    ("params", lambda: scaled(ADAM).init(PARAMS)),
    ("params", lambda: update_with({"w": jnp.ones((4, 6)), "b": jnp.ones(3)}, 0)),
    ("gradients", lambda: update_with({"w": jnp.ones((4, 6))})),
    (r"grads\['w'\]", lambda: update_with({"w": jnp.ones((6, 4)), "b": jnp.ones(3)})),
    (r"grads\['w'\]", lambda: update_with(BY_DATA)),
    ("Moment: dtype", lambda: optim.Moment("float64")),
    ("Moment: dtype", lambda: optim.Moment("float8_e8m0fnu")),
    ("Moment: dtype", lambda: optim.Moment("E4M3")),
    ("Moment: block", lambda: optim.Moment("float16", block=0)),
    ("ScaledArrays", lambda: ANY.SquareRoot(jnp.ones(3)).value),
    ("updates", lambda: apply_updates({"a": jnp.ones(2)}, [jnp.ones(2)])),
    ("state .* only one", lambda: optim.convert_state(ADAM.init(PARAMS), OTHER[0])),
    ("state .* shape", lambda: optim.convert_state(ADAM.init(PARAMS), OTHER[1])),
    ("decay", lambda: optim.independent_weight_decay(1.0)),
]


test_refusals = refuses([((TypeError, ValueError), call, message) for message, call in WRONG])


def test_wide_weights_lose_no_step() -> None:
    for weights in (None, "float32"):
        first_step_of(optax.contrib.dog(1.0), weights=weights)
