"""The training step: skipped steps, meshes, and gradients that devices exchange in 8 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.registry import load_config
from recipes.run.processes import divided, on_mesh, open_mesh, over, place, place_batch, whole
from recipes.run.state import TrainState, init_state
from recipes.run.step import make_evaluation, make_loss, make_train_step
from tests.products import equations
from unitscale import to_array, value_and_grad
from unitscale.nn import AmaxState
from unitscale.parallel import make_mesh
from unitscale.quant import QuantState

from ..conftest import MakeConfig, write_config
from ..runs import arrays

GOOD, BAD = (np.full((4, 17), i, np.int32) for i in (1, 2))
DEVICES = 4
ON_FOUR = ("mesh.data=4",)
SLOW = pytest.mark.slow


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


def test_a_bad_step_is_left_out_and_counted_and_one_too_many_stops(tolerant) -> None:
    states = run(tolerant, [GOOD, BAD, BAD, GOOD, BAD])
    found = [(int(s.step), int(s.skips.total), int(s.skips.in_a_row)) for s in states]
    assert found == [(0, 0, 0), (1, 0, 0), (2, 1, 1), (3, 2, 2), (4, 2, 0), (5, 3, 1)]
    for before, after, is_bad in zip(states, states[1:], (0, 1, 1, 0, 1), strict=False):
        pairs = zip(weights(before), weights(after), strict=True)
        assert all(a.tobytes() == b.tobytes() for a, b in pairs) == bool(is_bad)
    states = run(tolerant, [GOOD, BAD, BAD, BAD, GOOD])
    assert [int(s.step) for s in states] == [0, 1, 2, 3, 3, 3]
    assert [int(s.skips.total) for s in states] == [0, 0, 1, 2, 2, 2]
    for before, after in zip(weights(states[1]), weights(states[-1]), strict=True):
        assert before.tobytes() == after.tobytes()


STORED = (
    "model.library=unitscale",
    "precision={weights: float16, moments: [float8_e4m3fn, float8_e4m3fn], rounding: stochastic}",
)


@pytest.mark.parametrize(
    "words",
    [
        (),
        pytest.param(
            ("data.batch_size=8", *STORED, *ON_FOUR, "precision.exchange=float8_e4m3fn"),
            marks=pytest.mark.slow,
        ),
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


def distance(one: TrainState, other: TrainState) -> float:
    """Return the norm of the difference of two states' parameters."""
    mine, theirs = (jax.tree.map(np.asarray, state.params) for state in (one, other))
    return float(optax.tree.norm(jax.tree.map(np.subtract, mine, theirs)))


def exchange(config: GPTConfig, steps: int = 4) -> tuple[list[float], TrainState]:
    mesh = None
    if config.mesh is not None:
        axis = "data" if config.mesh.fsdp == 1 else "fsdp"
        mesh = make_mesh({axis: DEVICES}, devices=jax.devices()[:DEVICES])
    graphdef, optimizer, state = init_state(config)
    state = place(state, mesh)
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
def test_a_unit_scaled_step_by_sgd_is_that_of_the_compiler(make_config: MakeConfig) -> None:
    """Scaling factors use the global batch size, however the batch is sharded."""
    settings = (*WIDE, "model.library=unitscale", "optimizer={name: sgd, learning_rate: 0.01}")
    losses, ours = exchange(make_config(*settings, *ON_FOUR, "precision.exchange=float32"))
    left, theirs = exchange(make_config(*settings, *ON_FOUR))
    np.testing.assert_allclose(losses, left, rtol=1e-5)
    first = init_state(make_config(*settings, *ON_FOUR))[2]
    assert distance(ours, theirs) < 1e-5 * distance(ours, first)


@pytest.mark.slow
def test_a_step_over_fsdp_is_that_of_one_device(make_config: MakeConfig) -> None:
    """Weights are gathered in FP8, as matmuls round them, and gradients summed in FP8."""
    words = ("model.width=64", "model.dropout=0.0", "data.batch_size=8", "precision=fp8_5_bytes")
    sgd = ("model.library=unitscale", "optimizer={name: sgd, learning_rate: 0.01}")
    settings = (*words, *sgd, "model.layers=1", "precision.min_size=1024")
    expected, one = exchange(make_config(*settings), steps=2)
    narrow = ("mesh.fsdp=4", "precision.exchange=float8_e4m3fn")
    losses, many = exchange(make_config(*settings, *narrow), steps=2)
    first = init_state(make_config(*settings))[2]
    wide = [to_array(state.params) for state in (first, one, many)]
    norms = [optax.tree.norm(jax.tree.map(jnp.subtract, x, wide[1])) for x in wide]
    np.testing.assert_allclose(losses, expected, rtol=2**-8)
    assert 0 < norms[2] < 2**-3 * norms[0]
    for override in ("precision.exchange=float16", "mesh.data=2"):
        with pytest.raises(RecipeError, match=r"precision\.exchange"):
            make_config(*settings, *narrow, override)
    with pytest.raises(RecipeError, match=r"exchange over mesh\.fsdp needs .* unitscale model"):
        make_config(*narrow, "model.library=plain", "optimizer.umup=false")


@pytest.mark.slow
def test_dropout_differs_between_devices(make_config: MakeConfig) -> None:
    """All devices have the same rows, so different masks show in the mean."""
    words = ("model.library=unitscale", "model.scan=true", "model.dropout=0.5")
    config = make_config(*words, "data.batch_size=8", *ON_FOUR, "precision.exchange=float32")
    graphdef, optimizer, state = init_state(config)
    before = arrays(state.rest)
    row = np.random.default_rng(0).integers(0, 99, (1, 17)).astype(np.int32)
    losses = []
    for rows in (4, 1):
        mesh = make_mesh({"data": rows}, devices=jax.devices()[:rows])
        step = make_train_step(graphdef, optimizer, config, mesh=mesh)
        batch = place_batch(np.repeat(row, rows, 0), mesh)
        placed = place(jax.tree.map(jnp.copy, state), mesh)
        after, values = on_mesh(step, placed, mesh)(placed, batch, np.int32(0))
        losses.append(float(values["loss"]))
        moved = zip(arrays(after.rest), before, strict=True)
        assert any(a.tobytes() != b.tobytes() for a, b in moved)
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


def amax(state: TrainState) -> list[QuantState]:
    own = nnx.to_flat_state(nnx.filter_state(state.rest, AmaxState))
    return [variable.get_value() for _, variable in own]


def stepped(config: GPTConfig, ids: np.ndarray, steps: int) -> tuple[TrainState, Any, TrainState]:
    """Take steps on one batch; return the first state, the last values and the last state."""
    graphdef, optimizer, state = init_state(config)
    step, values = make_train_step(graphdef, optimizer, config), {}
    first = state._replace(params=jax.tree.map(np.asarray, state.params))
    for index in range(steps):
        state, values = step(state, ids, np.int32(index))
    return first, values, state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("fp8_delayed", "bfloat16"),
        ("float32", None),
        ("fp8", "float8_e4m3fn"),
    ],
)
def test_micro_batches_make_the_step_of_the_whole_batch_also_with_gradients_in_fewer_bits(
    make_config: MakeConfig, precision: str, dtype: str | None
) -> None:
    """Compare gradients, amax over all micro-batches, and AdamW's update.

    A loss scale and clipping change nothing about that.
    """
    words = (*WIDE, "model.library=unitscale", f"precision={precision}", "optimizer.clip_norm=1.0")
    words += ("optimizer.umup=true", "optimizer.weight_decay=0.01", "precision.loss_scale=dynamic")
    ids = np.random.default_rng(0).integers(0, 99, (8, 17)).astype(np.int32)
    _, one, whole = stepped(make_config(*words), ids, 1)
    words += ("data.micro_batches=4",)
    begun, many, parts = stepped(make_config(*words), ids, 1)
    # Cotangents are the same, so that they round to 8 bits alike; sums are in another order.
    close = {"float32": 1e-5}.get(precision, 2**-6)
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-6)
    np.testing.assert_allclose(many["gradient_norm"], one["gradient_norm"], rtol=close)
    for own, other in zip(amax(whole), amax(parts), strict=True):
        np.testing.assert_array_equal(own.scale, other.scale)
        np.testing.assert_array_equal(own.history, other.history)
    assert distance(whole, parts) < 2 * close * distance(whole, begun)
    if dtype is None:
        return
    _, few, narrow = stepped(make_config(*words, f"precision.gradients={dtype}"), ids, 1)
    close = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(few["gradient_norm"], many["gradient_norm"], rtol=close)
    assert few["gradient_norm"] != many["gradient_norm"]
    for own, other in zip(amax(narrow), amax(parts), strict=True):  # not of rounded gradients
        np.testing.assert_array_equal(own.history, other.history)


MESH = "mesh={data: 2, fsdp: 2, tensor: 2}"
OURS = ("model.library=unitscale", "optimizer.umup=true", "model.dropout=0.0")
BATCH = np.zeros((4, 17), np.int32)
WIDER = "model.width=64"  # so that matrices are large enough to be cut


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param((*OURS, "model.attention_implementation=plain"), id="plain attention"),
        pytest.param(("model.dropout=0.0",), marks=pytest.mark.slow, id="plain model"),
        pytest.param((*OURS, "model.heads=4"), marks=pytest.mark.slow, id="whole heads"),
    ],
)
def test_sequences_can_be_divided(make_config: MakeConfig, words: tuple[str, ...]) -> None:
    """Loss and gradients equal those of one device, up to the rounding of float32 sums."""
    batch = np.random.default_rng(0).integers(0, 90, (4, 17)).astype(np.int32)

    def differentiated(*mesh: str) -> list[np.ndarray]:
        config = make_config(WIDER, *words, *mesh)
        devices = open_mesh(config)
        graphdef, _, state = init_state(config)
        state, loss = place(state, devices), make_loss(graphdef)

        @jax.jit
        def run(params, rest, batch):
            with over(devices):
                return value_and_grad(loss)(params, rest, divided(batch, devices))

        return jax.tree.leaves(run(state.params, state.rest, place_batch(batch, devices)))

    one, many = differentiated(), differentiated("mesh={fsdp: 2, context: 2, tensor: 2}")
    for a, b in zip(one, many, strict=True):
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(a)


@pytest.mark.slow
def test_no_device_holds_a_whole_sequence(make_config: MakeConfig) -> None:
    """No activations of a whole sequence, neither in the training step nor in evaluation."""
    config = make_config(*OURS, "model.attention_implementation=plain", "mesh={context: 8}")
    mesh = open_mesh(config)
    graphdef, optimizer, state = init_state(config)
    state = place(state, mesh)
    batch = place_batch(BATCH, mesh)
    step = on_mesh(make_train_step(graphdef, optimizer), state, mesh).lower(state, batch, 0)
    evaluate = make_evaluation(graphdef, mesh=mesh).lower(state.params, state.rest, batch)
    hidden = config.model.hidden or 4 * config.model.width
    for program in (step.compile(), evaluate.compile()):
        text = program.as_text()
        assert f"[4,2,{hidden}]" in text  # of the MLP, the most there is
        assert f"[4,16,{hidden}]" not in text


def test_activations_lie_where_the_batch_does(make_config: MakeConfig) -> None:
    """Constrain the inputs and outputs of layers; otherwise XLA may move them to the weights."""
    # the constraints outside of layers, and in each layer
    for words, once, each in ((OURS, 5, 11), (("model.dropout=0.0",), 1, 1)):
        config = make_config(*words, "mesh={fsdp: 4, context: 2}")
        graphdef, _, state = init_state(config)
        with over(open_mesh(config)):
            program = jax.make_jaxpr(make_loss(graphdef))(state.params, state.rest, BATCH)
        names = [e.primitive.name for e in equations(program.jaxpr)]
        assert names.count("sharding_constraint") == once + each * config.model.layers


def test_a_mesh_fits_its_devices_and_config(make_config: MakeConfig) -> None:
    count = len(jax.devices())
    with pytest.raises(ValueError, match=rf"tensor 3 = 3 and {count} devices"):
        open_mesh(make_config("mesh={tensor: 3}"))
    with pytest.raises(RecipeError, match=r"mesh\.data \* mesh\.fsdp must divide data\.batch_size"):
        make_config("mesh={data: 8}")
    with pytest.raises(RecipeError, match=r"mesh\.context must divide .*; got 3 and 16"):
        make_config("mesh={context: 3}")
    for words in (
        ["mesh={data: 2, fsdp: 2, tensor: 2}", "precision.exchange=float8_e4m3fn"],
        ["mesh={data: 4}", "precision={scalify: float16, exchange: float8_e4m3fn}"],
    ):
        with pytest.raises(RecipeError, match=r"exchange needs a mesh of data or fsdp alone"):
            make_config(*words)
    assert open_mesh(make_config()) is None
    mesh = open_mesh(make_config(MESH))  # one process has all
    state = place({"kernel": jax.numpy.ones((64, 64))}, mesh)
    assert whole(state)["kernel"] is state["kernel"]
