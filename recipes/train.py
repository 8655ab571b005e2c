"""The training loop: data, steps, reports and checkpoints.

The loop does not wait for the device between log lines. After a step whose loss or gradient is not
finite, the compiled step leaves the state as it is, so that the loop can find the cause.
"""

import contextlib
import math
import statistics
import time
from collections import deque
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from unitscale.core import is_scaled
from unitscale.parallel import batch_share

from .config import RunConfig
from .errors import RecipeError, Say, write_json
from .recipe import Data, loss_inputs, recipe_of
from .run import folder as runs, processes, state as states
from .run.checkpoint import Checkpoints
from .run.probe import plot_loss, plot_rms, probe
from .run.processes import StopRequest
from .run.step import make_evaluation, make_train_step, mean_loss


class Outcome(NamedTuple):
    """The result of training; `signal` is the number of the signal that stopped it, or None."""

    folder: Path
    step: int
    validation_loss: float | None
    scores: dict[str, float]
    signal: int | None


def train(
    config: RunConfig, *, fresh: bool = False, convert: bool = False, console: Console | None = None
) -> Outcome:
    """Train a run, or resume it from its newest complete checkpoint. Call it in every process.

    `fresh` renames an earlier run's folder; `convert` resumes in the config's number formats.
    """
    console = (console or Console()) if processes.is_first() else Console(quiet=True)
    data = recipe_of(config).load_data(config if fresh else states.with_kept_tokenizer(config))
    options = {"--fresh": fresh, "--convert": convert}
    processes.check_alike({"config": config.model_dump(), "data": data.digest, **options})
    with contextlib.ExitStack() as held:
        if processes.is_first():
            held.enter_context(runs.locked(config))
            runs.open_run(config, fresh=fresh, convert=convert)
        run = _Run(config, data, console)
        try:
            return run.train()
        except OSError as error:
            what = f"cannot write to {run.folder}: {error.strerror or error}"
            todo = "free space or change permissions, then run the same command again"
            told = f"{what}; {run.checkpoints.what_is_safe}; {todo}"
            raise RecipeError(told, exit_code=1) from error
        finally:
            if jax.process_count() == 1:  # otherwise closing may wait for a process that is gone
                run.checkpoints.close()


class _Run:
    """Model, optimizer, data, compiled steps and reports of one run, in an open folder."""

    def __init__(self, config: RunConfig, data: Data, console: Console):
        self.config, self.data, self.folder = config, data, runs.run_folder(config)
        self.say = lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)
        self.graphdef, optimizer, state = states.init_state(config)
        self.mesh = processes.open_mesh(config)
        self.state = processes.place(state, self.mesh)
        self.schedule = states.make_schedule(config.optimizer, config.train.steps)
        part, parts = (0, 1) if self.mesh is None else batch_share(self.mesh)
        self.batches = data.training(config.seed, process=part, processes=parts)
        self.checkpoints = Checkpoints(self.folder, keep=config.train.keep)
        step = make_train_step(self.graphdef, optimizer, config, mesh=self.mesh)
        self.step = processes.on_mesh(step, self.state, self.mesh)
        self.evaluate = make_evaluation(self.graphdef, config.precision, mesh=self.mesh)
        # Batches since values were last checked, to find where one is not finite.
        self.recent: deque[Any] = deque(maxlen=config.train.log_every + 1)
        self.signal: Signals | None = None
        self.validation: float | None = None  # the last validation loss
        self.speeds: list[float] = []  # between log lines
        loss = TextColumn("{task.fields[loss]}")
        columns = *Progress.get_default_columns(), MofNCompleteColumn(), loss
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)

    def train(self) -> Outcome:
        parameters = sum(x.size for x in jax.tree.leaves(self.state.params, is_leaf=is_scaled))
        self.say(
            f"{self.config.name}: {parameters:,} parameters, {self.data.summary}, "
            f"policy {self.config.precision.policy}, in {self.folder}"
        )
        start = self.resume()
        if processes.is_first():
            self.data.save(self.folder)  # after resume(), which refuses other data
        if start < self.config.train.steps:
            self.loop(start)
        if self.signal is None:
            return self.finish()
        step = int(self.state.step)
        self.say(f"stopped by {self.signal.name} after step {step}; run the same command to resume")
        return Outcome(self.folder, step, None, {}, int(self.signal))

    def resume(self) -> int:
        """Load the newest complete checkpoint; return the number of steps done."""
        restored = states.restore(self.config, self.checkpoints, self.state, self.mesh, self.say)
        if restored is None:
            return 0
        if restored.facts["text"] != self.data.digest:
            raise runs.other_data(self.folder)
        self.state = restored.state
        self.batches.set_state(restored.position)
        steps = self.config.train.steps
        done = f"resuming after step {restored.step} of {steps}"
        self.say(f"all {steps} steps are done" if restored.step == steps else done)
        return restored.step

    def loop(self, start: int) -> None:
        steps = self.config.train.steps
        self.bar = self.progress.add_task("step", total=steps, completed=start, loss="")
        self.start, self.clock = start, (start, time.perf_counter())
        folder = self.folder if processes.is_first() else None
        self.metrics, self.stop = runs.open_metrics(self.config, folder, start), StopRequest()
        with contextlib.closing(self.metrics), self.stop, self.progress:
            for index in range(start, steps):
                batch = processes.place_batch(next(self.batches), self.mesh)
                self.state, values = self.step(self.state, batch, np.int32(index))
                self.recent.append(batch)
                self.after_step(index + 1, values)
                if self.signal is not None:
                    break
            self.checkpoints.wait()
            self.signal = self.signal or self.stop.agreed(logging=True)  # since the last step

    def after_step(self, done: int, values: dict[str, Any]) -> None:
        settings = self.config.train
        self.progress.update(self.bar, completed=done)
        last = done == settings.steps
        logging = done % settings.log_every == 0 or last
        self.signal = self.stop.agreed(logging=logging)  # read once, because it may change
        validating = done % settings.eval_every == 0 or last  # also on a stop: resuming skips it
        saving = done % settings.checkpoint_every == 0 or last or self.signal is not None
        looking = logging or validating or saving
        if looking:
            self.check_finite(done)
        if logging:
            self.log(done, values)
        if validating:
            self.validation = validation = self.validation_loss(done)
            self.metrics.write(done, validation_loss=validation)
            self.say(f"step {done}  validation loss {validation:.4f}")
        if saving:
            self.save(done)
        if looking or done == self.start + 1:
            jax.block_until_ready(values)  # the first step compiles: leave it out of the speed
            self.clock = done, time.perf_counter()

    def log(self, done: int, values: dict[str, Any]) -> None:
        data, loss = self.config.data, float(values["loss"])
        since, clock = self.clock
        speed = (done - since) * data.step_size / (time.perf_counter() - clock)
        timed = done > self.start + 1
        self.speeds += [speed] if timed else []
        self.state, shares = states.watch_overflow(self.config, self.graphdef, self.state, self.say)
        state, updates = self.state, int(states.updates_done(self.state.opt_state))
        facts = {
            "loss": loss,
            "gradient_norm": float(values["gradient_norm"]),
            # The rate of the last update; of the first one if all steps so far were skipped.
            "learning_rate": float(np.asarray(self.schedule(max(updates - 1, 0)))),
            **({f"{data.step_unit}_per_second": speed} if timed else {}),
            **shares,
        }
        if state.skips is not None:
            facts["skipped"] = int(state.skips.total)
        if state.loss_scale is not None:
            facts["loss_scale"] = float(state.loss_scale.value)
        self.metrics.write(done, **facts)
        self.progress.update(self.bar, loss=f"loss {loss:.4f}")
        if self.progress.disable:
            shown = f"  {speed:,.0f} {data.step_unit}/s" if timed else ""
            self.say(f"step {done}/{self.config.train.steps}  loss {loss:.4f}{shown}")

    def save(self, step: int) -> None:
        if not _is_finite(jax.tree.leaves(self.state.params)):
            raise self.ruined(f"step {step}: the update made weights that are not finite")
        facts = {"formats": states.formats(self.config), "text": self.data.digest}
        self.checkpoints.save(step, self.state, self.batches.get_state(), facts)
        if processes.is_first():
            runs.record_config(self.config)

    def validation_loss(self, done: int) -> float:
        batches = self.data.validation(self.config.train.eval_batches)
        loss = mean_loss(self.evaluate, self.state.params, self.state.rest, batches)
        if not math.isfinite(loss):
            raise self.ruined(f"step {done}: the validation loss is not finite")
        return loss

    def check_finite(self, done: int) -> None:
        """Wait for the device; raise an error if a step since the last check was not finite."""
        good = int(self.state.step)
        if good == done:
            return
        batch = self.recent[good - done]  # the batch of the first step that was not finite
        reading = probe(self.model(), *loss_inputs(processes.whole(batch)))
        where = reading.first_not_finite() or "the gradient norm (dropout or the sum overflowed)"
        tolerated = self.config.optimizer.skip_nonfinite
        after = f", after {tolerated} such steps in a row were skipped" if tolerated else ""
        raise self.ruined(
            f"step {good + 1}: the loss or its gradient is not finite{after}; the first value that "
            f"is not finite is {where}"
        )

    def ruined(self, what: str) -> RecipeError:
        todo = "lower optimizer.learning_rate, set optimizer.clip_norm or a policy of wider range"
        safe = self.checkpoints.what_is_safe
        return RecipeError(f"{what}; {safe}; {todo}, and start again with --fresh", exit_code=1)

    def model(self) -> Any:
        """Return the model, with its parameters gathered from all processes."""
        state = self.state._replace(opt_state=())  # which may not fit on one device
        return states.merged(self.config, self.graphdef, processes.whole(state))

    def finish(self) -> Outcome:
        config, step = self.config, int(self.state.step)
        validation = self.validation_loss(step) if self.validation is None else self.validation
        model, recipe = self.model(), recipe_of(config)
        if not processes.is_first():
            return Outcome(self.folder, step, validation, {}, None)
        runs.record_config(config)  # of a finished run that was converted
        scores = recipe.scores(config, self.data, model, self.folder)
        said: list[str] = []
        save_scores(self.folder, scores, said.append)
        said.extend(recipe.closing(config, self.data, model, self.folder))
        # The probe keeps all activations: a micro-batch of them fits into memory.
        batch = loss_inputs(next(self.data.validation(1)))
        batch = [x[: len(x) // config.data.micro_batches or 1] for x in batch]
        before, after = probe(states.build_model(config), *batch), probe(model, *batch)
        plot_rms(self.folder, {"at initialization": before, "after training": after})
        plot_loss(self.folder, per=config.loss_unit)
        unit, precision = config.data.step_unit, config.precision
        policy = f"{precision.scalify} by scalify" if precision.scalify else precision.policy
        policy += f" with {precision.matmuls} matmuls" if precision.matmuls else ""
        speed = f", {statistics.median(self.speeds):,.0f} {unit}/s" if self.speeds else ""
        said.append(
            f"trained in {policy}{speed}: validation loss "
            f"{shown(config, validation, self.data.token_size)} (over at most "
            f"{config.train.eval_batches} batches; `evaluate` uses all); plots (loss.png, "
            f"rms.png), metrics and checkpoints are in {self.folder}"
        )
        self.say("\n".join(said))
        return Outcome(self.folder, step, validation, scores, None)


@jax.jit
def _is_finite(arrays: list[jax.Array]) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in arrays]))


def save_scores(folder: Path, scores: dict[str, float], say: Say) -> None:
    """Write scores, if any, to a run's folder, and print them, such as "f1 91.25"."""
    if scores:
        say(", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in scores.items()))
        write_json(folder / runs.SCORES, scores)


def shown(config: RunConfig, loss: float, size: float | None = None) -> str:
    """Format a loss in nats, and for text also in bits; `size` is bytes per token."""
    words = f"{loss:.4f} nats per {config.loss_unit}"
    if config.loss_unit in ("token", "character"):
        bits = loss / math.log(2)
        words += f", {bits:.4f} bits"
        if size is not None:
            words += f", {bits / size:.4f} bits per byte"
    return words
