"""Trains the model of a recipe: data, loss, loop, from top to bottom.

The loop never waits for the device between log lines. So that a value that is not finite can still
be traced, a step whose loss or gradient is not finite changes nothing, and neither does any step
after it: the state stays that of the last good step until the loop looks.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from unitscale.core import is_scaled

from .batch import loss_inputs
from .checkpoint import Checkpoints
from .config import RunConfig
from .convert import formats
from .data import Batches
from .errors import RecipeError, cannot_write
from .evaluate import make_evaluation, mean_loss, shown
from .metrics import Metrics, NoMetrics
from .monitor import watch
from .optimizer import make_schedule
from .placement import on_mesh, open_mesh, place, place_batch, share, whole
from .plots import plot_loss, plot_rms
from .probe import probe
from .processes import (
    SharedError,
    check_alike,
    is_first,
    is_lost,
    largest,
    lost_message,
    together,
)
from .progress import Reporter
from .rundir import flatten, open_run, run_folder
from .scaling import plain
from .signals import StopRequest
from .state import init_state, restore
from .step import make_train_step
from .task import Data, build, closing, load_data


class Outcome(NamedTuple):
    """How training ended; `signal` is the number of the signal that stopped it, or None."""

    folder: Path
    step: int
    validation_loss: float | None
    signal: int | None


def train(
    config: RunConfig,
    *,
    fresh: bool = False,
    convert: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Trains, or goes on from the newest complete checkpoint of the same run.

    Of several processes (see `recipes.processes`) all call it alike, and the first reports.

    Args:
      config: The run; everything it leaves behind is in `<train.runs_dir>/<name>/`.
      fresh: Moves an earlier run of this name aside instead of resuming it.
      convert: Goes on with a run of other number formats (`recipes.convert.FORMAT_KEYS`).
      console: Where to report; standard output by default.

    Returns:
      The run's folder, its last step and its validation loss.

    Raises:
      RecipeError: Unusable data or run folder, a full disk, a loss that is not finite, or processes
        that disagree or no longer answer.
    """
    console = Console() if console is None else console
    console = console if is_first() else Console(quiet=True)
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with together():
        data = load_data(config)
    told = flatten(config.model_dump()) | {"--fresh": fresh, "--convert": convert}
    check_alike(told | {"the text's digest": data.digest})
    folder = run_folder(config)
    with together():
        if is_first():
            open_run(config, fresh=fresh, convert=convert)
    with together():
        run = _Run(config, folder, data)
    parameters = sum(x.size for x in jax.tree.leaves(run.state.params, is_leaf=is_scaled))
    say(
        f"{config.name}: {parameters:,} parameters, {data.summary}, "
        f"policy {config.policy}, in {folder}"
    )
    lost = False
    try:
        with together():
            start = run.resume(say)
            if is_first():
                data.save(folder)  # of what was resumed from other data, nothing is overwritten
        signal = run.loop(start, console)
        if signal is not None:
            step = int(run.state.step)
            say(f"stopped by {signal.name} after step {step}; run the same command to resume")
            return Outcome(folder, step, None, int(signal))
        return _finish(run, say)
    except OSError as error:
        raise cannot_write(folder, error, kept=run.checkpoints.what_is_safe) from error
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if lost := is_lost(error):
            safe = run.checkpoints.what_is_complete
            raise RecipeError(lost_message(error, safe), exit_code=1) from error
        raise
    finally:
        if not lost:
            run.checkpoints.close()


class _Run:
    """Model, optimizer, data and compiled steps of one run."""

    def __init__(self, config: RunConfig, folder: Path, data: Data):
        self.config, self.folder, self.data = config, folder, data
        self.graphdef, optimizer, self.state = init_state(config)
        self.mesh = open_mesh(config)
        self.state = place(self.state, self.mesh)
        self.schedule = make_schedule(config.optimizer, config.train.steps)
        self.batches: Batches = data.training(config.seed, **share(self.mesh))
        self.checkpoints = Checkpoints(folder, keep=config.train.keep)
        self.train_step = make_train_step(
            self.graphdef,
            optimizer,
            config.scalify,
            tolerated=config.optimizer.skip_nonfinite,
            mesh=self.mesh,
            exchange=config.mesh and config.mesh.gradients,
        )
        self.evaluate = make_evaluation(self.graphdef, config.scalify)

    def resume(self, say) -> int:
        """Loads the newest whole checkpoint; returns the number of steps done."""
        restored = restore(self.config, self.checkpoints, self.state, self.mesh, say)
        if restored is None:
            return 0
        if restored.facts["text"] != self.data.digest:
            raise RecipeError(
                f"data: it is not what {self.folder} was trained on (another Python, or changed "
                "files); restore the files, change name, or pass --fresh"
            )
        self.state = restored.state
        self.batches.set_state(restored.position)
        steps = self.config.train.steps
        say(
            f"all {steps} steps are done"
            if restored.step == steps
            else f"resuming after step {restored.step} of {steps}"
        )
        return restored.step

    def loop(self, start: int, console: Console) -> Any:
        """Trains from step `start` to the end; returns the signal that stopped it, or None."""
        settings = self.config.train
        tokens = self.config.data.batch_size * self.config.data.sequence_length
        if start >= settings.steps:
            return None
        recent: deque[Any] = deque(maxlen=settings.log_every + 1)
        step = on_mesh(self.train_step, self.state, self.mesh)
        metrics = Metrics(self.folder, resume_step=start) if is_first() else NoMetrics()
        try:
            with StopRequest() as stop, Reporter(settings.steps, start, tokens, console) as report:
                clock, clock_step, paused = time.perf_counter(), start, 0.0
                for index in range(start, settings.steps):
                    batch = next(self.batches)
                    shares = place_batch(batch, self.mesh)
                    recent.append(shares)
                    self.state, values = step(self.state, shares, np.int32(index))
                    done = index + 1
                    report.advance(done)
                    if index == start and settings.log_every > 1:
                        jax.block_until_ready(values)  # keeps compilation out of the speed
                        clock, clock_step = time.perf_counter(), done
                    logging = done % settings.log_every == 0 or done == settings.steps
                    signal = asked_to_stop(stop, logging=logging)  # once, so that a stop is saved
                    stopping = signal is not None
                    ending = done == settings.steps or stopping
                    if logging:
                        loss = float(values["loss"])  # waits for the device
                        self._check_finite(done, recent)
                        seconds = time.perf_counter() - clock - paused
                        speed = (done - clock_step) * tokens / max(seconds, 1e-9)
                        metrics.write(
                            done,
                            loss=loss,
                            gradient_norm=float(values["gradient_norm"]),
                            learning_rate=float(np.asarray(self.schedule(index - self.skipped))),
                            tokens_per_second=speed,
                            **self._watch(report.say),
                            **({} if self.state.skips is None else {"skipped": self.skipped}),
                        )
                        report.report(done, loss, speed)
                        clock, clock_step, paused = time.perf_counter(), done, 0.0
                    validating = done % settings.eval_every == 0 and not stopping
                    saving = done % settings.checkpoint_every == 0 or ending
                    if validating or saving:
                        jax.block_until_ready(values)  # these steps count, what follows does not
                    pause = time.perf_counter()
                    if validating:
                        validation = self.validation_loss()
                        metrics.write(done, validation_loss=validation)
                        report.say(f"step {done}  validation loss {validation:.4f}")
                    if saving:
                        self._check_finite(done, recent)
                        self.save(done)
                    paused += time.perf_counter() - pause
                    if stopping:
                        break
                self.checkpoints.wait()
                return signal
        finally:
            metrics.close()

    def save(self, step: int) -> None:
        facts = {"formats": formats(self.config), "text": self.data.digest}
        self.checkpoints.save(step, self.state, self.batches.get_state(), facts, wait=False)

    @property
    def skipped(self) -> int:
        """Steps left out so far; a schedule does not count them."""
        return 0 if self.state.skips is None else int(self.state.skips.total)

    def validation_loss(self) -> float:
        batches = self.data.validation(self.config.train.eval_batches)
        return mean_loss(self.evaluate, self.state.params, self.state.rest, batches)

    def model(self) -> Any:
        """The model as it is, whole in every process."""
        params, rest = plain(self.config.scalify, whole((self.state.params, self.state.rest)))
        return nnx.merge(self.graphdef, params, rest)

    def _watch(self, say) -> dict[str, float]:
        self.state, shares = watch(self.config, self.graphdef, self.state, say)
        return shares

    def _check_finite(self, done: int, recent: deque[Any]) -> None:
        """Stops the run when some step since the last look was not finite."""
        good = int(self.state.step)
        if good == done:
            return
        batch = recent[good - done]  # the batch of the first step that did not count
        reading = probe(self.model(), *loss_inputs(whole(batch)))
        where = reading.first_not_finite() or "the gradient norm (dropout or the sum overflowed)"
        tolerated = self.config.optimizer.skip_nonfinite
        after = f", after {tolerated} such steps in a row that were left out" if tolerated else ""
        raise SharedError(
            f"step {good + 1}: the loss or its gradient is not finite{after}; the first value that "
            f"is not finite is {where}; {self.checkpoints.what_is_safe}; lower "
            "optimizer.learning_rate, set optimizer.clip_norm, or choose a policy of wider range",
            exit_code=1,
        )


def asked_to_stop(stop: StopRequest, *, logging: bool) -> Signals | None:
    """The signal to stop at; processes agree on it where they wait for their devices anyway."""
    if jax.process_count() == 1:
        return stop.signal
    number = largest(int(stop.signal or 0)) if logging else 0
    return Signals(number) if number else None


def _finish(run: _Run, say) -> Outcome:
    """Validation loss, plots and closing lines of a run that has done all its steps."""
    config, step = run.config, int(run.state.step)
    validation = run.validation_loss()
    params, rest = whole((run.state.params, run.state.rest))  # what follows is for one process
    run.state = run.state._replace(params=params, rest=rest)
    if not is_first():
        return Outcome(run.folder, step, validation, None)
    plot_run(run)
    say(f"validation loss {shown(config, validation)}")
    for line in closing(config, run.data, run.model(), run.folder):
        say(line)
    say(f"checkpoint, metrics and plots are in {run.folder}")
    return Outcome(run.folder, step, validation, None)


def plot_run(run: _Run) -> None:
    """Draws the losses, and the RMS of all layers before and after training."""
    batch = next(run.data.validation(1))
    models = {"at initialisation": build(run.config)}
    models[f"after {int(run.state.step)} steps"] = run.model()
    plot_loss(run.folder, per=run.config.loss_unit)
    plot_rms(
        run.folder,
        {label: probe(model, *loss_inputs(batch)) for label, model in models.items()},
    )
