"""A run on a mesh computes the same as a run on one device, and resumes."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

from recipes import train as train_module
from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.run.processes import (
    divided,
    on_mesh,
    open_mesh,
    over,
    place,
    place_batch,
    whole,
)
from recipes.run.state import init_state
from recipes.run.step import make_evaluation, make_loss
from recipes.train import make_train_step
from unitscale import value_and_grad

from ..runs import loss_of

MakeConfig = Callable[..., GPTConfig]
MESH = "mesh={data: 2, fsdp: 2, tensor: 2}"
UNIT = ("model.library=unitscale", "optimizer.umup=true", "model.dropout=0.0")
BATCH = np.zeros((4, 17), np.int32)
WIDE = "model.width=64"  # so that matrices are large enough to be cut


@pytest.mark.slow
def test_a_run_on_a_mesh_is_that_of_one_device_and_resumes(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = loss_of(make_config(WIDE, "name=one"))
    many = loss_of(make_config(WIDE, "name=many", MESH))
    assert many == pytest.approx(one, rel=1e-5)
    config = make_config(WIDE, "name=halves", MESH)
    batches, real = [], train_module.place_batch

    def stop_after_four(batch, mesh):
        batches.append(batch)
        if len(batches) == 5:
            raise KeyboardInterrupt
        return real(batch, mesh)

    monkeypatch.setattr(train_module, "place_batch", stop_after_four)
    with pytest.raises(KeyboardInterrupt):
        loss_of(config)
    monkeypatch.setattr(train_module, "place_batch", real)
    assert loss_of(config) == many


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((*UNIT, "model.attention_implementation=plain"), id="plain attention"),
        pytest.param(("model.dropout=0.0",), marks=pytest.mark.slow, id="plain model"),
        pytest.param((*UNIT, "model.heads=4"), marks=pytest.mark.slow, id="whole heads"),
    ],
)
def test_sequences_can_be_divided(make_config: MakeConfig, words: tuple[str, ...]) -> None:
    """Loss and gradients equal those of one device, up to the rounding of float32 sums."""
    batch = np.random.default_rng(0).integers(0, 90, (4, 17)).astype(np.int32)

    def differentiated(*mesh: str) -> list[np.ndarray]:
        config = make_config(WIDE, *words, *mesh)
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


def test_no_device_holds_a_whole_sequence(make_config: MakeConfig) -> None:
    """No activations of a whole sequence, neither in the training step nor in evaluation."""
    config = make_config(*UNIT, "model.attention_implementation=plain", "mesh={context: 8}")
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


@pytest.mark.parametrize(
    "words", [UNIT, pytest.param(("model.dropout=0.0",), marks=pytest.mark.slow)]
)
def test_activations_lie_where_the_batch_does(make_config: MakeConfig, words) -> None:
    """Constrain the inputs and outputs of layers; otherwise XLA may move them to the weights."""
    config = make_config(*words, "mesh={fsdp: 4, context: 2}")
    graphdef, _, state = init_state(config)
    with over(open_mesh(config)):
        program = jax.make_jaxpr(make_loss(graphdef))(state.params, state.rest, BATCH)
    assert str(program).count("sharding_constraint") > config.model.layers


def test_the_state_stays_where_it_lies(make_config: MakeConfig) -> None:
    config = make_config(WIDE, MESH)
    mesh = open_mesh(config)
    graphdef, optimizer, state = init_state(config)
    state = place(state, mesh)
    step = on_mesh(make_train_step(graphdef, optimizer), state, mesh)
    before = jax.tree.map(lambda x: x.sharding, state)
    state, _ = step(state, place_batch(BATCH, mesh), 0)
    assert jax.tree.map(lambda x: x.sharding, state) == before
    cut = [s.spec for s in jax.tree.leaves(before) if "fsdp" in s.spec and "tensor" in s.spec]
    assert cut  # kernels and their moments


def test_a_mesh_fits_its_devices_and_config(make_config: MakeConfig) -> None:
    count = len(jax.devices())
    with pytest.raises(RecipeError, match=rf"mesh: .*tensor 3 = 3 and {count} devices"):
        open_mesh(make_config("mesh={tensor: 3}"))
    with pytest.raises(RecipeError, match=r"mesh\.data \* mesh\.fsdp must divide data\.batch_size"):
        make_config("mesh={data: 8}")
    with pytest.raises(RecipeError, match=r"mesh\.context must divide .*; got 3 and 16"):
        make_config("mesh={context: 3}")
    for words in (
        ["mesh={data: 2, fsdp: 2, tensor: 2}", "precision.exchange=float8_e4m3fn"],
        ["mesh={data: 4}", "precision={scalify: float16, exchange: float8_e4m3fn}"],
    ):
        with pytest.raises(RecipeError, match=r"exchange needs mesh\.fsdp, context and tensor 1"):
            make_config(*words)
    assert open_mesh(make_config()) is None
    mesh = open_mesh(make_config(MESH))  # one process has all
    state = place({"kernel": jax.numpy.ones((64, 64))}, mesh)
    assert whole(state)["kernel"] is state["kernel"]
