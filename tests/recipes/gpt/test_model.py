"""The GPT of `unitscale.nn`: gradients, roles of parameters, and documents."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from recipes.config import GPTModelConfig, ResidualConfig
from recipes.gpt.model import GPT
from tests.gradients import check, jit
from tests.modules import FLOAT64, model_loss
from unitscale import optim

# Each option of the model, of several values each, stands in one of them.
MODELS: dict[str, dict[str, Any]] = {
    "tied learned": {
        "tied_readout": True,
        "positions": "learned",
        "norm": "layer",
        "vocab_multiple": 16,
    },
    "gated grouped": {
        "mlp": "gated",
        "kv_heads": 2,
        "dropout": 0.2,
        "bias": True,
        "vocab_multiple": 4,
        "residual": ResidualConfig(scheme="fixed", tau=0.4),
    },
}


def make(options: dict[str, Any], policy: Any = "float32") -> GPT:
    shape = {"vocab": 11, "width": 8, "layers": 2, "heads": 4, "mlp_ratio": 2.0, "context": 8}
    return GPT(GPTModelConfig(**(shape | options)), policy=policy, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_constants_times_the_truth(name: str) -> None:
    with jax.enable_x64(True):
        model = make(MODELS[name], FLOAT64)
        ids = np.random.default_rng(5).integers(0, 11, (2, 7))
        dropped = {"deterministic": model.config.dropout == 0}
        loss = model_loss(model, lambda m: m.loss(ids[:, :-1], ids[:, 1:], **dropped))
        check(*loss, directions=2)


def test_every_parameter_has_a_role() -> None:
    model = make({"positions": "learned", "mlp_ratio": 4.0})
    params = nnx.state(model, nnx.Param)
    tx = optim.umup(optax.identity(), params)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    block = updates["stack"]["layers"][0]
    assert block["attention_norm"]["gain"][0] == pytest.approx(4**-0.5)
    assert block["mlp"]["up"]["kernel"][0, 0] == pytest.approx((8 * 4) ** -0.5)
    assert updates["positions"]["embedding"][0, 0] == pytest.approx(8**-0.5)
    assert updates["norm"]["gain"][0] == 1


@pytest.mark.parametrize("options", [{}, {"scan": True, "kv_heads": 2}])
def test_documents_of_a_window_do_not_see_each_other(options: dict[str, Any]) -> None:
    model = make({"document_end": 0, "context": 16} | options)
    parts = [[3, 1, 4, 0], [5, 9, 2, 6, 5, 0], [8, 7]]
    window = jnp.array([[*itertools.chain(*parts)]])
    whole = jit(lambda ids: model(ids).value)(window)[0]
    start = 0
    for part in parts:
        alone = jit(lambda ids: model(ids).value)(jnp.array([part]))[0]
        np.testing.assert_allclose(whole[start : start + len(part)], alone, rtol=1e-5, atol=1e-5)
        start += len(part)
    joined = make({"context": 16} | options)
    other = jit(lambda ids: joined(ids).value)(window)[0]
    np.testing.assert_allclose(whole[:4], other[:4], rtol=1e-5, atol=1e-5)
    assert np.abs(whole[4:] - other[4:]).max() > 1e-2
