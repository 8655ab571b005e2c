"""Run a sweep: a learning-rate search at every point of a grid, in several processes.

Results are written after every round. Runs that diverge or fail do not stop the others. The same
command continues a sweep that was stopped.
"""

import functools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from ..config import RunConfig
from ..errors import RecipeError, write_json
from ..recipe import recipe_of
from ..run.folder import locked, open_run, other_data, record_config, run_folder, writing
from ..run.pool import each, message_of
from ..run.state import TrainState, init_state, make_optimizer
from ..run.step import advance, make_evaluation, make_train_step
from .points import Point, Row, append_row, key_of, make_points, read_rows, report


def sweep(
    config: RunConfig, *, jobs: int = 1, fresh: bool = False, console: Console | None = None
) -> Path:
    """Train all unfinished points of a config's grid in `jobs` processes.

    Results are in the folder that it returns, `<train.runs_dir>/<name>-sweep/`. `fresh` moves an
    earlier sweep of this name aside.
    """
    say = functools.partial((console or Console()).print, markup=False, soft_wrap=True)
    points = make_points(config)
    own = config.model_copy(update={"name": f"{config.name}-sweep"})
    with locked(own), writing(run_folder(own)):
        folder = open_run(own, fresh=fresh)
        data, digest = folder / "data.json", recipe_of(config).load_data(points[0].config).digest
        if data.exists() and digest not in json.loads(data.read_text("utf-8")).values():
            raise other_data(folder)
        write_json(data, {"data": digest})
        record_config(own)
        known: dict[str, dict[tuple[float, int], float]] = defaultdict(dict)
        for row in read_rows(folder):
            if row.loss is not None:  # try failed runs again
                known[key_of(row.point)][row.learning_rate, row.seed] = row.loss
        say(f"{config.name}: {len(points)} points, {jobs} at a time, in {folder}")
        failures = 0
        tasks = [(point, folder, known[key_of(point.settings)]) for point in points]
        for done, ((point, *_), error) in enumerate(each(tasks, jobs, _search), 1):
            say(f"{done}/{len(points)}  {point}" + (f"  failed: {error}" if error else ""))
            if error:
                failures += 1
                rate, seed = point.config.optimizer.learning_rate, config.sweep.seeds[0]
                append_row(folder, Row(point.settings, rate, seed, None, error))
        report(points, folder)
        say(f"results in {folder}")
    if failures:
        raise RecipeError(
            f"{failures} of {len(points)} points failed, messages in {folder}/rows.jsonl; "
            "run the same command to try them again",
            exit_code=1,
        )
    return folder


def _search(point: Point, folder: Path, known: dict[tuple[float, int], float]) -> str | None:
    """Search the learning rate of one point; return the message of a failure."""
    settings, start = point.config.sweep, point.config.optimizer.learning_rate
    trials = functools.cache(lambda: Trials(point.config))  # made at the first missing run
    losses: dict[int, float] = {}
    try:
        while places := missing(losses, settings.rates, settings.rounds):
            rates = {place: start * settings.factor**place for place in places}
            for seed in settings.seeds:
                todo = [rate for rate in rates.values() if (rate, seed) not in known]
                for rate, loss in zip(todo, trials()(todo, seed) if todo else (), strict=True):
                    append_row(folder, Row(point.settings, rate, seed, loss))
                    known[rate, seed] = loss
            for place, rate in rates.items():
                found = [known[rate, seed] for seed in settings.seeds]
                losses[place] = sum(found) / len(found)
    except Exception as error:  # other points continue
        return message_of(error)
    return None


def missing(losses: Mapping[int, float], rates: int, rounds: int) -> list[int]:
    """Choose the learning rates to run next; return [] when the search is over.

    Number i stands for start * factor**i. While the best rate is at an end of the series, a round
    extends it there; if all runs diverged, at the lower end.

    Example:
      >>> missing({}, 3, 2), missing({-1: 3.0, 0: 2.0, 1: 1.0}, 3, 2)
      ([-1, 0, 1], [2, 3, 4])
      >>> missing({-1: 3.0, 0: 2.0, 1: 2.5}, 3, 2)
      []
    """
    low = -(rates // 2)
    high = low + rates - 1
    for _ in range(rounds):
        if todo := [place for place in range(low, high + 1) if place not in losses]:
            return todo
        best = min(range(low, high + 1), key=lambda place: losses[place])
        if best == high and math.isfinite(losses[best]):
            high += rates
        elif best == low or not math.isfinite(losses[best]):
            low -= rates
        else:
            break
    return []


class Trials:
    """Trains runs of one config, compiled once for all learning rates and seeds."""

    def __init__(self, config: RunConfig):
        self.config, self.data = config, recipe_of(config).load_data(config)
        graphdef, _, state = init_state(config)
        params, settings = state.params, config.optimizer

        @jax.jit
        def step(state: TrainState, rate: Any, batch: Any, index: Any):
            # A traced learning rate replaces the config's.
            own = settings.model_copy(update={"learning_rate": rate})
            optimizer = make_optimizer(config.model_copy(update={"optimizer": own}), params)
            train_step = make_train_step(graphdef, optimizer, config)
            return train_step(state, batch, index)[0]

        self._step = jax.jit(jax.vmap(step, (0, 0, None, None)), donate_argnums=0)
        evaluate = make_evaluation(graphdef, config.precision)
        self._evaluate = jax.jit(jax.vmap(evaluate, (0, 0, None)))
        # vmap makes convolutions grouped, which is slow on XLA's CPU backend: then run one by one.
        arguments = state, np.float32(1), recipe_of(config).abstract_batch(config), np.int32(0)
        slow = "conv_general_dilated" in str(step.trace(*arguments).jaxpr)
        self._together = 1 if slow and jax.default_backend() == "cpu" else config.sweep.rates

    def __call__(self, rates: Sequence[float], seed: int) -> Iterator[float]:
        """Yield the validation loss at each rate; infinite if a step's loss was not finite."""
        for start in range(0, len(rates), self._together):
            yield from self._losses(rates[start : start + self._together], seed)

    def _losses(self, rates: Sequence[float], seed: int) -> list[float]:
        size, steps = self._together, self.config.train.steps
        padded = [*rates, *[rates[-1]] * (size - len(rates))]  # keep the compiled shape
        first = init_state(self.config.model_copy(update={"seed": seed}))[2]
        state = jax.tree.map(lambda leaf: jnp.stack([leaf] * size), first)

        def step(state: Any, batch: Any, index: Any) -> tuple[Any, dict[str, Any]]:
            return self._step(state, np.asarray(padded, np.float32), batch, index), {}

        state = advance(step, state, self.data.training(seed), 0, steps)
        batches = self.data.validation(self.config.train.eval_batches)
        found = [self._evaluate(state.params, state.rest, batch) for batch in batches]
        means = np.mean(jax.device_get(found), axis=0, dtype=np.float64)
        # A loss that was not finite stops the step count, unless the config skips such steps.
        whole = np.isfinite(means) & (np.asarray(state.step) == steps)
        return np.where(whole, means, np.inf).tolist()[: len(rates)]
