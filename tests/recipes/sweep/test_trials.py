"""Many runs in one program are those runs."""

import math

import jax
import numpy as np
import pytest

from recipes.config import RunConfig
from recipes.run.evaluate import make_evaluation, mean_loss
from recipes.run.recipe import recipe_of
from recipes.run.state import init_state
from recipes.run.step import advance, make_train_step
from recipes.sweep._trials import Trials

from ..characters import make


def alone(config: RunConfig, rate: float, seed: int) -> float:
    """The validation loss of a run of its own."""
    optimizer = config.optimizer.model_copy(update={"learning_rate": rate})
    config = config.model_copy(update={"seed": seed, "optimizer": optimizer})
    graphdef, rule, state = init_state(config)
    data, steps = recipe_of(config).load_data(config), config.train.steps
    step = make_train_step(graphdef, rule, settings=config.optimizer)
    state = advance(step, state, data.training(seed), 0, steps)
    batches = data.validation(config.train.eval_batches)
    return mean_loss(make_evaluation(graphdef), state.params, state.rest, batches)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "conv"])
def test_runs_of_all_rates_and_seeds(kind, tmp_path) -> None:
    config = make(tmp_path, model={"kind": kind}, train={"eval_batches": 2})
    trials, compiled = Trials(config), []
    step = trials._step
    trials._step = lambda *args: compiled.append(step.lower(*args).as_text()) or step(*args)
    # Convolutions on a CPU are not batched: see there.
    batched = kind != "conv" or jax.default_backend() != "cpu"
    assert trials._together == (3 if batched else 1)
    found = [*trials([0.01, 0.1, 1e30], 0), *trials([0.1], 1)]
    assert len(set(compiled)) == 1
    assert found[2] == math.inf
    expected = [alone(config, rate, seed) for rate, seed in ((0.01, 0), (0.1, 0), (0.1, 1))]
    np.testing.assert_allclose([*found[:2], found[3]], expected, rtol=1e-5)
    assert abs(found[1] - found[0]) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"umup": False, "name": "adamw", "weight_decay": 0.1, "clip_norm": 0.5},
        {"name": "adamw", "weight_decay": 0.1, "warmup_steps": 1, "schedule": "cosine"},
        {
            "name": "adamw",
            "weight_decay": 0.1,
            "weights": "float16",
            "moments": ["float8_e4m3fn", "float16"],
        },
    ],
    ids=["plain", "u-muP", "few bits"],
)
def test_a_rate_is_the_optimizer_s_own(settings, tmp_path) -> None:
    """It moves neither the decay of u-muP nor the norm at which gradients are clipped."""
    library = "unitscale" if settings.get("umup", True) else "plain"
    config = make(tmp_path, model={"library": library}, optimizer=settings)
    (found,) = Trials(config)([0.03], 0)
    np.testing.assert_allclose(found, alone(config, 0.03, 0), rtol=1e-5)
