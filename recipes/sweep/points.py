"""The points of a sweep's grid, the results of their runs, and a summary table."""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from pydantic import ValidationError

from ..config import RunConfig, describe_problems, entry_of, expand_preset, unknown_key, valid_keys
from ..errors import RecipeError
from ..run.folder import ROWS, flatten, read_metrics

RATE = "optimizer.learning_rate"
LIBRARY, POLICY = "model.library", "precision.policy"
_OWN = ("recipe", "name", "seed", "sweep", "train.runs_dir")  # keys that no point may set


class Point(NamedTuple):
    """One combination of the grid's values, the keys that `sweep.when` adds, and its config."""

    values: dict[str, Any]
    further: dict[str, Any]
    config: RunConfig

    @property
    def settings(self) -> dict[str, Any]:
        """The keys that identify the point, without the search's first learning rate."""
        both = self.values | self.further
        return {key: value for key, value in both.items() if key != RATE}

    def __str__(self) -> str:
        return in_words(self.values)


def key_of(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def in_words(values: dict[str, Any]) -> str:
    """Format values by short names, such as `kind=rnn optimizer=sgd`."""
    names = {key: key.removesuffix(".name").rpartition(".")[2] for key in values}
    return " ".join(f"{names[key]}={value}" for key, value in values.items()) or "base"


def make_points(config: RunConfig) -> list[Point]:
    """Return all points of a config's grid, except those that `sweep.when` leaves out."""
    if config.mesh or config.precision.monitor is not None:
        raise RecipeError("sweep: mesh and precision.monitor are not supported; set both null")
    grid, when, known = config.sweep.grid, config.sweep.when, flatten(config.model_dump())
    _check_keys("sweep.grid", grid, config, (*_OWN, RATE))
    for words, settings in when.items():
        _check_keys("sweep.when", _conditions(words), config)
        for key in _conditions(words).keys() - grid.keys():
            if inside := [name for name in known if name.startswith(f"{key}.")]:
                raise RecipeError(f"sweep.when: {key} has no value; use {' or '.join(inside)}")
        _check_keys("sweep.when", settings or {}, config, (*_OWN, *grid))
    combinations = (dict(zip(grid, v, strict=True)) for v in itertools.product(*grid.values()))
    points = [point for values in combinations if (point := _make_point(config, values))]
    if not points:
        raise RecipeError("sweep.grid: expected points; got none; add values or change sweep.when")
    return points


def _check_keys(where: str, keys: Any, config: RunConfig, taken: tuple[str, ...] = ()) -> None:
    schema = type(config)
    for key in keys:
        if entry_of(key, schema)[0] not in dict(valid_keys(schema)):
            raise RecipeError(f"{where}: {unknown_key(key, schema)}")
        if any(key == own or key.startswith(f"{own}.") for own in taken):
            todo = "remove it, as the sweep or its grid sets it (seeds: set sweep.seeds)"
            raise RecipeError(f"{where}: {key} cannot be set here; {todo}")


def _conditions(words: str) -> dict[str, Any]:
    """Parse a condition of `sweep.when`, such as "a.b=1 c=x"."""
    pairs = [word.partition("=") for word in words.split()]
    if not all(equals for _, equals, _ in pairs):
        example = "such as model.library=plain"
        raise RecipeError(f"sweep.when: expected conditions {example}; got {words!r}")
    # By OmegaConf, like the grid: plain YAML reads 1e-4 as a string.
    return {key: OmegaConf.from_dotlist([f"value={value}"])["value"] for key, _, value in pairs}


def _make_point(config: RunConfig, values: dict[str, Any]) -> Point | None:
    section = {"precision": expand_preset(values.get("precision", {}))}
    known = flatten(config.model_dump()) | values | flatten(values | section)
    further: dict[str, Any] = {}
    for words, settings in config.sweep.when.items():
        if all(known.get(key) == value for key, value in _conditions(words).items()):
            if settings is None:
                return None
            further |= settings
    # Start from the keys that were set, because defaults may depend on keys that the point changes.
    tree = OmegaConf.create(config.model_dump(exclude_unset=True))
    for key, value in (values | further).items():
        OmegaConf.update(tree, key, value, merge=False)
    try:
        run = type(config).model_validate(OmegaConf.to_container(tree))
    except ValidationError as error:
        problem = next(describe_problems(error.errors(), type(config)))
        what = f"sweep.grid: the point {in_words(values)} is not valid: {problem}"
        raise RecipeError(f"{what}; change sweep.grid or sweep.when") from error
    return Point(values, further, run.settled)


class Row(NamedTuple):
    """The result of one run. `loss` is infinite if it diverged, None if it failed with `error`."""

    point: dict[str, Any]
    learning_rate: float
    seed: int
    loss: float | None
    error: str | None = None


def append_row(folder: Path, row: Row) -> None:
    """Append a line of JSON in a single write, so that several processes may write."""
    loss = "inf" if row.loss == math.inf else row.loss  # JSON has no infinity
    with (folder / ROWS).open("ab", buffering=0) as file:
        file.write(f"{json.dumps(row._asdict() | {'loss': loss})}\n".encode())


def read_rows(folder: Path) -> list[Row]:
    """Read all rows of a folder, without a line that a crash cut short."""
    path = folder / ROWS
    if path.exists() and not (b"\n" + path.read_bytes()).endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    rows = [Row(**row) for row in read_metrics(path)]
    return [row._replace(loss=None if row.loss is None else float(row.loss)) for row in rows]


class Curve(NamedTuple):
    """The mean loss of a point over seeds, by learning rate; infinite if a seed diverged."""

    point: Point
    losses: dict[float, float]

    @property
    def best(self) -> float:
        """The learning rate with the least loss."""
        return min(self.losses, key=self.losses.__getitem__)

    @property
    def least(self) -> float:
        return self.losses[self.best]


def read_curves(points: Sequence[Point], folder: Path) -> list[Curve]:
    """Average over seeds at the rates that all seeds have run; skip points without such a rate."""
    runs: dict[str, dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in read_rows(folder):
        if row.loss is not None:
            runs[key_of(row.point)][row.learning_rate][row.seed] = row.loss
    curves = []
    for point in points:
        seeds = point.config.sweep.seeds
        losses = {
            rate: sum(found[seed] for seed in seeds) / len(seeds)
            for rate, found in sorted(runs[key_of(point.settings)].items())
            if set(seeds) <= set(found)
        }
        if losses:
            curves.append(Curve(point, losses))
    return curves


def by_format(curves: Sequence[Curve]) -> dict[str, dict[tuple[str, str], Curve]]:
    """Group curves by model, and in each model by library and policy."""
    found: dict[str, dict[tuple[str, str], Curve]] = defaultdict(dict)
    for curve in curves:
        known = flatten(curve.point.config.model_dump())
        values = curve.point.values.items()
        model = in_words({k: value for k, value in values if k not in (LIBRARY, POLICY)})
        found[model][known.get(LIBRARY, ""), known[POLICY]] = curve
    return found


def report(points: Sequence[Point], folder: Path) -> None:
    """Write `results.md`: the least loss of each model and format, and its learning rate."""
    models = by_format(read_curves(points, folder))
    columns = sorted({column for found in models.values() for column in found})
    head = ["model", *(" ".join(column).strip() for column in columns)]
    rows = [head, ["---"] * len(head)]
    for model, found in models.items():
        best = (found.get(column) for column in columns)
        rows.append([model, *(f"{x.least:.4f} at {x.best:.3g}" if x else "" for x in best)])
    text = "\n".join(" | ".join(row) for row in rows)
    (folder / "results.md").write_text(text + "\n", encoding="utf-8")
