"""The training loop: the one place where a step follows a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .state import TrainState

Step = Callable[[TrainState, Any, Any], tuple[TrainState, dict[str, Any]]]
Watch = Callable[[int, TrainState, dict[str, Any], Any], TrainState | None]


def advance(
    step: Step,
    state: TrainState,
    batches: Iterator[Any],
    start: int,
    stop: int,
    watch: Watch | None = None,
) -> TrainState:
    """Does the steps from `start` to `stop`, without waiting for the device.

    Args:
      step: Of `make_train_step`.
      state: Before the first of them; its memory is reused.
      batches: One for each step, as the step takes them.
      start: Steps done before.
      stop: Steps done in the end.
      watch: Called after each step with the steps done, the state, the step's metrics and its
        batch; returns the state to go on with, or None to stop there.

    Returns:
      The state after the last step.
    """
    for index in range(start, stop):
        batch = next(batches)
        state, values = step(state, batch, np.int32(index))
        if watch is not None:
            following = watch(index + 1, state, values, batch)
            if following is None:
                break
            state = following
    return state
