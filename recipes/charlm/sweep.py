"""The study: every point of a grid, each with its own learning-rate search, in several processes.

Whatever is finished stays: a worker appends the rows of a round as soon as it has them, a run that
diverges has an infinite loss, one that fails leaves its message, and neither stops another. The
same command continues where the last one ended.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import RecipeError
from ..run.folder import open_run
from .config import CharlmConfig
from .grid import Point, describe, make_points
from .program import Runs, load_text, make_batches
from .results import report
from .rows import Row, append_row, key_of, read_rows
from .search import search

ATTEMPTS = 2  # at a point whose process died, which may have been a neighbour's doing


def sweep(
    config: CharlmConfig, *, jobs: int = 1, fresh: bool = False, console: Console | None = None
) -> Path:
    """Trains all points of a config's grid that are not finished, and draws what came out.

    Args:
      config: The sweep; its folder is `<train.runs_dir>/<name>-sweep/`.
      jobs: Number of processes.
      fresh: Moves an earlier sweep of this name aside.
      console: Where to report; standard output by default.

    Returns:
      The folder, with `rows.jsonl`, `results.md` and `scatter.png`.

    Raises:
      RecipeError: The grid or the text is unusable, or the folder holds another sweep.
    """
    console = Console() if console is None else console
    points = make_points(config)
    folder = open_run(config.model_copy(update={"name": f"{config.name}-sweep"}), fresh=fresh)
    known = _known(read_rows(folder))

    def say(message: str) -> None:
        console.print(message, markup=False, highlight=False, soft_wrap=True)

    say(f"{config.name}: {len(points)} points, {jobs} at a time, in {folder}")
    tasks = [(p.values, p.config, folder, known[key_of(p.values)]) for p in points]
    failures = 0
    for done, (task, error) in enumerate(_each(tasks, jobs, _point), 1):
        failures += error is not None
        say(f"{done}/{len(points)}  {describe(task[0])}" + (f"  failed: {error}" if error else ""))
    for line in report(points, read_rows(folder), folder):
        say(line)
    if failures:
        raise RecipeError(
            f"{failures} of {len(points)} points failed, messages in {folder}/rows.jsonl; "
            "run the same command to try them again",
            exit_code=1,
        )
    return folder


def _known(rows: Sequence[Row]) -> dict[str, dict[tuple[float, int], float]]:
    """The losses of finished runs by point; what failed is tried again."""
    known: dict[str, dict[tuple[float, int], float]] = defaultdict(dict)
    for row in rows:
        if row.loss is not None:
            known[key_of(row.point)][row.learning_rate, row.seed] = row.loss
    return known


def _each(
    tasks: list[Any], jobs: int, work: Callable[..., str | None]
) -> Iterator[tuple[Any, str | None]]:
    """Yields each task when it is over, with the message of what went wrong."""
    if jobs == 1:
        yield from ((task, work(*task)) for task in tasks)
        return
    attempts = dict.fromkeys(range(len(tasks)), 0)
    while attempts:
        context = get_context("spawn")
        cores = context.Queue()
        for share in _shares(jobs):
            cores.put(share)
        with ProcessPoolExecutor(jobs, context, _pin, (cores,)) as pool:
            futures: dict[Future[str | None], int] = {
                pool.submit(work, *tasks[index]): index for index in attempts
            }
            broken = False
            for future in as_completed(futures):
                index = futures[future]
                try:
                    error = future.result()
                except BrokenProcessPool:
                    broken = True
                    continue
                del attempts[index]
                yield tasks[index], error
        if not broken:
            return
        # Which process died is not known: those that could have been at work count one attempt.
        for index in list(attempts)[:jobs]:
            attempts[index] += 1
            if attempts[index] >= ATTEMPTS:
                del attempts[index]
                error = "its process was killed; is there enough memory?"
                _fail(tasks[index], error)
                yield tasks[index], error


def _shares(jobs: int) -> list[set[int]]:
    """The cores of this process, dealt out to the jobs."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [set(cores[index::jobs]) or set(cores) for index in range(jobs)]


def _pin(cores: Any) -> None:
    """Keeps a process on its own cores, so that its threads do not wait for those of others.

    It comes before JAX's first computation, which counts the cores.
    """
    share = cores.get()
    if share:
        os.sched_setaffinity(0, share)


def _point(
    values: dict[str, Any],
    config: CharlmConfig,
    folder: Path,
    known: dict[tuple[float, int], float],
) -> str | None:
    """Searches the learning rate of one point; returns the message of what went wrong."""
    try:
        _search(values, config, folder, known)
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        _fail((values, config, folder), message)
        return message
    return None


def _fail(task: Any, message: str) -> None:
    values, config, folder = task[:3]
    rate = Point(values, config).start
    append_row(folder, Row(values, rate, config.sweep.seeds[0], None, message))


def _search(
    values: dict[str, Any],
    config: CharlmConfig,
    folder: Path,
    known: dict[tuple[float, int], float],
) -> None:
    settings, start = config.sweep, Point(values, config).start
    span = settings.rates * settings.rounds + 1
    rates = {place: start * settings.factor**place for place in range(-span, span)}
    runs: Callable[..., list[float]] | None = None

    def run(places: list[int]) -> dict[int, float]:
        nonlocal runs
        wanted = [(rates[place], seed) for place in places for seed in settings.seeds]
        todo = [pair for pair in wanted if pair not in known]
        if todo:
            runs = runs or _make_runs(config)
            # Always as many as a round has, so that the program is compiled once.
            filled = (todo * (settings.rates * len(settings.seeds)))[
                : len(settings.seeds) * settings.rates
            ]
            losses = runs([rate for rate, _ in filled], [seed for _, seed in filled])
            for (rate, seed), loss in zip(todo, losses, strict=False):
                append_row(folder, Row(values, rate, seed, loss))
                known[rate, seed] = loss
        return {
            place: sum(known[rates[place], seed] for seed in settings.seeds) / len(settings.seeds)
            for place in places
        }

    search({}, settings.rates, settings.rounds, run)


def _make_runs(config: CharlmConfig) -> Callable[..., list[float]]:
    return Runs(config, *make_batches(config, load_text(config)))
