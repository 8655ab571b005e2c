"""A character model and its optimizer as functions, for one run or for many in one program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from unitscale.optim import umup

from ..text import ByteTokenizer, Corpus, load_corpus
from .config import CharlmConfig
from .model import UnitModel
from .plain import RegularModel


class TrainState(NamedTuple):
    """What a step changes."""

    params: Any
    opt_state: Any


class Program:
    """The functions of a config: `init`, `step` and `evaluate`, none of them compiled.

    Args:
      config: The run.
    """

    def __init__(self, config: CharlmConfig):
        self.config = config
        settings = config.optimizer
        if settings.name == "sgd":
            self.rule = optax.trace(settings.momentum) if settings.momentum else optax.identity()
        else:
            self.rule = optax.scale_by_adam(b1=settings.momentum)
        self.graphdef, params = nnx.split(nnx.eval_shape(lambda: self._model(0)), nnx.Param)
        if config.model.parametrization == "unit":
            own = settings.multipliers.model_dump()
            self.rule = umup(self.rule, params, optimizer=settings.name, multipliers=own)

    def _model(self, seed: Any) -> UnitModel | RegularModel:
        model = self.config.model
        kind = UnitModel if model.parametrization == "unit" else RegularModel
        rngs = nnx.Rngs(params=jax.random.key(seed))
        return kind(model, self.config.data.sequence_length, rngs=rngs)

    def init(self, seed: int) -> TrainState:
        """Fresh parameters of a seed."""
        params = nnx.state(self._model(seed), nnx.Param)
        return TrainState(params, self.rule.init(params))

    def evaluate(self, params: Any, batch: jax.Array) -> jax.Array:
        """Mean loss of a batch (batch, time + 1)."""
        return nnx.merge(self.graphdef, params).loss(batch[:, :-1], batch[:, 1:])

    def step(
        self, state: TrainState, batch: jax.Array, done: Any, rate: Any
    ) -> tuple[TrainState, jax.Array]:
        """One update at a learning rate that falls linearly, to zero after the last step."""
        loss, grads = jax.value_and_grad(self.evaluate)(state.params, batch)
        updates, opt_state = self.rule.update(grads, state.opt_state, state.params)
        now = -rate * (1 - done / self.config.train.steps)
        updates = jax.tree.map(lambda u: now * u, updates)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), loss


def load_text(config: CharlmConfig) -> Corpus:
    """The text of a config, a byte a token."""
    return load_corpus(config.data, ByteTokenizer())


def make_batches(config: CharlmConfig, corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """All text of a run: training (steps, batch, time + 1), validation (examples, time + 1)."""
    batches = corpus.training(config.seed)
    training = np.stack([next(batches) for _ in range(config.train.steps)])
    return training, np.concatenate(list(corpus.validation(config.train.eval_batches)))


class Runs:
    """Whole runs of one config at several learning rates and seeds, compiled once.

    They are one program, batched by vmap; but see `_in_turn`.

    Args:
      config: The runs; its own learning rate is not used.
      training: All training batches, as of `make_batches`.
      validation: All validation batches.
    """

    def __init__(self, config: CharlmConfig, training: np.ndarray, validation: np.ndarray):
        slow = config.model.kind == "conv" and jax.default_backend() == "cpu"
        self._program = Program(config)
        self._train = (_in_turn if slow else _at_once)(self._program)
        self._data = training, validation

    def __call__(self, rates: list[float], seeds: list[int]) -> list[float]:
        """The validation loss of each run; infinite for a run whose loss was not finite."""
        # Not compiled with the rest: the generator of random numbers takes longer to compile than a
        # step, while its kernels for single arrays serve the next model too.
        fresh = {seed: self._program.init(seed) for seed in set(seeds)}
        states = [fresh[seed] for seed in seeds]
        losses = np.asarray(self._train(states, rates, *self._data), np.float64)
        return [float(x) if math.isfinite(x) else math.inf for x in losses]


def _at_once(program: Program) -> Callable[..., Any]:
    """All runs as one program."""

    def run(state: TrainState, rate: jax.Array, training, validation) -> jax.Array:
        def step(state: TrainState, item):
            return program.step(state, item[0], item[1], rate)

        items = training, jnp.arange(program.config.train.steps)
        state, losses = jax.lax.scan(step, state, items)
        return _unless_lost(program.evaluate(state.params, validation), losses)

    many = jax.jit(jax.vmap(run, (0, 0, None, None)))

    def runs(states, rates, training, validation) -> jax.Array:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        return many(stacked, np.asarray(rates, np.float32), training, validation)

    return runs


def _in_turn(program: Program) -> Callable[..., Any]:
    """Run after run, step after step, for convolutions on a CPU.

    Batched, with a kernel for each run, they are grouped convolutions, which XLA's CPU backend does
    slowly; and so it does every convolution inside a loop of a program.
    """
    step, evaluate = jax.jit(program.step), jax.jit(program.evaluate)

    def run(state: TrainState, rate: float, training, validation) -> jax.Array:
        losses = []
        for done, batch in enumerate(training):
            state, loss = step(state, batch, np.int32(done), np.float32(rate))
            losses.append(loss)
        return _unless_lost(evaluate(state.params, validation), jnp.stack(losses))

    def runs(states, rates, training, validation) -> jax.Array:
        pairs = zip(states, rates, strict=True)
        return jnp.stack([run(state, rate, training, validation) for state, rate in pairs])

    return runs


def _unless_lost(loss: jax.Array, losses: jax.Array) -> jax.Array:
    """A run that was lost on the way is not saved by a good end."""
    return jnp.where(jnp.isfinite(losses).all(), loss, jnp.nan)
