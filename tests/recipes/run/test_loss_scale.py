"""A loss scale changes no update in float32; one that overflows halves, and doubles with time."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from recipes.gpt.config import GPTConfig
from recipes.run.loss_scale import FIRST, LossScale
from recipes.run.state import TrainState, init_state
from recipes.run.step import make_train_step

BATCH = np.arange(4 * 17, dtype=np.int32).reshape(4, 17)


def after(config: GPTConfig, steps: int, first: float | None = None) -> list[TrainState]:
    """The states of a run, from the one before the first step."""
    graphdef, optimizer, state = init_state(config)
    if first is not None:
        state = state._replace(loss_scale=LossScale(jnp.float32(first), jnp.int32(0)))
    step, states = make_train_step(graphdef, optimizer, settings=config.optimizer), [state]
    for index in range(steps):
        state, _ = step(jax.tree.map(jnp.copy, states[-1]), BATCH, np.int32(index))
        states.append(state)
    return states


def same(one: TrainState, other: TrainState) -> bool:
    kept = [jax.tree.leaves((state.params, state.opt_state)) for state in (one, other)]
    return all(np.array_equal(a, b) for a, b in zip(*kept, strict=True))


def test_a_constant_power_of_two_changes_no_bit(make_config: Callable[..., GPTConfig]) -> None:
    words = ("model.dropout=0.0",)
    plain = after(make_config(*words), 2)[-1]
    assert same(after(make_config(*words, "precision.loss_scale=1024.0"), 2)[-1], plain)


def test_a_scale_follows_the_gradients(make_config: Callable[..., GPTConfig]) -> None:
    """The loss is near 5: times 2^127 it overflows, and times 2^125 it does not."""
    config = make_config("optimizer={loss_scale: dynamic, loss_scale_interval: 2}")
    states = after(config, 5, 2.0**127)
    scales = [state.loss_scale for state in states]
    assert all(scale is not None for scale in scales)
    assert [(np.log2(scale.value), int(scale.good)) for scale in scales if scale] == [
        (127, 0),
        (126, 0),  # left out, and counted
        (125, 0),
        (125, 1),
        (126, 0),  # two in a row
        (125, 0),
    ]
    assert [int(state.step) for state in states] == list(range(6))
    left_out = [same(*pair) for pair in itertools.pairwise(states)]
    assert left_out == [True, True, False, False, True]


def test_the_first_scale(make_config: Callable[..., GPTConfig]) -> None:
    scale = init_state(make_config("precision.loss_scale=dynamic"))[2].loss_scale
    assert scale is not None
    assert float(scale.value) == FIRST
    assert init_state(make_config())[2].loss_scale is None
