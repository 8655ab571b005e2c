"""A plain model under scalify: its state is scaled, its step is the plain one's, formats act."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.errors import RecipeError
from recipes.gpt.task import build
from recipes.run.evaluate import make_evaluation
from recipes.run.scaling import plain, scaled
from recipes.run.state import init_state
from recipes.train import make_train_step
from tests.products import products
from unitscale.core import ScaledArray, is_scaled

FP8 = "scalify={storage: float16, products: float8_e4m3fn, gradients: float8_e5m2}"
STEPS = 4


def batch_of(config) -> np.ndarray:
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.int32)


def losses(config) -> list[float]:
    graphdef, optimizer, state = init_state(config)
    step, batch, found = make_train_step(graphdef, optimizer, config.scalify), batch_of(config), []
    for index in range(STEPS):
        state, values = step(state, batch, np.int32(index))
        found.append(float(values["loss"]))
    assert int(state.step) == STEPS
    assert step._cache_size() == 1, "the second step has the types of the first"
    return found


@pytest.mark.slow
def test_losses_follow_the_plain_program(make_config) -> None:
    words = ["model.dropout=0.0"]
    expected = losses(make_config(*words))
    assert expected[-1] < expected[0]
    # float32 rounds in another order; float16 and FP8 round each product to 2^-11 and 2^-4.
    for storage, tolerance in (("float32", 1e-5), ("float16", 2e-3)):
        found = losses(make_config(*words, f"scalify={{storage: {storage}}}"))
        np.testing.assert_allclose(found, expected, rtol=tolerance)
    found = losses(make_config(*words, FP8))
    np.testing.assert_allclose(found, expected, rtol=2e-2)
    assert np.max(np.abs(np.asarray(found) - expected)) > 1e-6, "FP8 has an effect"


def test_state_is_stored_in_the_format_asked_for(make_config) -> None:
    config = make_config("scalify={storage: float16}")
    _, _, state = init_state(config)
    leaves = jax.tree.leaves(state, is_leaf=is_scaled)
    floating = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floating
    assert all(isinstance(x, ScaledArray) and x.dtype == jnp.float16 for x in floating)
    unscaled = init_state(make_config())[2].params
    for ours, theirs in zip(
        jax.tree.leaves(plain(config.scalify, state.params)),
        jax.tree.leaves(unscaled),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2**-11)


def test_a_config_without_it_is_left_alone(make_config) -> None:
    tree = {"x": jnp.ones(3)}
    assert scaled(None, tree) is tree
    assert plain(None, tree) is tree


def test_products_of_linear_layers_are_in_fp8(make_config) -> None:
    config = make_config(FP8, "model.layers=2")
    graphdef, _, state = init_state(config)
    evaluate = make_evaluation(graphdef, config.scalify)
    program = jax.make_jaxpr(evaluate)(state.params, state.rest, batch_of(config))
    types = [{*operands} for _, *operands in products(program.jaxpr)]
    # Six linear layers in each of two blocks; readout and attention stay in float16.
    assert types.count({"float8_e4m3fn"}) == 2 * 6
    assert len(types) == 2 * 6 + 1 + 2 * 2


def test_markers_are_identities_outside(make_config) -> None:
    batch = batch_of(make_config())
    with_markers, without = (build(make_config(*words)) for words in ([FP8], []))
    x, y = (m.loss(batch[:, :-1], batch[:, 1:]) for m in (with_markers, without))
    assert float(x) == float(y)


def test_it_needs_a_plain_float32_model(make_config) -> None:
    for words in (["model.library=unitscale"], ["precision.policy=float16"]):
        with pytest.raises(RecipeError, match=r"scalify needs model\.library plain"):
            make_config("scalify={storage: float16}", *words)
