"""How fast training batches come, against how fast a model takes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ..gpt.config import GPTConfig
from ..run.recipe import load_data
from ._steps import stepper

SECONDS = 3.0


class Speed(NamedTuple):
    """Tokens a second that the input pipeline gives by itself, and that training takes."""

    given: float
    taken: float

    @property
    def ratio(self) -> float:
        return self.given / self.taken


def pipeline_speed(config: GPTConfig, seconds: float = SECONDS) -> Speed:
    """Times the input pipeline of a config alone, then its training step alone.

    Args:
      config: A GPT's.
      seconds: How long each is timed; what starts them is not counted.
    """
    batches = load_data(config).training(config.seed)
    tokens = config.data.batch_size * config.data.sequence_length
    step = stepper(config)
    return Speed(
        tokens * _calls_per_second(lambda: next(batches), seconds),
        tokens * _calls_per_second(step, seconds),
    )


def _calls_per_second(function: Callable[[], object], seconds: float) -> float:
    for _ in range(3):
        function()
    calls, elapsed, start = 0, 0.0, time.perf_counter()
    while elapsed < seconds:
        function()
        calls, elapsed = calls + 1, time.perf_counter() - start
    return calls / elapsed
