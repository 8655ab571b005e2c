"""The training step: skipped steps, and gradients that devices exchange in 8 bits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from recipes.gpt.config import GPTConfig
from recipes.registry import load_config
from recipes.run.processes import on_mesh, place, place_batch
from recipes.run.state import TrainState, init_state
from recipes.run.step import make_train_step
from tests.recipes.conftest import write_config
from unitscale.core import rebalance
from unitscale.nn import AmaxState
from unitscale.parallel import make_mesh
from unitscale.quant import QuantState

MakeConfig = Callable[..., GPTConfig]
GOOD, BAD = (np.full((4, 17), i, np.int32) for i in (1, 2))
DEVICES = 4
ON_FOUR = ("mesh.data=4",)
SLOW = pytest.mark.slow


def arrays(tree: Any) -> list[np.ndarray]:
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(tree)]
    leaves = zip(jax.tree.leaves(tree), keys, strict=True)
    return [np.asarray(jax.random.key_data(x) if is_key else x) for x, is_key in leaves]


def weights(state: TrainState) -> list[np.ndarray]:
    return arrays((state.params, state.opt_state, state.rest))


@pytest.fixture(scope="module")
def tolerant(tmp_path_factory: pytest.TempPathFactory):
    """Make a step that skips up to two bad steps in a row, for a model that token 2 breaks."""
    path = write_config(tmp_path_factory.mktemp("tolerant"))
    config = load_config(path, ["optimizer.skip_nonfinite=2"])
    graphdef, optimizer, state = init_state(config)
    table = state.params["embed"]["embedding"]
    table[...] = table[...].at[2].set(jnp.inf)
    return make_train_step(graphdef, optimizer, config), state


def run(tolerant, batches: list[np.ndarray]) -> list[TrainState]:
    step, state = tolerant
    states = [jax.tree.map(jnp.copy, state)]
    for index, batch in enumerate(batches):
        state, _ = step(jax.tree.map(jnp.copy, states[-1]), batch, np.int32(index))
        states.append(state)
    return states


def test_a_bad_step_is_left_out_and_counted(tolerant) -> None:
    states = run(tolerant, [GOOD, BAD, BAD, GOOD, BAD])
    found = [(int(s.step), int(s.skips.total), int(s.skips.in_a_row)) for s in states]
    assert found == [(0, 0, 0), (1, 0, 0), (2, 1, 1), (3, 2, 2), (4, 2, 0), (5, 3, 1)]
    for before, after, is_bad in zip(states, states[1:], (0, 1, 1, 0, 1), strict=False):
        pairs = zip(weights(before), weights(after), strict=True)
        same = [a.tobytes() == b.tobytes() for a, b in pairs]
        assert all(same) == bool(is_bad)


def test_one_too_many_stops_the_state_where_it_is(tolerant) -> None:
    states = run(tolerant, [GOOD, BAD, BAD, BAD, GOOD])
    assert [int(s.step) for s in states] == [0, 1, 2, 3, 3, 3]
    assert [int(s.skips.total) for s in states] == [0, 0, 1, 2, 2, 2]


STORED = (
    "model.library=unitscale",
    "precision={weights: float16, moments: [float8_e4m3fn, float8_e4m3fn], rounding: stochastic}",
)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("data.batch_size=8", *STORED, *ON_FOUR, "precision.exchange=float8_e4m3fn"),
    ],
    ids=["float32", "stored in few bits, on a mesh"],
)
def test_the_state_is_replaced_in_place(make_config: MakeConfig, words: tuple[str, ...]) -> None:
    """The compiled program writes the new state into the memory of the old one."""
    config = make_config(*words)
    mesh = make_mesh({"data": DEVICES}, devices=jax.devices()[:DEVICES]) if config.mesh else None
    graphdef, optimizer, state = init_state(config)
    state = place(state, mesh)
    step = make_train_step(graphdef, optimizer, config, mesh=mesh)
    batch = place_batch(np.ones((config.data.batch_size, 17), np.int32), mesh)
    program = on_mesh(step, state, mesh).lower(state, batch, np.int32(0)).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == sum(array.nbytes for array in arrays(state))


def exchange(config: GPTConfig, steps: int = 4) -> tuple[list[float], TrainState]:
    mesh = make_mesh({"data": DEVICES}, devices=jax.devices()[:DEVICES])
    graphdef, optimizer, state = init_state(config)
    state = place(state, mesh)
    assert config.mesh is not None
    step = make_train_step(graphdef, optimizer, config, mesh=mesh)
    step, losses = on_mesh(step, state, mesh), []
    random = np.random.default_rng(0)
    for index in range(steps):
        batch = random.integers(0, 99, (8, 17)).astype(np.int32)
        state, values = step(state, place_batch(batch, mesh), np.int32(index))
        losses.append(float(values["loss"]))
    return losses, state


WIDE = ("data.batch_size=8", "model.width=32", "model.dropout=0.0")


@pytest.mark.slow
def test_gradients_in_8_bits_train_as_those_in_float32(make_config: MakeConfig) -> None:
    settings = (*WIDE, "optimizer={name: sgd, b1: 0.0, learning_rate: 0.1, umup: false}")
    full, wide = exchange(make_config(*settings, *ON_FOUR, "precision.exchange=float32"))
    few, narrow = exchange(make_config(*settings, *ON_FOUR, "precision.exchange=float8_e4m3fn"))
    left, wide_left = exchange(make_config(*settings, *ON_FOUR))
    np.testing.assert_allclose(left, full, rtol=1e-5)  # a mean of means is the mean
    _, _, first = init_state(make_config(*settings, *ON_FOUR))
    moved, error = (
        float(optax.tree.norm(jax.tree.map(jnp.subtract, other.params, wide.params)))
        for other in (jax.device_put(first, jax.tree.map(lambda x: x.sharding, wide_left)), narrow)
    )
    # Two roundings of at most 2^-4 each to nearest, and no more as the steps go on.
    assert 0 < error < 2 * 2**-4 * moved
    assert few != full
    assert few == pytest.approx(full, rel=1e-2)


@pytest.mark.slow
def test_a_unit_scaled_step_by_sgd_is_that_of_the_compiler(make_config: MakeConfig) -> None:
    """Scaling factors use the global batch size, however the batch is sharded."""
    settings = (*WIDE, "model.library=unitscale", "optimizer={name: sgd, learning_rate: 0.01}")
    losses, ours = exchange(make_config(*settings, *ON_FOUR, "precision.exchange=float32"))
    left, theirs = exchange(make_config(*settings, *ON_FOUR))
    np.testing.assert_allclose(losses, left, rtol=1e-5)
    first = init_state(make_config(*settings, *ON_FOUR))[2].params
    mine, compilers, begun = (
        jax.tree.map(np.asarray, x) for x in (ours.params, theirs.params, first)
    )
    moved, error = (
        float(optax.tree.norm(jax.tree.map(np.subtract, mine, x))) for x in (begun, compilers)
    )
    assert error < 1e-5 * moved


def test_automatic_scaling_is_part_of_the_state(make_config: MakeConfig) -> None:
    _, state = exchange(make_config(*WIDE, *ON_FOUR, "precision.exchange=float8_e4m3fn"), steps=2)
    assert state.auto is not None
    mus = [float(mu) for mu in jax.tree.leaves(state.auto.mu)]
    assert mus == [pytest.approx(2 ** (2 / 1000))] * len(mus)  # nothing overflows: it grows
    _, _, state = init_state(make_config(*WIDE, *ON_FOUR, "precision.exchange=bfloat16"))
    assert state.auto is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [(), pytest.param(("model.library=unitscale", "model.scan=true"), marks=SLOW)], ids=str
)
def test_dropout_differs_between_devices(make_config: MakeConfig, words: tuple[str, ...]) -> None:
    """All devices have the same rows, so different masks show in the mean."""
    settings = ("data.batch_size=8", "model.dropout=0.5", *ON_FOUR, "precision.exchange=float32")
    config = make_config(*settings, *words)
    mesh = make_mesh({"data": DEVICES}, devices=jax.devices()[:DEVICES])
    graphdef, optimizer, state = init_state(config)
    before = arrays(state.rest)
    row = np.random.default_rng(0).integers(0, 99, (1, 17)).astype(np.int32)
    losses = []
    for rows, shown in ((4, mesh), (1, make_mesh({"data": 1}, devices=jax.devices()[:1]))):
        step = make_train_step(graphdef, optimizer, config, mesh=shown)
        batch = place_batch(np.repeat(row, rows, 0), shown)
        placed = place(jax.tree.map(jnp.copy, state), shown)
        after, values = on_mesh(step, placed, shown)(placed, batch, np.int32(0))
        losses.append(float(values["loss"]))
        moved = zip(arrays(after.rest), before, strict=True)
        assert any(a.tobytes() != b.tobytes() for a, b in moved)
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_scales_that_follow_amax_see_all_devices(make_config: MakeConfig) -> None:
    library = ["model.library=unitscale", "optimizer.umup=true", "precision.policy=fp8_delayed"]
    config = make_config(*WIDE, *library, *ON_FOUR, "precision.exchange=float32")
    _, many = exchange(config, steps=1)
    _, one = exchange(make_config(*WIDE, *library, *ON_FOUR), steps=1)
    mine, theirs = (
        np.stack([own.get_value().scale for _, own in nnx.to_flat_state(amax)])
        for amax in (nnx.filter_state(state.rest, AmaxState) for state in (many, one))
    )
    assert np.all(mine < 1)  # they have moved
    np.testing.assert_array_equal(mine, theirs)


def amax(state: TrainState) -> list[QuantState]:
    own = nnx.to_flat_state(nnx.filter_state(state.rest, AmaxState))
    return [variable.get_value() for _, variable in own]


@pytest.mark.parametrize(
    "precision", ["fp8_delayed", *(pytest.param(p, marks=SLOW) for p in ("float32", "fp8"))]
)
def test_micro_batches_make_the_step_of_the_whole_batch(
    make_config: MakeConfig, precision: str
) -> None:
    """Compare gradients, amax over all micro-batches, and AdamW's update."""
    words = ("model.library=unitscale", "optimizer.umup=true", f"precision={precision}")
    settings = (*WIDE, *words, "optimizer.weight_decay=0.01")
    ids = np.random.default_rng(0).integers(0, 99, (8, 17)).astype(np.int32)
    taken = []
    for parts in (1, 4):
        config = make_config(*settings, f"data.micro_batches={parts}")
        graphdef, optimizer, state = init_state(config)
        step = make_train_step(graphdef, optimizer, config)
        begun = jax.tree.map(np.asarray, state.params)
        state, values = step(state, ids, np.int32(0))
        taken.append((state, values))
    (whole, one), (parts, many) = taken
    # Cotangents are the same, so that they round to 8 bits alike; sums are in another order.
    close = {"float32": 1e-5}.get(precision, 2**-6)
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-6)
    np.testing.assert_allclose(many["gradient_norm"], one["gradient_norm"], rtol=close)
    for own, other in zip(amax(whole), amax(parts), strict=True):
        np.testing.assert_array_equal(own.scale, other.scale)
        np.testing.assert_array_equal(own.history, other.history)
    moved, error = (
        float(optax.tree.norm(jax.tree.map(jnp.subtract, whole.params, other)))
        for other in (begun, parts.params)
    )
    assert error < 2 * close * moved


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float8_e4m3fn", marks=SLOW)])
def test_gradients_in_fewer_bits_reach_every_path(make_config: MakeConfig, dtype: str) -> None:
    """Micro-batches, a loss scale, clipping, delayed scales and skipped steps."""
    words = (
        *WIDE,
        "model.library=unitscale",
        "precision=fp8_delayed",
        "precision.loss_scale=dynamic",
    )
    words += ("data.micro_batches=2", "optimizer.clip_norm=1.0")
    ids = np.random.default_rng(0).integers(0, 99, (8, 17)).astype(np.int32)
    taken = []
    for more in ((), (f"precision.gradients={dtype}",)):
        config = make_config(*words, *more)
        graphdef, optimizer, state = init_state(config)
        step, values = make_train_step(graphdef, optimizer, config), {}
        for index in range(2):
            state, values = step(state, ids, np.int32(index))
        taken.append((state, values))
    (exact, one), (narrow, other) = taken
    close = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(other["loss"], one["loss"], rtol=close)
    np.testing.assert_allclose(other["gradient_norm"], one["gradient_norm"], rtol=close)
    assert other["gradient_norm"] != one["gradient_norm"]
    # Two steps of amax history, and not of numbers rounded to the format of gradients.
    for own, same in zip(amax(narrow), amax(exact), strict=True):
        np.testing.assert_array_equal(own.history[..., :2], same.history[..., :2])


def test_weights_of_a_large_scale_have_finite_gradients(tmp_path) -> None:
    # Readout columns of tokens that never occur only grow, and all weights have one scale.
    words = ["model.library=unitscale", "precision.weights=float16", "model.dropout=0"]
    config = load_config(write_config(tmp_path), words)
    graphdef, optimizer, state = init_state(config)
    kernel = state.params["readout"]["kernel"]
    kernel.set_value(rebalance(kernel.get_value(), 2.0**14))
    step = make_train_step(graphdef, optimizer)
    new, values = step(jax.tree.map(jnp.copy, state), GOOD, np.int32(0))
    assert int(new.step) == 1
    assert np.isfinite(values["gradient_norm"])
