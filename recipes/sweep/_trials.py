"""Runs of one config that differ in learning rate and seed, through the one step and loop."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config import RunConfig
from ..run.evaluate import make_evaluation
from ..run.optimizer import make_optimizer
from ..run.recipe import recipe_of
from ..run.state import TrainState, init_state
from ..run.step import advance, make_train_step


class Trials:
    """Whole runs of one config, compiled once for all learning rates and seeds."""

    def __init__(self, config: RunConfig):
        self.config, self.data = config, recipe_of(config).load_data(config)
        graphdef, _, state = init_state(config)
        params, settings = state.params, config.optimizer

        @jax.jit
        def step(state: TrainState, rate: Any, batch: Any, index: Any):
            # The rate of this trial, a traced number, in place of the config's.
            own = config.model_copy(
                update={"optimizer": settings.model_copy(update={"learning_rate": rate})}
            )
            optimizer = make_optimizer(own, params)
            train_step = make_train_step(graphdef, optimizer, config.precision, settings=settings)
            return train_step(state, batch, index)[0]

        self._step = jax.jit(jax.vmap(step, (0, 0, None, None)), donate_argnums=0)
        evaluate = make_evaluation(graphdef, config.precision)
        self._evaluate = jax.jit(jax.vmap(evaluate, (0, 0, None)))
        # Batched, with a kernel for each run, convolutions are grouped ones, which XLA's CPU
        # backend does slowly: there one run follows another.
        arguments = state, np.float32(1), recipe_of(config).abstract_batch(config), np.int32(0)
        slow = "conv_general_dilated" in str(step.trace(*arguments).jaxpr)
        self._together = 1 if slow and jax.default_backend() == "cpu" else config.sweep.rates

    def __call__(self, rates: Sequence[float], seed: int) -> list[float]:
        """The validation loss at each rate; infinite where a step's loss was not finite."""
        size, steps = self._together, self.config.train.steps
        # Groups are always as large, so that the program is compiled once.
        padded = [*rates, *([rates[-1]] * (-len(rates) % size))]
        groups = np.asarray(padded, np.float32).reshape(-1, size)
        first = self._init(seed)
        copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * size), first)
        states: Any = [jax.tree.map(jnp.copy, copies) for _ in groups]

        def step(states: Any, batch: Any, index: Any) -> tuple[Any, dict[str, Any]]:
            pairs = zip(states, groups, strict=True)
            return [self._step(state, many, batch, index) for state, many in pairs], {}

        states = advance(step, states, self.data.training(seed), 0, steps)
        batches = list(self.data.validation(self.config.train.eval_batches))
        losses: list[float] = []
        for state in states:
            found = [self._evaluate(state.params, state.rest, batch) for batch in batches]
            means = np.mean(jax.device_get(found), axis=0, dtype=np.float64)
            # After a step that was not finite, and not left out by the config, no other one counts.
            whole = np.isfinite(means) & (np.asarray(state.step) == steps)
            losses += np.where(whole, means, np.inf).tolist()
        return losses[: len(rates)]

    def _init(self, seed: int) -> TrainState:
        return init_state(self.config.model_copy(update={"seed": seed}))[2]
