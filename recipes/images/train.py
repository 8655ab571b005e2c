"""Trains a classifier of images: loss, step, loop, from top to bottom.

The training step is a plain float32 program. Under any format but `plain`, `scalify` turns it, with
its gradients and its optimizer, into one whose parameters, optimizer state and activations are
ScaledArrays; there is no other difference.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from unitscale import as_scaled, to_array
from unitscale.transforms import scalify

from ..errors import RecipeError, cannot_write
from ..run.folder import open_run
from ..run.metrics import Metrics
from ..run.plots import plot_loss
from ..run.progress import Reporter
from ..run.signals import StopRequest
from .config import Format, MnistConfig, OptimizerConfig
from .data import Dataset, load_dataset
from .model import build

STORAGE: dict[Format, Any] = {
    "plain": None,
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "fp8": jnp.float16,
}
"""What ScaledArrays are stored in, by format."""


class Outcome(NamedTuple):
    """How training ended; `signal` is the number of the signal that stopped it, or None."""

    folder: Path
    step: int
    accuracy: float | None
    signal: int | None


class TrainState(NamedTuple):
    """What a step changes."""

    params: Any
    opt_state: Any


class Program(NamedTuple):
    """The functions of a run, and what they start from.

    `step` is `(state, images, labels) -> (state, loss)`, and `evaluate` is
    `(params, images, labels) -> (correct, loss)`, summed over the labels that are not -1; images
    are standardized.
    """

    state: TrainState
    step: Callable[..., tuple[TrainState, jax.Array]]
    evaluate: Callable[..., tuple[jax.Array, jax.Array]]


def make_program(config: MnistConfig, data: Dataset) -> Program:
    """The model of a config and its optimizer as plain float32 functions."""
    model = build(config, data.train.images.shape[1:], data.classes)
    graphdef, params = nnx.split(model, nnx.Param)
    optimizer = make_optimizer(config.optimizer)

    def losses(params: Any, images: jax.Array, labels: jax.Array):
        logits = nnx.merge(graphdef, params)(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels), logits

    def step(state: TrainState, images: jax.Array, labels: jax.Array):
        def mean_loss(params: Any) -> jax.Array:
            return losses(params, images, labels)[0].mean()

        loss, grads = jax.value_and_grad(mean_loss)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), loss

    def evaluate(params: Any, images: jax.Array, labels: jax.Array):
        loss, logits = losses(params, images, jnp.maximum(labels, 0))
        correct = jnp.argmax(logits, axis=-1) == labels
        return jnp.sum(correct), jnp.sum(jnp.where(labels < 0, 0.0, loss))

    return Program(TrainState(params, optimizer.init(params)), step, evaluate)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """SGD with momentum, or Adam, at a constant learning rate."""
    if config.name == "sgd":
        return optax.sgd(config.learning_rate, momentum=config.momentum or None)
    return optax.adam(config.learning_rate, b1=config.momentum)


def in_format(program: Program, number_format: Format) -> Program:
    """Compiles a plain program, for ScaledArrays unless the format is plain."""
    dtype = STORAGE[number_format]
    if dtype is None:
        return Program(program.state, jax.jit(program.step), jax.jit(program.evaluate))

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        scaled = scalify(function)
        # Standardized images are at unit size as they are.
        return jax.jit(
            lambda state, images, labels: scaled(state, as_scaled(images, 1, dtype), labels)
        )

    state = as_scaled(program.state, dtype=dtype)
    return Program(state, compiled(program.step), compiled(program.evaluate))


def train(config: MnistConfig, *, fresh: bool = False, console: Console | None = None) -> Outcome:
    """Trains from the start, and measures the accuracy on the test images after each epoch.

    Args:
      config: The run; everything it leaves behind is in `<train.runs_dir>/<name>/`.
      fresh: Moves an earlier run of this name aside instead of writing over its metrics.
      console: Where to report; standard output by default.

    Returns:
      The run's folder, its last step and its accuracy.

    Raises:
      RecipeError: Unusable data or run folder, a full disk, or a loss that is not finite.
    """
    console = Console() if console is None else console
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    data = load_dataset(config.data)
    folder = open_run(config, fresh=fresh)
    plain = make_program(config, data)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(plain.state.params))
    say(
        f"{config.name}: {parameters:,} parameters, {len(data.train.labels):,} training images, "
        f"{data.classes} classes, format {config.format}, in {folder}"
    )
    try:
        outcome = _loop(config, data, folder, in_format(plain, config.format), console)
        if outcome.signal is None:
            plot_loss(folder, per="image")
    except OSError as error:
        raise cannot_write(folder, error) from error
    if outcome.signal is not None:
        name = Signals(outcome.signal).name
        say(f"stopped by {name} after step {outcome.step}; run the same command to start again")
    else:
        say(f"test accuracy {outcome.accuracy:.4f}; metrics and plot are in {folder}")
    return outcome


def _loop(
    config: MnistConfig, data: Dataset, folder: Path, program: Program, console: Console
) -> Outcome:
    settings, size = config.train, config.data.batch_size
    steps = settings.epochs * (len(data.train.labels) // size)
    rng = np.random.default_rng(config.seed)
    state, done, accuracy = program.state, 0, None
    metrics = Metrics(folder)
    try:
        with StopRequest() as stop, Reporter(steps, 0, size, console, "images") as report:
            clock, clock_step = time.perf_counter(), 0
            for epoch in range(1, settings.epochs + 1):
                for batch in data.train.batches(size, rng):
                    state, loss = program.step(state, data.standardized(batch.images), batch.labels)
                    done += 1
                    report.advance(done)
                    logging = done % settings.log_every == 0 or done == steps
                    if logging:
                        value = _finite(loss, done)  # waits for the device
                        speed = (done - clock_step) * size / (time.perf_counter() - clock)
                        metrics.write(done, loss=value, images_per_second=speed)
                        report.report(done, value, speed)
                    if logging or done <= 2:
                        # Keeps compilation out of the speed: zeros have no scale before step 2.
                        jax.block_until_ready(loss)
                        clock, clock_step = time.perf_counter(), done
                    if stop.signal is not None:
                        return Outcome(folder, done, None, int(stop.signal))
                pause = time.perf_counter()
                accuracy, test_loss = measure(program, state.params, data, size)
                _finite(test_loss, done)
                metrics.write(done, test_accuracy=accuracy, test_loss=test_loss)
                report.say(
                    f"epoch {epoch}/{settings.epochs}  test accuracy {accuracy:.4f}  "
                    f"test loss {test_loss:.4f}"
                )
                clock += time.perf_counter() - pause
        return Outcome(folder, done, accuracy, None)
    finally:
        metrics.close()


def _finite(loss: Any, step: int) -> float:
    value = float(to_array(loss))
    if not math.isfinite(value):
        raise RecipeError(
            f"the loss after step {step} is not finite; lower optimizer.learning_rate, or choose a "
            "format of wider range",
            exit_code=1,
        )
    return value


def measure(program: Program, params: Any, data: Dataset, size: int) -> tuple[float, float]:
    """The share of the test images that are classified rightly, and the mean loss on them."""
    correct, total = 0, 0.0
    for batch in data.test.padded_batches(size):
        right, loss = program.evaluate(params, data.standardized(batch.images), batch.labels)
        correct, total = correct + int(to_array(right)), total + float(to_array(loss))
    count = len(data.test.labels)
    return correct / count, total / count
