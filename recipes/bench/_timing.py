"""Programs to be timed, and comparing the speed of two on a machine that does other things too.

The two take turns in one process, each round in the other order, so that whatever slows the
machine for longer than a call slows both. Ratios are taken within rounds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..config import RunConfig
from ..gpt.config import GPTConfig
from ..run.state import TrainState, init_state
from ..run.step import make_train_step
from ._table import asked


class Times(NamedTuple):
    """Seconds of each round: elapsed, and spent by this process's threads on a CPU."""

    elapsed: list[float]
    cpu: list[float]


def random_batch(config: GPTConfig) -> np.ndarray:
    """Windows of random tokens, always the same."""
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    return np.random.default_rng(0).integers(0, config.model.vocab, shape).astype(np.int32)


def train_step(config: RunConfig) -> tuple[Any, TrainState]:
    """The step of `recipes.train`, and the state before the first one."""
    graphdef, optimizer, state = init_state(config)
    return make_train_step(graphdef, optimizer, config.scalify, settings=config.optimizer), state


def stepper(config: RunConfig, batch: Any) -> Callable[[], object]:
    """A function that trains one step further, on the same batch, and waits for it."""
    return advancing(*train_step(config), batch)


def advancing(
    step: Callable[..., tuple[Any, Any]], state: TrainState, batch: Any
) -> Callable[[], object]:
    """As `stepper`, of a step and its first state."""
    done = 0

    def advance() -> object:
        nonlocal state, done
        state, values = step(state, batch, np.int32(done))
        done += 1
        return jax.block_until_ready((state, values))

    return advance


def seconds(work: Callable[[], object]) -> float:
    """How long a function takes that waits for its own results."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compiled(lower: Callable[[], Any]) -> tuple[Any, float]:
    """A program, and the seconds to trace, lower and compile it with nothing of it cached."""
    jax.clear_caches()
    start = time.perf_counter()
    program = lower().compile()
    return program, time.perf_counter() - start


def interleaved(
    first: Callable[[], object], second: Callable[[], object], rounds: int, warmup: int = 2
) -> tuple[Times, Times]:
    """Times two functions that wait for their own results, in alternating order."""
    functions = (first, second)
    times = (Times([], []), Times([], []))
    for index in range(warmup + rounds):
        for which in (0, 1) if index % 2 else (1, 0):
            cpu = time.process_time()
            elapsed = seconds(functions[which])
            spent = time.process_time() - cpu
            if index >= warmup:
                times[which].elapsed.append(elapsed)
                times[which].cpu.append(spent)
    return times


def ratio(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Columns that compare rounds of `first` with those of `second`, two rounds or more.

    The ratio is the median over that of each round.

    Example:
      >>> ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])["ratio"]
      2.0
    """
    pairs = [a / b for a, b in zip(first, second, strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4)
    return {
        "ratio": middle,
        "ratio of medians": statistics.median(first) / statistics.median(second),
        "lower quartile": low,
        "upper quartile": high,
    }


def compared(first: str, second: str, times: tuple[Times, Times], most: float) -> dict[str, Any]:
    """A table's row about the times of two programs."""
    elapsed, cpu = (ratio(one, other) for one, other in zip(*times, strict=True))
    return {
        f"{first} ms": 1e3 * statistics.median(times[0].elapsed),
        f"{second} ms": 1e3 * statistics.median(times[1].elapsed),
        **elapsed,
        "CPU time ratio": cpu["ratio"],
        **asked(elapsed["ratio"], most=most),
    }
