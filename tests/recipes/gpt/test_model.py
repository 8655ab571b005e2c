"""The GPT of `unitscale.nn`: gradients, roles of parameters, and masks between documents."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from recipes.config import GPTModelConfig
from recipes.gpt.task import GPT
from tests.gradients import check, jit
from tests.modules import FLOAT64, build, model_loss

# Each option of the model, of several values each, stands in one of them.
TIED = {"tied_readout": True, "positions": "learned", "norm": "layer", "vocab_multiple": 16}
GATED = {
    "mlp": "gated",
    "kv_heads": 2,
    "dropout": 0.2,
    "bias": True,
    "vocab_multiple": 4,
    "residual": {"scheme": "fixed", "tau": 0.4},
}


def make(options: dict[str, Any], policy: Any = "float32") -> GPT:
    shape = {"vocab": 11, "width": 8, "layers": 2, "heads": 4, "mlp_ratio": 2.0, "context": 12}
    config = GPTModelConfig.model_validate(shape | options)
    return build(lambda: GPT(config, policy=policy, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("options", [GATED, pytest.param(TIED, marks=pytest.mark.slow)])
def test_gradients_are_constants_times_the_truth(options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        model = make(options | {"layers": 1}, FLOAT64)
        ids = np.random.default_rng(5).integers(0, 11, (2, 7))
        dropped = {"deterministic": model.config.dropout == 0}
        loss = model_loss(model, lambda m: m.loss(ids[:, :-1], ids[:, 1:], **dropped))
        check(*loss, directions=2)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"scan": True, "kv_heads": 2}, marks=pytest.mark.slow)]
)
def test_documents_of_a_window_do_not_see_each_other(options: dict[str, Any]) -> None:
    window = np.array([3, 1, 4, 0, 5, 9, 2, 6, 5, 0, 8, 7])  # 0 ends a document
    other = window.copy()
    other[[1, 5]] = 7  # of the first two documents

    def changed(**end: int) -> np.ndarray:
        """Return which logits change."""
        model = make(options | end)
        values = jit(lambda ids: model(ids).value)(np.stack([window, other]))
        return np.abs(values[0] - values[1]).max(-1) > 1e-4

    # From the changed id on, to the end of its document.
    np.testing.assert_array_equal(np.flatnonzero(changed(document_end=0)), [1, 2, 3, 5, 6, 7, 8, 9])
    np.testing.assert_array_equal(np.flatnonzero(changed()), np.arange(1, 12))
