"""Amax state: whatever is done to gradients, the history gets the largest amax of a step."""

import dataclasses
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tests.exported import assert_is_read_again
from tests.gradients import jit
from unitscale.quant import (
    TENSORS,
    Contraction,
    Delayed,
    Dynamic,
    MatmulConfig,
    QuantState,
    StaleScalesWarning,
    Static,
    contract,
    fake_quantize_operands,
    grouped,
)

SPEC = Contraction("bk", "kn", "bn")
STRATEGY = Delayed(history=4)
CONFIG = MatmulConfig(cotangent="e5m2", strategy=STRATEGY)
START = QuantState.create(STRATEGY)
TOP = {"lhs": 448.0, "rhs": 448.0, "cotangent": 57344.0}


def needed(tensor: str, amax: float) -> float:
    """The scale that an amax needs."""
    return float(2.0 ** np.ceil(np.log2(amax / TOP[tensor])))


def layer(x, w, state):
    return contract(x, w, SPEC, config=CONFIG, state=state)


def weighted(x, w, dy, state):
    """A loss whose cotangent at the layer is dy."""
    return jnp.sum(layer(x, w, state) * dy)


def seen(loss, *args) -> QuantState:
    """The gradient by the state, which is the last argument."""
    return jit(jax.grad(loss, argnums=len(args)))(*args, START)


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


def test_gradient_accumulation_keeps_the_largest_amax() -> None:
    grads = jit(jax.vmap(jax.grad(weighted, argnums=3), (0, 0, 0, None)))(XS, WS, DYS, START)
    each = [jax.tree.map(lambda leaf, i=i: leaf[i], grads) for i in range(4)]
    added = START
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


def vmapped(xs, ws, dys, state):
    return jnp.sum(jax.vmap(weighted, (0, 0, 0, None))(xs, ws, dys, state))


def rematerialized(xs, ws, dys, state):
    return jax.checkpoint(used_in_turn)(xs, ws, dys, state)


def averaged(xs, ws, dys, state):
    """A mean over many uses makes ones small, but never zero."""
    return used_in_turn(xs, ws, dys * 4096, state) / 4096


def test_every_use_of_a_layer_counts() -> None:
    losses = used_in_turn, scanned_over_time, vmapped, rematerialized, averaged
    grads = jit(lambda *args: [jax.grad(loss, 3)(*args) for loss in losses])(XS, WS, DYS, START)
    for loss, grad in zip(losses, grads, strict=True):
        assert scales(START.advance(grad)) == WANTED, loss.__name__


def test_scan_over_layers_has_a_state_for_each() -> None:
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), START)

    def loss(xs, ws, dys, states):
        def body(total, args):
            return total + weighted(*args), None

        return jax.lax.scan(body, 0.0, (xs, ws, dys, states))[0]

    grad = jit(jax.grad(loss, argnums=3))(XS, WS, DYS, states)
    state = states.advance(grad)
    expected = [[needed(t, s) for t, s in zip(TENSORS, sizes, strict=True)] for sizes in SIZES]
    np.testing.assert_array_equal(state.scale, expected)


MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def test_tensor_parallel_amax_is_global() -> None:
    """Each operand is spread over both axes; the amax lies in one shard."""
    x, w, dy = microbatch(900.0, 3e4, 1e-2)
    args = tuple(
        jax.device_put(a, NamedSharding(MESH, spec))
        for a, spec in ((x, P("data", "model")), (w, P("model", None)), (dy, P("data", "model")))
    )
    grads = seen(weighted, *args)
    assert scales(START.advance(grads)) == WANTED
    state = dataclasses.replace(START, scale=jnp.asarray(WANTED))
    y = jit(layer)(*args[:2], state)
    assert np.all(np.isfinite(y))
    np.testing.assert_array_equal(y, jit(layer)(x, w, state))


def average(x):
    return jax.lax.pmean(x, "data")


@pytest.mark.parametrize("reduce", [average, lambda x: x], ids=["pmean", "summed by JAX"])
def test_manual_data_parallel_amax_is_global(reduce) -> None:
    """Gradients are summed or averaged over the devices as any others; one shard has the amax."""

    @partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(P("data"), P(), P("data"), P()),
        out_specs=P(),
        check_vma=reduce is not average,
    )
    def gradient(x, w, dy, state):
        return reduce(jax.grad(weighted, argnums=3)(x, w, dy, state))

    x, w, dy = microbatch(900.0, 3e4, 1e-2)
    assert scales(START.advance(jit(gradient)(x, w, dy, START))) == WANTED


def test_values_that_are_not_finite_are_counted_and_leave_no_entry() -> None:
    x, w, dy = microbatch(900.0, 3e4, 1e-2)
    good = START.advance(seen(weighted, x, w, dy))
    for bad in (-jnp.inf, jnp.nan):
        after = good.advance(seen(weighted, x.at[0, 0].set(bad), w, dy))
        assert scales(after) == WANTED
        np.testing.assert_array_equal(after.history[0], good.history[0])
        np.testing.assert_array_equal(after.counts[:, 2], [1, 0, 0])
        # Beside a finite microbatch the finite one is remembered.
        both = seen(weighted, x.at[0, 0].set(bad), w, dy)
        other = seen(weighted, x / 900, w, dy)
        state = START.add(both).add(other).advance()
        assert scales(state) == [needed("lhs", 1.0), *WANTED[1:]]
        np.testing.assert_array_equal(state.counts[:, 2], [1, 0, 0])


def test_unused_and_all_zero_tensors_leave_their_scale() -> None:
    x, w, dy = microbatch(900.0, 3e4, 1e-2)
    good = START.advance(seen(weighted, x, w, dy))
    after = good.advance(seen(weighted, x * 0, w, dy * 0))
    assert scales(after) == WANTED
    np.testing.assert_array_equal(after.history[::2], good.history[::2])
    unused = good.advance(jax.tree.map(jnp.zeros_like, good))
    assert scales(unused) == WANTED
    np.testing.assert_array_equal(unused.history, good.history)
    assert scales(START.advance()) == [1, 1, 1]


def steps(strategy: Delayed, sizes: list[float]) -> list[float]:
    """The scale of lhs after each step."""
    config, state, found = MatmulConfig(strategy=strategy), QuantState.create(strategy), []
    w = jnp.ones((8, 6))

    @jit
    def step(x, state):
        grad = jax.grad(lambda s: jnp.sum(contract(x, w, SPEC, config=config, state=s)))(state)
        return state.advance(grad)

    for size in sizes:
        state = step(jnp.full((4, 8), size, jnp.float32), state)
        found.append(float(state.scale[0]))
    return found


def test_history_margin_and_use() -> None:
    sizes = [448.0, 448 * 8, 448.0, 0.0, 448 * 2, 448.0, 448.0]
    assert steps(Delayed(history=3), sizes) == [1, 8, 8, 8, 8, 2, 2]
    assert steps(Delayed(history=1), sizes) == [1, 8, 1, 1, 2, 1, 1]
    assert steps(Delayed(history=3, use="latest"), sizes) == [1, 8, 1, 1, 2, 1, 1]
    assert steps(Delayed(history=3, margin=2), sizes) == [4, 32, 32, 32, 32, 8, 8]
    assert steps(Delayed(margin=126), sizes[:1]) == [2.0**126]


def test_a_scale_is_that_of_earlier_steps() -> None:
    """The first step has scale 1, the second that of the first."""
    x, w = jnp.full((1, 8), 4480.0), jnp.ones((8, 6))
    assert float(layer(x, w, START)[0, 0]) == 8 * 448
    state = START.advance(seen(weighted, x, w, jnp.ones((1, 6))))
    assert float(layer(x, w, state)[0, 0]) == 8 * 4608  # 4480 / 16 is halfway, ties to even


def test_saturated_elements_are_counted() -> None:
    x = jnp.full((4, 8), 448.0).at[0, :3].set(500.0)
    grad = seen(weighted, x, jnp.ones((8, 6)), jnp.full((4, 6), 1e9))
    state = START.advance(grad)
    np.testing.assert_array_equal(state.counts[:, 0], [3, 0, 24])
    np.testing.assert_array_equal(state.counts[:, 1], [32, 48, 24])
    np.testing.assert_array_equal(state.counts[:, 3], [1, 0, 1])
    # Its scales now fit; the count of the step is new, that of steps goes on.
    config = CONFIG
    loss = lambda s: jnp.sum(contract(x, jnp.ones((8, 6)), SPEC, config=config, state=s) * 1e9)  # noqa: E731
    state = state.advance(jit(jax.grad(loss))(state))
    np.testing.assert_array_equal(state.counts[:, 0], [0, 0, 0])
    np.testing.assert_array_equal(state.counts[:, 3], [1, 0, 1])


def test_static_scales_move_by_calibration_only() -> None:
    strategy = Static(margin=1)
    config, state = MatmulConfig(strategy=strategy), QuantState.create(strategy)
    x, w, dy = microbatch(900.0, 3e4, 1e-2)

    def loss(s):
        return jnp.sum(contract(x, w, SPEC, config=config, state=s) * dy)

    state = state.advance(jit(jax.grad(loss))(state))
    assert scales(state) == [1, 1, 1]
    assert float(state.counts[0, 0]) == 1
    calibrating = dataclasses.replace(state, calibrating=True)
    state = calibrating.advance(jit(jax.grad(loss))(calibrating))
    assert scales(state) == [
        2 * needed("lhs", 900),
        2 * needed("lhs", 3e4),
        2 * needed("lhs", 1e-2),
    ]


def test_while_calibrating_products_take_dynamic_scales() -> None:
    x, w, _ = microbatch(900.0, 3e4, 1e-2)
    state = dataclasses.replace(START, calibrating=True)
    config = dataclasses.replace(CONFIG, strategy=Dynamic())
    np.testing.assert_array_equal(layer(x, w, state), contract(x, w, SPEC, config=config))
    assert not np.array_equal(layer(x, w, state), layer(x, w, START))


def test_the_state_has_no_other_gradient() -> None:
    grad = seen(weighted, *microbatch(900.0, 3e4, 1e-2))
    for name in ("scale", "history", "counts"):
        assert not np.any(getattr(grad, name)), name
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grad)} == {"float32"}


def test_double_precision_leaves_the_state_in_single() -> None:
    with jax.enable_x64(True):
        x, w, dy = (np.float64(a) for a in microbatch(900.0, 3e4, 1e-2))
        grads = jit(jax.grad(weighted, argnums=(0, 3)))(x, w, dy, START)
        state = START.advance(grads[1])
    assert grads[0].dtype == np.float64
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32"}
    assert scales(state) == WANTED


def test_statistics_are_computed_only_for_a_gradient_by_the_state() -> None:
    """Forward on its own, as for inference, contains no reduction."""
    x, w, _ = microbatch(900.0, 3e4, 1e-2)
    text = jax.jit(layer).lower(x, w, START).compile().as_text()
    assert " reduce(" not in text


def fake(x, state, strategy):
    config = MatmulConfig(strategy=strategy)
    return fake_quantize_operands(x, X, config, state=state)[0].sum()


def matmul(x, state, strategy):
    return contract(x, X, SPEC, config=MatmulConfig(strategy=strategy), state=state).sum()


def groups(x, state, strategy):
    config = MatmulConfig(strategy=strategy)
    return grouped(x, X[None], jnp.array([2]), config=config, state=state).sum()


def scanned(x, state, strategy):
    body = lambda total, row: (total + matmul(jnp.diag(row), state, strategy), None)  # noqa: E731
    return jax.lax.scan(body, 0.0, x)[0]


X = jnp.ones((2, 2))
LOSSES = {
    "matmul": matmul,
    "groups": groups,
    "fake": fake,
    "jit": jax.jit(matmul, static_argnums=2),
    "remat": jax.checkpoint(matmul, static_argnums=2),
    "scan": scanned,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_warning_if_delayed_scales_are_not_updated(loss) -> None:
    state = QuantState.create(Delayed())
    with pytest.warns(StaleScalesWarning, match=r"unitscale\.nn\.value_and_grad"):
        jax.grad(loss)(X, state, Delayed())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(X, state, Delayed())
        by_both = jax.grad(loss, (0, 1))(X, state, Delayed())
        jax.grad(loss)(X, QuantState.create(Static()), Static())
    assert (by_both[1].tally != 0).any()


@pytest.mark.parametrize("strategy", [Delayed(history=3, use="latest"), Static()], ids=str)
def test_states_in_exported_programs(strategy: Delayed | Static) -> None:
    assert_is_read_again(QuantState.create(strategy))
