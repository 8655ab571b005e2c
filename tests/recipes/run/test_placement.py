"""A run on a mesh gives the numbers of a run on one device, and resumes."""

from collections.abc import Callable

import jax
import pytest

from recipes import train as train_module
from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.run.placement import on_mesh, open_mesh, place, place_batch, share, whole
from recipes.run.state import init_state
from recipes.train import make_train_step

from ..runs import loss_of

MakeConfig = Callable[..., GPTConfig]
MESH = "mesh={data: 2, fsdp: 2, tensor: 2}"
WIDE = "model.width=64"  # so that matrices are large enough to be cut


def test_a_run_on_a_mesh_is_that_of_one_device(make_config: MakeConfig) -> None:
    one = loss_of(make_config(WIDE, "name=one"))
    many = loss_of(make_config(WIDE, "name=many", MESH))
    assert many == pytest.approx(one, rel=1e-5)


def test_a_run_on_a_mesh_resumes(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = loss_of(make_config(WIDE, "name=whole", MESH))
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
    assert loss_of(config) == whole


def test_the_state_stays_where_it_lies(make_config: MakeConfig) -> None:
    config = make_config(WIDE, MESH)
    mesh = open_mesh(config)
    graphdef, optimizer, state = init_state(config)
    state = place(state, mesh)
    before = jax.tree.map(lambda x: x.sharding, state)
    step = on_mesh(make_train_step(graphdef, optimizer), state, mesh)
    batch = place_batch(jax.numpy.zeros((4, 17), "int32"), mesh)
    state, _ = step(state, batch, 0)
    assert jax.tree.map(lambda x: x.sharding, state) == before
    cut = [s.spec for s in jax.tree.leaves(before) if "fsdp" in s.spec and "tensor" in s.spec]
    assert cut  # kernels and their moments


def test_refusals(make_config: MakeConfig) -> None:
    count = len(jax.devices())
    with pytest.raises(RecipeError, match=rf"mesh: .*tensor 3 = 3 and {count} devices"):
        open_mesh(make_config("mesh={tensor: 3}"))
    with pytest.raises(RecipeError, match=r"mesh\.data \* mesh\.fsdp must divide data\.batch_size"):
        make_config("mesh={data: 8}")
    for words in (
        ["mesh={data: 2, fsdp: 2, tensor: 2, gradients: float8_e4m3fn}"],
        ["mesh={data: 4, gradients: float8_e4m3fn}", "scalify={storage: float16}"],
    ):
        with pytest.raises(RecipeError, match=r"gradients: expected fsdp 1, tensor 1 and scal"):
            open_mesh(make_config(*words))
    assert open_mesh(make_config()) is None


def test_one_process_has_all(make_config: MakeConfig) -> None:
    mesh = open_mesh(make_config(MESH))
    assert share(None) == share(mesh) == {"process": 0, "processes": 1}
    state = place({"kernel": jax.numpy.ones((64, 64))}, mesh)
    assert whole(state)["kernel"] is state["kernel"]
