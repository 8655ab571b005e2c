"""Amax state: however gradients are combined, the history gets the largest amax of a step."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.exported import assert_is_read_again
from tests.gradients import jit
from tests.parallel.devices import mesh_of
from unitscale.quant import (
    TENSORS,
    Contraction,
    Delayed,
    MatmulConfig,
    QuantState,
    StaleScalesWarning,
    Static,
    contract,
    fake_quantize_operands,
    grouped,
)

SPEC = Contraction("bk", "kn", "bn")
CONFIG = MatmulConfig(cotangent="e5m2", strategy=Delayed(history=4))
START = QuantState.create(Delayed(history=4))
TOP = {"lhs": 448.0, "rhs": 448.0, "cotangent": 57344.0}


def needed(tensor: str, amax: float) -> float:
    """Return the scale that an amax needs."""
    return float(2.0 ** np.ceil(np.log2(amax / TOP[tensor])))


def layer(x, w, state):
    return contract(x, w, SPEC, config=CONFIG, state=state)


def weighted(x, w, dy, state):
    """Make a loss whose cotangent at the layer is dy."""
    return jnp.sum(layer(x, w, state) * dy)


gradient = jit(jax.grad(weighted, argnums=3))


def scales(state: QuantState) -> list[float]:
    return [float(s) for s in np.ravel(state.scale)]


# Amax of x, of w, and of dy for each microbatch; the largest is neither first nor last.
SIZES = [(1.0, 3e4, 1e-6), (900.0, 3e4, 1e-9), (2.0, 3e4, 1e-2), (5e-3, 3e4, 1e-4)]
WANTED = [needed("lhs", 900.0), needed("rhs", 3e4), needed("cotangent", 1e-2)]


def microbatch(lhs: float, rhs: float, dy: float):
    x = jnp.full((4, 8), lhs / 7).at[1, 2].set(-lhs)
    w = jnp.full((8, 6), rhs / 3).at[0, 0].set(rhs)
    return x, w, jnp.full((4, 6), dy / 2).at[3, 5].set(-dy)


XS, WS, DYS = (jnp.stack(tensors) for tensors in zip(*(microbatch(*s) for s in SIZES), strict=True))
X, W, DY = microbatch(900.0, 3e4, 1e-2)
GOOD = START.advance(gradient(X, W, DY, START))


def test_gradient_accumulation_keeps_the_largest_amax() -> None:
    added, each = START, [gradient(*arrays, START) for arrays in zip(XS, WS, DYS, strict=True)]
    for grad in each:
        added = added.add(grad)
    total = jax.tree.map(lambda *g: sum(g), *each)
    mean = jax.tree.map(lambda g: g / 4, total)
    for state in (added.advance(), START.advance(total), START.advance(mean)):
        assert scales(state) == WANTED
        # One optimizer step is one entry of the history.
        assert np.sum(np.asarray(state.history) > -127, axis=-1).tolist() == [1, 1, 1]
        assert not np.any(state.tally)


def used_in_turn(xs, ws, dys, state):
    return sum(weighted(x, w, dy, state) for x, w, dy in zip(xs, ws, dys, strict=True))


def scanned_over_time(xs, ws, dys, state):
    return jax.lax.scan(lambda c, a: (c + weighted(*a, state), None), 0.0, (xs, ws, dys))[0]


def scanned_over_layers(xs, ws, dys, states):
    return jax.lax.scan(lambda c, a: (c + weighted(*a), None), 0.0, (xs, ws, dys, states))[0]


def vmapped(xs, ws, dys, state):
    """Average over many uses, which makes amax small but never zero."""
    return jnp.sum(jax.vmap(weighted, (0, 0, 0, None))(xs, ws, dys * 4096, state)) / 4096


def test_every_use_of_a_layer_counts() -> None:
    losses = jax.checkpoint(used_in_turn), scanned_over_time, vmapped, scanned_over_layers
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), START)
    given = START, START, START, states

    @jit
    def run(*args):
        pairs = zip(losses, given, strict=True)
        return [state.advance(jax.grad(loss, 3)(*args, state)) for loss, state in pairs]

    *advanced, stacked = run(XS, WS, DYS)
    for state in advanced:
        assert scales(state) == WANTED
    expected = [[needed(t, s) for t, s in zip(TENSORS, sizes, strict=True)] for sizes in SIZES]
    np.testing.assert_array_equal(stacked.scale, expected)


@pytest.mark.slow
def test_amax_is_global_over_devices() -> None:
    """The largest entry is on one device, under the partitioner and under shard_map."""
    mesh = mesh_of(data=4, model=2)
    places = P("data", "model"), P("model", None), P("data", "model")
    shards = [NamedSharding(mesh, place) for place in places]
    x, w, dy = map(jax.device_put, (X, W, DY), shards)
    assert scales(START.advance(gradient(x, w, dy, START))) == WANTED
    run = jit(layer)
    y = run(x, w, GOOD)
    assert np.all(np.isfinite(y))
    np.testing.assert_array_equal(y, run(X, W, GOOD))
    manual, places = jax.grad(weighted, argnums=3), (P("data"), P(), P("data"), P())
    averaged = lambda *args: jax.lax.pmean(manual(*args), "data")  # noqa: E731
    for f in (manual, averaged):  # summed by JAX, or averaged
        options = {"in_specs": places, "out_specs": P(), "check_vma": f is manual}
        grads = jit(jax.shard_map(f, mesh=mesh, **options))(X, W, DY, START)
        assert scales(START.advance(grads)) == WANTED


def test_values_that_are_not_finite_unused_or_zero_leave_no_entry() -> None:
    for bad in (-jnp.inf, jnp.nan):
        grad = gradient(X.at[0, 0].set(bad), W, DY, START)
        after = GOOD.advance(grad)
        assert scales(after) == WANTED
        np.testing.assert_array_equal(after.history[0], GOOD.history[0])
        np.testing.assert_array_equal(after.counts[:, 2], [1, 0, 0])
        # Beside a finite microbatch the finite one is remembered.
        state = START.add(grad).add(gradient(X / 900, W, DY, START)).advance()
        assert scales(state) == [needed("lhs", 1.0), *WANTED[1:]]
        np.testing.assert_array_equal(state.counts[:, 2], [1, 0, 0])
    # Nor do unused tensors, and those of zeros.
    after = GOOD.advance(gradient(X * 0, W, DY * 0, START))
    assert scales(after) == WANTED
    np.testing.assert_array_equal(after.history[::2], GOOD.history[::2])
    unused = GOOD.advance(jax.tree.map(jnp.zeros_like, GOOD))
    assert scales(unused) == WANTED
    np.testing.assert_array_equal(unused.history, GOOD.history)
    assert scales(START.advance()) == [1, 1, 1]


def steps(strategy: Delayed, sizes: list[float]) -> list[float]:
    """Return the scale of lhs after each step."""
    config, w = MatmulConfig(strategy=strategy), jnp.ones((8, 6))

    def step(state, size):
        loss = lambda s: jnp.sum(contract(x, w, SPEC, config=config, state=s))  # noqa: E731
        x = jnp.full((4, 8), size)
        state = state.advance(jax.grad(loss)(state))
        return state, state.scale[0]

    run = jit(lambda sizes: jax.lax.scan(step, QuantState.create(strategy), sizes)[1])
    return run(jnp.float32(sizes)).tolist()


def test_history_margin_and_use() -> None:
    sizes = [448.0, 448 * 8, 448.0, 0.0, 448 * 2, 448.0, 448.0]
    assert steps(Delayed(history=3), sizes) == [1, 8, 8, 8, 8, 2, 2]
    assert steps(Delayed(history=1), sizes) == [1, 8, 1, 1, 2, 1, 1]
    assert steps(Delayed(history=3, use="latest"), sizes) == [1, 8, 1, 1, 2, 1, 1]
    assert steps(Delayed(history=3, margin=2), sizes) == [4, 32, 32, 32, 32, 8, 8]
    assert steps(Delayed(margin=126), sizes[:1]) == [2.0**126]


def test_a_scale_is_that_of_earlier_steps_and_saturated_elements_are_counted() -> None:
    """The first step uses scale 1, the second one the scale from the first."""
    x, w, dy = jnp.full((4, 8), 448.0).at[0].set(4480.0), jnp.ones((8, 6)), jnp.full((4, 6), 1e9)
    assert float(layer(x, w, START)[0, 0]) == 8 * 448
    state = START.advance(gradient(x, w, dy, START))
    assert float(layer(x, w, state)[0, 0]) == 8 * 4608  # 4480 / 16 is halfway, ties to even
    np.testing.assert_array_equal(state.counts[:, 0], [8, 0, 24])
    np.testing.assert_array_equal(state.counts[:, 1], [32, 48, 24])
    np.testing.assert_array_equal(state.counts[:, 3], [1, 0, 1])
    # Its scales now fit; the count of the step is new, that of steps goes on.
    state = state.advance(gradient(x, w, dy, state))
    np.testing.assert_array_equal(state.counts[:, 0], [0, 0, 0])
    np.testing.assert_array_equal(state.counts[:, 3], [1, 0, 1])


def test_gradients_of_a_state_are_its_tally_in_single_precision() -> None:
    grad = gradient(X, W, DY, START)
    assert not any(np.any(leaf) for leaf in (grad.scale, grad.history, grad.counts))
    with jax.enable_x64(True):
        x, w, dy = (np.float64(a) for a in (X, W, DY))
        grads = jit(jax.grad(weighted, argnums=(0, 3)))(x, w, dy, START)
        state = START.advance(grads[1])
    assert grads[0].dtype == np.float64
    for tree in (grad, state):
        assert {leaf.dtype.name for leaf in jax.tree.leaves(tree)} == {"float32"}
    assert scales(state) == WANTED


ONES = jnp.ones((2, 2))


def matmul(x, state, config):
    return contract(x, ONES, SPEC, config=config, state=state).sum()


LOSSES: list[Any] = [
    matmul,
    lambda x, state, config: grouped(
        x, ONES[None], jnp.array([2]), config=config, state=state
    ).sum(),
    lambda x, state, config: fake_quantize_operands(x, ONES, config, state=state)[0].sum(),
    jax.jit(matmul, static_argnums=2),
    jax.checkpoint(matmul, static_argnums=2),
    lambda x, state, config: jax.lax.scan(
        lambda c, row: (c + matmul(jnp.diag(row), state, config), None), 0.0, x
    )[0],
]


def test_a_warning_if_delayed_scales_are_not_updated() -> None:
    def trace(f, strategy=CONFIG.strategy):
        config = MatmulConfig(strategy=strategy)
        jax.make_jaxpr(lambda x, s: f(x, s, config))(ONES, QuantState.create(strategy))

    for loss in LOSSES:
        with pytest.warns(StaleScalesWarning, match=r"unitscale\.nn\.value_and_grad") as seen:
            trace(jax.grad(loss))
        assert {warning.filename for warning in seen} == {__file__}  # the user's line
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trace(jax.grad(loss, (0, 1)))
            trace(jax.grad(loss), Static())
            trace(loss)
    # The forward pass on its own, as for inference, measures nothing.
    assert " reduce(" not in jax.jit(layer).lower(X, W, START).compile().as_text()


def test_states_in_exported_programs() -> None:
    for strategy in (Delayed(history=3, use="latest"), Static()):
        assert_is_read_again(QuantState.create(strategy))
