"""Models that are built from configs of recipe gpt."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.gpt.task import build, load_data
from recipes.run.probe import probe
from recipes.run.state import init_state
from recipes.run.step import make_train_step
from tests.products import conversions

MakeConfig = Callable[..., GPTConfig]
IDS = jnp.zeros((1, 16), jnp.int32)


def test_matmuls_of_layers_are_converted_and_weights_are_not(make_config: MakeConfig) -> None:
    found = []
    for words in ((), ("precision.matmuls=fp8_dynamic",)):
        config = make_config("precision.policy=float16", *words)
        graphdef, params, rest = nnx.eval_shape(
            lambda c=config: nnx.split(build(c), nnx.Param, ...)
        )
        call = lambda *state, g=graphdef: nnx.merge(g, *state)(IDS)  # noqa: E731
        jaxpr = jax.make_jaxpr(call)(params, rest)
        assert [x.dtype for x in jaxpr.out_avals] == [jnp.float16]
        found.append((len(conversions(jaxpr, "float8_e4m3fn")), jax.tree.leaves(params)))
    # Both operands of query, key, value, out, up and down; not of the readout.
    assert [count for count, _ in found] == [0, 12]
    assert found[0][1] == found[1][1]


def test_the_end_of_documents_is_that_of_the_tokenizer(make_config: MakeConfig) -> None:
    config = make_config("model.library=unitscale", "model.document_end=3")
    with pytest.raises(RecipeError, match=r"model\.document_end: expected .* None; got 3"):
        load_data(config)


@pytest.mark.slow
def test_remat_changes_nothing(make_config: MakeConfig) -> None:
    """Two steps have the same losses, updates and dropout masks, and the probe the same values."""
    taken = []
    for remat in ("none", "layer"):
        graphdef, optimizer, state = init_state(make_config(f"model.remat={remat}"))
        reading = probe(nnx.merge(graphdef, state.params, state.rest), IDS, IDS)
        ids = np.arange(68, dtype=np.int32).reshape(4, 17)
        step = make_train_step(graphdef, optimizer)
        state, _ = step(state, ids, np.int32(0))
        state, values = step(state, ids, np.int32(1))
        taken.append((dict(reading.activations), values, state.params))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, 1e-5, 1e-6), *taken)


def test_biases_of_linear_layers() -> None:
    """All six linear layers of a Transformer layer have a bias; the readout has none."""
    for library in ("unitscale", "plain"):
        count = {}
        for bias in (False, True):
            model = {"library": library, "layers": 1, "norm": "layer", "bias": bias}
            optimizer = {"umup": library == "unitscale"}
            config = GPTConfig.model_validate({"name": "x", "model": model, "optimizer": optimizer})
            state = nnx.eval_shape(lambda config=config: nnx.state(build(config), nnx.Param))
            names = [str(path[-1]) for path, _ in nnx.to_flat_state(state)]
            count[bias] = names.count("bias")
        assert count[True] - count[False] == 6
