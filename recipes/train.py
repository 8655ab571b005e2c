"""Trains the model of a recipe: data, loss, loop, from top to bottom.

The loop never waits for the device between log lines. So that a value that is not finite can still
be traced, a step whose loss or gradient is not finite changes nothing, and neither does any step
after it: the state stays that of the last good step until the loop looks.
"""

import contextlib
import functools
import math
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from unitscale.core import is_scaled

from .batches import Batches, Data, loss_inputs
from .config import RunConfig
from .errors import RecipeError
from .run.checkpoint import Checkpoints
from .run.convert import formats
from .run.evaluate import make_evaluation, mean_loss, save_scores, shown, shown_scores
from .run.folder import flatten, is_sweep, locked, open_run, other_data, run_folder
from .run.optimizer import make_schedule, updates_done
from .run.precision import plain, watch_overflow
from .run.probe import plot_loss, plot_rms, probe
from .run.processes import (
    SharedError,
    StopRequest,
    check_alike,
    is_first,
    is_lost,
    largest,
    lost_message,
    on_mesh,
    open_mesh,
    place,
    place_batch,
    share,
    together,
    whole,
)
from .run.recipe import build_model, recipe_of
from .run.report import Metrics, Reporter, Stopwatch, check_logger, open_metrics
from .run.state import TrainState, init_state, restore, with_kept_tokenizer
from .run.step import advance, make_train_step


class Outcome(NamedTuple):
    """The result of training; `signal` is the number of the signal that stopped it, or None."""

    folder: Path
    step: int
    validation_loss: float | None
    scores: dict[str, float]
    signal: int | None


def train(
    config: RunConfig,
    *,
    fresh: bool = False,
    convert: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Trains, or goes on from the newest complete checkpoint of the same run.

    Of several processes (see `recipes.run.processes`) all call it alike, and the first reports.

    Args:
      config: The run; everything it leaves behind is in `<train.runs_dir>/<name>/`.
      fresh: Moves an earlier run of this name aside instead of resuming it.
      convert: Goes on with a run of other number formats (`recipes.config.FORMAT_KEYS`).
      console: Where to report; standard output by default.

    Returns:
      The run's folder, its last step and its validation loss.

    Raises:
      RecipeError: Unusable data or run folder, one that another process trains in, a full disk, a
        loss, weights or a validation loss that are not finite, or processes that disagree or no
        longer answer.
    """
    console = Console() if console is None else console
    console = console if is_first() else Console(quiet=True)
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with together():
        data = recipe_of(config).load_data(config if fresh else with_kept_tokenizer(config))
    told = flatten(config.model_dump()) | {"--fresh": fresh, "--convert": convert}
    check_alike(told | {"the text's digest": data.digest})
    with contextlib.ExitStack() as held:
        with together():
            if is_first():
                check_logger(config)
                held.enter_context(locked(config))
                if not fresh and is_sweep(folder := run_folder(config)):
                    raise RecipeError(
                        f"name: {folder} is the folder of a sweep; change name, or go on with it "
                        f"by `python -m recipes sweep`"
                    )
                open_run(config, fresh=fresh, convert=convert)
        return _train(config, data, console, say)


def _train(config: RunConfig, data: Data, console: Console, say: Callable[[str], None]) -> Outcome:
    """Trains or goes on, in an open folder."""
    folder = run_folder(config)
    with together():
        run = _Run(config, folder, data)
    parameters = sum(x.size for x in jax.tree.leaves(run.state.params, is_leaf=is_scaled))
    say(
        f"{config.name}: {parameters:,} parameters, {data.summary}, "
        f"policy {config.precision.policy}, in {folder}"
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
            return Outcome(folder, step, None, {}, int(signal))
        return _finish(run, say)
    except OSError as error:
        raise RecipeError(
            f"cannot write to {folder}: {error.strerror or error}; {run.checkpoints.what_is_safe}; "
            "free space or change permissions, then run the same command again",
            exit_code=1,
        ) from error
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
        self.train_step = make_train_step(self.graphdef, optimizer, config, mesh=self.mesh)
        self.evaluate = make_evaluation(self.graphdef, config.precision, mesh=self.mesh)
        self.speeds: list[float] = []  # between log lines

    def resume(self, say) -> int:
        """Loads the newest whole checkpoint; returns the number of steps done."""
        restored = restore(self.config, self.checkpoints, self.state, self.mesh, say)
        if restored is None:
            return 0
        if restored.facts["text"] != self.data.digest:
            raise other_data(self.folder)
        self.state = restored.state
        self.batches.set_state(restored.position)
        steps = self.config.train.steps
        say(
            f"all {steps} steps are done"
            if restored.step == steps
            else f"resuming after step {restored.step} of {steps}"
        )
        return restored.step

    def loop(self, start: int, console: Console) -> Signals | None:
        """Trains from step `start` to the end; returns the signal that stopped it, or None."""
        settings, data = self.config.train, self.config.data
        if start >= settings.steps:
            return None
        step = on_mesh(self.train_step, self.state, self.mesh)
        shares = (place_batch(batch, self.mesh) for batch in self.batches)
        with (
            contextlib.closing(open_metrics(self.config, self.folder, start)) as metrics,
            StopRequest() as stop,
            Reporter(settings.steps, start, data.step_size, console, data.step_unit) as report,
        ):
            watch = _Watch(self, start, metrics, stop, report)
            self.state = advance(step, self.state, shares, start, settings.steps, watch)
            self.checkpoints.wait()
        return watch.signal

    def save(self, step: int) -> None:
        self.check_weights(step)
        facts = {"formats": formats(self.config), "text": self.data.digest}
        self.checkpoints.save(step, self.state, self.batches.get_state(), facts, wait=False)

    @property
    def skipped(self) -> int:
        """Steps left out so far, where the config tolerates some in a row."""
        return 0 if self.state.skips is None else int(self.state.skips.total)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last update, or of the first if there was none yet."""
        last = max(int(updates_done(self.state.opt_state)) - 1, 0)
        return float(np.asarray(self.schedule(last)))

    def validation_loss(self, done: int) -> float:
        batches = self.data.validation(self.config.train.eval_batches)
        loss = mean_loss(self.evaluate, self.state.params, self.state.rest, batches)
        if not math.isfinite(loss):
            kept = self.checkpoints.newest == done
            safe = (
                "its checkpoint has the same weights, so pass --fresh to begin again"
                if kept
                else ""
            )
            raise self.ruined(f"step {done}: the validation loss is not finite", safe)
        return loss

    def check_weights(self, done: int) -> None:
        """Stops the run before weights are kept that an update has ruined."""
        if not _is_finite(jax.tree.leaves(self.state.params)):
            raise self.ruined(f"step {done}: its update has left weights that are not finite")

    def ruined(self, what: str, safe: str = "") -> RecipeError:
        """An error that says what is safe, and what to change."""
        return SharedError(
            f"{what}; {safe or self.checkpoints.what_is_safe}; lower optimizer.learning_rate, set "
            "optimizer.clip_norm, or choose a policy of wider range",
            exit_code=1,
        )

    def model(self) -> Any:
        """The model as it is, whole in every process."""
        params, rest = plain(self.config.precision, whole((self.state.params, self.state.rest)))
        return nnx.merge(self.graphdef, params, rest)

    def check_finite(self, done: int, recent: deque[Any]) -> None:
        """Stops the run when some step since the last look was not finite."""
        good = int(self.state.step)
        if good == done:
            return
        batch = recent[good - done]  # the batch of the first step that did not count
        reading = probe(self.model(), *loss_inputs(whole(batch)))
        where = reading.first_not_finite() or "the gradient norm (dropout or the sum overflowed)"
        tolerated = self.config.optimizer.skip_nonfinite
        after = f", after {tolerated} such steps in a row that were left out" if tolerated else ""
        raise self.ruined(
            f"step {good + 1}: the loss or its gradient is not finite{after}; the first value that "
            f"is not finite is {where}"
        )


class _Watch:
    """Log lines, validation and checkpoints after a step, each at its interval."""

    def __init__(
        self, run: _Run, start: int, metrics: Metrics, stop: StopRequest, report: Reporter
    ):
        self.run, self.metrics, self.stop, self.report = run, metrics, stop, report
        self.settings = run.config.train
        self.start, self.signal = start, None
        self.recent: deque[Any] = deque(maxlen=self.settings.log_every + 1)
        self.clock = Stopwatch(start)

    def __call__(
        self, done: int, state: TrainState, values: dict[str, Any], batch: Any
    ) -> TrainState | None:
        run, settings = self.run, self.settings
        run.state = state
        self.recent.append(batch)
        self.report.advance(done)
        if done == self.start + 1:
            jax.block_until_ready(values)  # keeps compilation out of the speed
            self.clock.restart(done)
        logging = done % settings.log_every == 0 or done == settings.steps
        self.signal = asked_to_stop(self.stop, logging=logging)  # once, so that a stop is saved
        ending = done == settings.steps or self.signal is not None
        if logging:
            self._log(done, values)
        validating = done % settings.eval_every == 0  # also before a stop: resumed, it is past
        saving = done % settings.checkpoint_every == 0 or ending
        if validating or saving:
            jax.block_until_ready(values)  # these steps count, what follows does not
            with self.clock.paused():
                run.check_finite(done, self.recent)
                if validating:
                    validation = run.validation_loss(done)
                    self.metrics.write(done, validation_loss=validation)
                    self.report.say(f"step {done}  validation loss {validation:.4f}")
                if saving:
                    run.save(done)
        return None if self.signal is not None else run.state

    def _log(self, done: int, values: dict[str, Any]) -> None:
        run, data = self.run, self.run.config.data
        loss = float(values["loss"])  # waits for the device
        run.check_finite(done, self.recent)
        speed = self.clock.speed(done, data.step_size)
        run.speeds += [] if speed is None else [speed]
        run.state, shares = watch_overflow(run.config, run.graphdef, run.state, self.report.say)
        facts = {
            "loss": loss,
            "gradient_norm": float(values["gradient_norm"]),
            "learning_rate": run.learning_rate,
            **({} if speed is None else {f"{data.step_unit}_per_second": speed}),
            **shares,
            **({} if run.state.skips is None else {"skipped": run.skipped}),
        }
        if run.state.loss_scale is not None:
            facts["loss_scale"] = float(run.state.loss_scale.value)
        self.metrics.write(done, **facts)
        self.report.report(done, loss, speed)
        self.clock.restart(done)


@jax.jit
def _is_finite(arrays: list[jax.Array]) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in arrays]))


def asked_to_stop(stop: StopRequest, *, logging: bool) -> Signals | None:
    """The signal to stop at; processes agree on it where they wait for their devices anyway."""
    if jax.process_count() == 1:
        return stop.signal
    number = largest(int(stop.signal or 0)) if logging else 0
    return Signals(number) if number else None


def _finish(run: _Run, say: Callable[[str], None]) -> Outcome:
    """Validation loss, scores, plots and closing lines of a run that has done all its steps."""
    config, step = run.config, int(run.state.step)
    validation = run.validation_loss(step)
    params, rest = whole((run.state.params, run.state.rest))  # what follows is for one process
    run.state = run.state._replace(params=params, rest=rest)
    if not is_first():
        return Outcome(run.folder, step, validation, {}, None)
    plot_run(run)
    model, recipe = run.model(), recipe_of(config)
    scores = save_scores(run.folder, recipe.scores(config, run.data, model, run.folder))
    if scores:
        say(shown_scores(scores))
    for line in recipe.closing(config, run.data, model, run.folder):
        say(line)
    unit, precision = config.data.step_unit, config.precision
    policy = f"{precision.scalify} by scalify" if precision.scalify else precision.policy
    speed = f", {statistics.median(run.speeds):,.0f} {unit}/s" if run.speeds else ""
    say(
        f"trained in {policy}{speed}: validation loss "
        f"{shown(config, validation, run.data.token_size)} (of at most "
        f"{config.train.eval_batches} batches; evaluate takes all); plots (loss.png, rms.png), "
        f"metrics and checkpoint are in {run.folder}"
    )
    return Outcome(run.folder, step, validation, scores, None)


def plot_run(run: _Run) -> None:
    """Draws the losses, and the RMS of all layers before and after training."""
    batch = next(run.data.validation(1))
    models: dict[str, Any] = {"at initialisation": build_model(run.config)}
    models[f"after {int(run.state.step)} steps"] = run.model()
    plot_loss(run.folder, per=run.config.loss_unit)
    readings = {label: probe(model, *loss_inputs(batch)) for label, model in models.items()}
    plot_rms(run.folder, readings)
