"""The training step of a config as a program of its own, to be timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..config import RunConfig
from ..gpt.config import GPTConfig
from ..run.state import init_state
from ..train import make_train_step


def random_batch(config: GPTConfig) -> np.ndarray:
    """Windows of random tokens, always the same."""
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    return np.random.default_rng(0).integers(0, config.model.vocab, shape).astype(np.int32)


def stepper(config: GPTConfig) -> Callable[[], object]:
    """A function that trains one step further, on the same random tokens, and waits for it."""
    return stepper_on(config, random_batch(config))


def stepper_on(config: RunConfig, batch: Any) -> Callable[[], object]:
    """A function that trains one step further, on the same batch, and waits for it."""
    graphdef, optimizer, state = init_state(config)
    step = make_train_step(graphdef, optimizer, config.scalify)
    done = 0

    def advance() -> object:
        nonlocal state, done
        state, values = step(state, batch, np.int32(done))
        done += 1
        return jax.block_until_ready((state, values))

    return advance


def seconds_to_compile(config: GPTConfig) -> float:
    """How long tracing, lowering and compiling the step takes, with nothing of it cached."""
    graphdef, optimizer, state = init_state(config)
    batch = random_batch(config)
    jax.clear_caches()
    start = time.perf_counter()
    make_train_step(graphdef, optimizer, config.scalify).lower(state, batch, np.int32(0)).compile()
    return time.perf_counter() - start
