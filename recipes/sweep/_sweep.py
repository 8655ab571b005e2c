"""The study: every point of a grid, each with its own learning-rate search, in several processes.

Whatever is finished stays: the rows of a round are appended as soon as it is over, a run that
diverges has an infinite loss, one that fails leaves its message, and neither stops another. The
same command continues where the last one ended.
"""

import contextlib
import functools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ..config import RunConfig
from ..errors import RecipeError, write_json
from ..run.folder import locked, open_run, other_data
from ..run.pool import each, message_of
from ..run.recipe import recipe_of
from ._points import Point, key_of, make_points
from ._results import report
from ._rows import Row, append_row, read_rows
from ._search import missing
from ._trials import Trials

Known = dict[tuple[float, int], float]
"""Losses by learning rate and seed."""


def sweep(
    config: RunConfig, *, jobs: int = 1, fresh: bool = False, console: Console | None = None
) -> Path:
    """Trains all points of a config's grid that are not finished, and draws what came out.

    Args:
      config: The sweep; its folder is `<train.runs_dir>/<name>-sweep/`.
      jobs: Number of processes.
      fresh: Moves an earlier sweep of this name aside.
      console: Where to report; standard output by default.

    Returns:
      The folder, with `rows.jsonl`, `results.md` and plots.

    Raises:
      RecipeError: The grid or the data is unusable, the folder holds runs of another config or of
        other data, or another process works in it.
    """
    console = Console() if console is None else console
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    points = make_points(config)
    own = config.model_copy(update={"name": f"{config.name}-sweep"})
    with locked(own):
        try:
            return _sweep(points, config, open_run(own, fresh=fresh), jobs, say)
        except KeyboardInterrupt:
            say("stopped; run the same command to go on")
            raise


def _sweep(
    points: Sequence[Point], config: RunConfig, folder: Path, jobs: int, say: Callable[[str], None]
) -> Path:
    """Trains what is not finished, in an open folder."""
    _check_data(points, folder)
    known: dict[str, Known] = defaultdict(dict)
    for row in read_rows(folder):
        if row.loss is not None:  # what failed is tried again
            known[key_of(row.point)][row.learning_rate, row.seed] = row.loss
    say(f"{config.name}: {len(points)} points, {jobs} at a time, in {folder}")
    failures = 0
    tasks = [(point, folder, known[key_of(point.settings)]) for point in points]
    for done, ((point, *_), error) in enumerate(each(tasks, jobs, _point), 1):
        say(f"{done}/{len(points)}  {point}" + (f"  failed: {error}" if error else ""))
        if error:
            failures += 1
            rate, seed = point.config.optimizer.learning_rate, config.sweep.seeds[0]
            append_row(folder, Row(point.settings, rate, seed, None, error))
    for line in report(points, folder):
        say(line)
    if failures:
        raise RecipeError(
            f"{failures} of {len(points)} points failed, messages in {folder}/rows.jsonl; "
            "run the same command to try them again",
            exit_code=1,
        )
    return folder


def _check_data(points: Sequence[Point], folder: Path) -> None:
    """Refuses to add to rows of other data; the digest of what points read is kept beside rows."""
    path, found = folder / "data.json", {}
    for point in points:
        data = point.config.data.model_dump_json(exclude={"cache_dir"})
        if data not in found:
            with contextlib.suppress(RecipeError):  # the point's own row will say it
                found[data] = recipe_of(point.config).load_data(point.config).digest
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if any(kept.get(data, digest) != digest for data, digest in found.items()):
        raise other_data(folder)
    write_json(path, kept | found)


def _point(point: Point, folder: Path, known: Known) -> str | None:
    """Searches the learning rate of one point; returns the message of what went wrong."""
    try:
        _search(point, folder, known)
    except Exception as error:  # whatever it is, the other points go on
        return message_of(error)
    return None


def _search(point: Point, folder: Path, known: Known) -> None:
    settings, start = point.config.sweep, point.config.optimizer.learning_rate
    trials = functools.cache(lambda: Trials(point.config))  # compiles only what is needed
    losses: dict[int, float] = {}
    while places := missing(losses, settings.rates, settings.rounds):
        rates = {place: start * settings.factor**place for place in places}
        for seed in settings.seeds:
            todo = [rate for rate in rates.values() if (rate, seed) not in known]
            for rate, loss in zip(todo, trials()(todo, seed) if todo else (), strict=True):
                append_row(folder, Row(point.settings, rate, seed, loss))
                known[rate, seed] = loss
        for place, rate in rates.items():
            losses[place] = sum(known[rate, seed] for seed in settings.seeds) / len(settings.seeds)
