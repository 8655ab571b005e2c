"""Runs of one config that differ in learning rate and seed, through the one step and loop."""

from __future__ import annotations

import math
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
from ..run.step import make_train_step
from ..run.steps import advance


class Trials:
    """Whole runs of one config, compiled once for all learning rates and seeds.

    Args:
      config: The runs; its own learning rate and seed are not used.

    Raises:
      RecipeError: The data is missing or unusable.
    """

    def __init__(self, config: RunConfig):
        self.config, self.data = config, recipe_of(config).load_data(config)
        self._graphdef, _, state = self._init(config.seed)
        params, settings = state.params, config.optimizer

        @jax.jit
        def step(state: TrainState, rate: Any, batch: Any, index: Any):
            # The rate of this trial, a traced number, in place of the config's.
            own = config.model_copy(
                update={"optimizer": settings.model_copy(update={"learning_rate": rate})}
            )
            optimizer = make_optimizer(own, params)
            train_step = make_train_step(
                self._graphdef, optimizer, config.scalify, settings=settings
            )
            return train_step(state, batch, index)[0]

        self._step = jax.jit(jax.vmap(step, (0, 0, None, None)), donate_argnums=0)
        evaluate = make_evaluation(self._graphdef, config.scalify)
        self._evaluate = jax.jit(jax.vmap(evaluate, (0, 0, None)))
        # Batched, with a kernel for each run, convolutions are grouped ones, which XLA's CPU
        # backend does slowly: there one run follows another.
        arguments = state, np.float32(1), recipe_of(config).abstract_batch(config), np.int32(0)
        slow = "conv_general_dilated" in str(step.trace(*arguments).jaxpr)
        self._together = 1 if slow and jax.default_backend() == "cpu" else config.sweep.rates

    def __call__(self, rates: Sequence[float], seed: int) -> list[float]:
        """The validation loss at each rate; infinite where a step's loss was not finite."""
        losses: list[float] = []
        size = self._together
        for start in range(0, len(rates), size):
            group = list(rates[start : start + size])
            # Always as many, so that the program is compiled once.
            losses += self._train((group * size)[:size], seed)[: len(group)]
        return losses

    def _init(self, seed: int):
        return init_state(self.config.model_copy(update={"seed": seed}))

    def _train(self, rates: list[float], seed: int) -> list[float]:
        steps, many = self.config.train.steps, np.asarray(rates, np.float32)
        first = self._init(seed)[2]
        state: Any = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(rates)), first)

        def step(state: TrainState, batch: Any, index: Any):
            return self._step(state, many, batch, index), {}

        state = advance(step, state, self.data.training(seed), 0, steps)
        batches = self.data.validation(self.config.train.eval_batches)
        found = [self._evaluate(state.params, state.rest, batch) for batch in batches]
        losses = np.asarray(jax.device_get(found), np.float64).mean(axis=0)
        # After a step that was not finite, and not left out by the config, no other one counts.
        whole = np.isfinite(losses) & (np.asarray(state.step) == steps)
        return [float(x) if ok else math.inf for x, ok in zip(losses, whole, strict=True)]
