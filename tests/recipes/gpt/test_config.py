"""What the schema of a GPT promises about itself holds."""

from typing import get_args

import pytest
from flax import nnx
from pydantic import ValidationError

from recipes.config.run import Policy
from recipes.gpt.config import GPTConfig
from recipes.gpt.task import build
from recipes.registry import load_config
from unitscale import nn

from ..configs import CONFIGS


def test_parity_is_the_documented_size() -> None:
    config = load_config(CONFIGS / "gpt" / "parity.yaml")
    shape = config.model.width, config.model.layers, config.data.sequence_length
    assert (*shape, config.data.batch_size, config.train.steps) == (128, 4, 128, 16, 1200)


def test_policies_are_presets_of_the_library() -> None:
    for policy in get_args(Policy):
        assert nn.as_policy(policy)


def test_config_is_frozen() -> None:
    config = GPTConfig(name="x")
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1


@pytest.mark.parametrize("library", ["unitscale", "plain"])
def test_biases_of_linear_layers(library: str) -> None:
    """All six linear layers of a Transformer layer have one; the readout has not."""
    model = {"library": library, "layers": 1, "norm": "layer", "norm_eps": None}
    optimizer = {"umup": library == "unitscale"}
    count = {}
    for bias in (False, True):
        config = GPTConfig.model_validate(
            {"name": "x", "model": model | {"bias": bias}, "optimizer": optimizer}
        )
        state = nnx.eval_shape(lambda config=config: nnx.state(build(config), nnx.Param))
        names = [str(path[-1]) for path, _ in nnx.to_flat_state(state)]
        count[bias] = names.count("bias")
    assert count[True] - count[False] == 6
