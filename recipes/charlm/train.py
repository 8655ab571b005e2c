"""Trains one character model, with metrics and a plot."""

from __future__ import annotations

import math
import time
from pathlib import Path
from signal import Signals
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console

from ..errors import RecipeError, cannot_write
from ..run.folder import open_run
from ..run.metrics import Metrics
from ..run.plots import plot_loss
from ..run.progress import Reporter
from ..run.signals import StopRequest
from .config import CharlmConfig
from .program import Program, load_text


class Outcome(NamedTuple):
    """How training ended; `signal` is the number of the signal that stopped it, or None."""

    folder: Path
    step: int
    loss: float | None
    signal: int | None


def train(config: CharlmConfig, *, fresh: bool = False, console: Console | None = None) -> Outcome:
    """Trains from the start, and measures the validation loss at the end.

    Args:
      config: The run; everything it leaves behind is in `<train.runs_dir>/<name>/`.
      fresh: Moves an earlier run of this name aside instead of writing over its metrics.
      console: Where to report; standard output by default.

    Returns:
      The run's folder, its last step and its validation loss.

    Raises:
      RecipeError: Unusable text or run folder, a full disk, or a loss that is not finite.
    """
    console = Console() if console is None else console
    corpus = load_text(config)
    folder = open_run(config, fresh=fresh)
    program = Program(config)
    state = jax.jit(program.init)(config.seed)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    shape = config.model
    mixing = shape.cell if shape.kind == "rnn" else shape.kind
    _say(
        console,
        f"{config.name}: {shape.parametrization} {mixing}, {parameters:,} parameters, "
        f"{shape.precision}, in {folder}",
    )
    try:
        outcome = _loop(config, program, state, corpus, folder, console)
        if outcome.signal is None:
            plot_loss(folder, per="character")
    except OSError as error:
        raise cannot_write(folder, error) from error
    if outcome.signal is not None:
        name = Signals(outcome.signal).name
        _say(console, f"stopped by {name} after step {outcome.step}; run it again to start anew")
    elif outcome.loss is not None:
        bits = outcome.loss / math.log(2)
        _say(
            console,
            f"validation loss {outcome.loss:.4f} nats, {bits:.4f} bits per character; metrics and "
            f"plot are in {folder}",
        )
    return outcome


def _say(console: Console, message: str) -> None:
    console.print(message, highlight=False, markup=False, soft_wrap=True)


def _loop(config: CharlmConfig, program: Program, state, corpus, folder, console) -> Outcome:
    settings = config.train
    step = jax.jit(program.step, donate_argnums=0)
    batches = corpus.training(config.seed)
    per_step = config.data.batch_size * config.data.sequence_length
    rate = np.float32(config.optimizer.learning_rate or config.start_rate)
    metrics = Metrics(folder)
    try:
        with StopRequest() as stop, Reporter(settings.steps, 0, per_step, console) as bar:
            clock, since = time.perf_counter(), 0
            for done in range(1, settings.steps + 1):
                state, loss = step(state, next(batches), np.int32(done - 1), rate)
                bar.advance(done)
                if done % settings.log_every == 0 or done == settings.steps:
                    value = _finite(loss, done)  # waits for the device
                    speed = (done - since) * per_step / (time.perf_counter() - clock)
                    metrics.write(done, loss=value, tokens_per_second=speed)
                    bar.report(done, value, speed)
                    clock, since = time.perf_counter(), done
                if stop.signal is not None:
                    return Outcome(folder, done, None, int(stop.signal))
        evaluate = jax.jit(program.evaluate)
        found = [evaluate(state.params, b) for b in corpus.validation(settings.eval_batches)]
        loss = _finite(np.mean([float(x) for x in found]), settings.steps)
        metrics.write(settings.steps, validation_loss=loss)
        return Outcome(folder, settings.steps, loss, None)
    finally:
        metrics.close()


def _finite(loss, step: int) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise RecipeError(
            f"the loss after step {step} is not finite; lower optimizer.learning_rate, or choose a "
            "precision of wider range",
            exit_code=1,
        )
    return value
