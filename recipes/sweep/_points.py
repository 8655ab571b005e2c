"""The points of a sweep, the rows of their runs, and what is made of them."""

import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from omegaconf import OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..config import RunConfig, describe_problems, entry_of, unknown_key, valid_keys
from ..errors import RecipeError
from ..run.folder import ROWS, flatten

RATE = "optimizer.learning_rate"
_OWN = ("recipe", "name", "seed", "sweep", "train.runs_dir")
"""Keys that no point may set: the sweep sets them itself, or they change no result."""

LIBRARY, POLICY, WIDE = "model.library", "precision.policy", "float32"
_LINES = 12  # that a legend names
Format = tuple[str, str]
"""Library and policy."""


class Point(NamedTuple):
    """One combination of values, what follows from it under `sweep.when`, and the run it makes."""

    values: dict[str, Any]
    further: dict[str, Any]
    config: RunConfig

    @property
    def settings(self) -> dict[str, Any]:
        """All that sets it apart from other points, but for where its search starts."""
        both = self.values | self.further
        return {key: value for key, value in both.items() if key != RATE}

    def __str__(self) -> str:
        return in_words(self.values)


def key_of(settings: Mapping[str, Any]) -> str:
    """Settings as text, equal for equal ones."""
    return json.dumps(dict(settings), sort_keys=True)


def in_words(values: Mapping[str, Any]) -> str:
    """Values in a few words, such as `kind=rnn optimizer=sgd`."""
    names = {key: key.removesuffix(".name").rpartition(".")[2] for key in values}
    return " ".join(f"{names[key]}={value}" for key, value in values.items()) or "base"


def make_points(config: RunConfig) -> list[Point]:
    """Every point of a config's grid, without those that `sweep.when` leaves out."""
    if config.mesh or config.precision.monitor is not None:
        raise RecipeError(
            "sweep: many runs share one device and none is looked at on the way; got mesh or "
            "monitor; set both null"
        )
    grid = config.sweep.grid
    for key, values in grid.items():
        _check_key("sweep.grid", key, config, (*_OWN, RATE))
        if not values or len({repr(value) for value in values}) < len(values):
            raise RecipeError(
                f"sweep.grid: {key}: expected at least one value, none of them twice; got "
                f"{values}; list what to try"
            )
    for words, settings in config.sweep.when.items():
        for key in _conditions(words):
            _check_key("sweep.when", key, config, ())
        for key in settings or {}:
            _check_key("sweep.when", key, config, (*_OWN, *grid))
    combinations = (dict(zip(grid, v, strict=True)) for v in itertools.product(*grid.values()))
    points = [point for values in combinations if (point := _make_point(config, values))]
    if not points:
        raise RecipeError("sweep.grid: no point is left: sweep.when has null for all; add a value")
    return points


def _check_key(where: str, key: str, config: RunConfig, taken: tuple[str, ...]) -> None:
    if entry_of(key, type(config))[0] not in dict(valid_keys(type(config))):
        raise RecipeError(f"{where}: {unknown_key(key, type(config))}")
    if any(key == own or key.startswith(f"{own}.") for own in taken):
        raise RecipeError(
            f"{where}: {key} cannot be set here; the sweep chooses learning rates and seeds itself "
            f"(sweep.seeds; a search starts at {RATE}), and each key has one place; remove it"
        )


def _conditions(words: str) -> dict[str, Any]:
    """The values that the words of `sweep.when` ask for, by key."""
    pairs = [word.partition("=") for word in words.split()]
    # Read as those of the grid are: YAML alone takes 1e-4 for a word.
    return {key: OmegaConf.from_dotlist([f"value={value}"])["value"] for key, _, value in pairs}


def _make_point(config: RunConfig, values: dict[str, Any]) -> Point | None:
    known = flatten(config.model_dump()) | values | flatten(values)
    further: dict[str, Any] = {}
    for words, settings in config.sweep.when.items():
        if all(known.get(key) == value for key, value in _conditions(words).items()):
            if settings is None:
                return None
            further |= settings
    # Only what was set: defaults may follow from what the point changes.
    tree = OmegaConf.create(config.model_dump(exclude_unset=True))
    for key, value in (values | further).items():
        OmegaConf.update(tree, key, value, merge=False)
    try:
        run = type(config).model_validate(OmegaConf.to_container(tree))
        return Point(values, further, run.settled)
    except ValidationError as error:
        problem = next(describe_problems(error.errors(), type(config)))
        raise RecipeError(
            f"sweep.grid: the point {in_words(values)} is no run: {problem}; change the grid, or "
            "add to sweep.when"
        ) from error


class Row(NamedTuple):
    """One run: a point of the grid, its learning rate and seed, and how it ended.

    `loss` is infinite for a run that diverged, and None for one that failed with `error`.
    """

    point: dict[str, Any]
    learning_rate: float
    seed: int
    loss: float | None
    error: str | None = None


_ROW = TypeAdapter(Row, config=ConfigDict(strict=True, extra="forbid"))


def append_row(folder: Path, row: Row) -> None:
    """Appends a line of JSON in one write, which processes beside this one cannot split."""
    loss = "inf" if row.loss == math.inf else row.loss  # JSON has no infinity
    line = json.dumps(row._asdict() | {"loss": loss}) + "\n"
    file = os.open(folder / ROWS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read_rows(folder: Path) -> list[Row]:
    """All rows of a folder; a line that a crash cut short is left out, and closed."""
    path = folder / ROWS
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    if text and not text.endswith("\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(fields, dict) and fields.get("loss") == "inf":
            fields["loss"] = math.inf
        try:
            rows.append(_ROW.validate_python(fields))
        except ValidationError as error:
            raise RecipeError(
                f"{path} line {number}: expected a row of a sweep with {', '.join(Row._fields)}; "
                f"got {line[:60]!r}; move the file away, or change name"
            ) from error
    return rows


class Curve(NamedTuple):
    """The losses of a point by learning rate, means over seeds; infinite where one diverged."""

    point: Point
    losses: dict[float, float]

    @property
    def best(self) -> float:
        """The learning rate of least loss."""
        return min(self.losses, key=self.losses.__getitem__)

    @property
    def least(self) -> float:
        return self.losses[self.best]


def read_curves(points: Sequence[Point], folder: Path) -> list[Curve]:
    """Summarize points by rates that all seeds have; points without such a rate are left out."""
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


def by_format(curves: Sequence[Curve]) -> dict[str, dict[Format, float]]:
    """The least loss of each model, by (library, policy)."""
    found: dict[str, dict[Format, float]] = defaultdict(dict)
    for curve in curves:
        known = flatten(curve.point.config.model_dump())
        values = curve.point.values.items()
        model = in_words({k: value for k, value in values if k not in (LIBRARY, POLICY)})
        found[model][known.get(LIBRARY, ""), known[POLICY]] = curve.least
    return found


def report(points: Sequence[Point], folder: Path) -> list[str]:
    """Writes `results.md` and `curves.png`; returns the lines of a summary."""
    curves = read_curves(points, folder)
    losses = by_format(curves)
    columns = sorted({column for found in losses.values() for column in found})
    head = ["model", *(" ".join(column).strip() for column in columns)]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for model, found in losses.items():
        cells = (f"{found[column]:.4f}" if column in found else "" for column in columns)
        lines.append(" | ".join([model, *cells]))
    (folder / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if curves:
        _plot_curves(curves, folder / "curves.png")
    said = []
    for name, (library, policy) in zip(head[1:], columns, strict=True):
        # How much more than in FP32 it loses in narrow formats, of models that converge in FP32.
        wide = {model: found.get((library, WIDE), math.inf) for model, found in losses.items()}
        gaps = [
            found[library, policy] - wide[model]
            for model, found in losses.items()
            if (library, policy) in found and math.isfinite(wide[model])
        ]
        if policy != WIDE and gaps:
            whole = [gap for gap in gaps if math.isfinite(gap)]
            text = f"{name}: {len(gaps) - len(whole)} of {len(gaps)} models diverge"
            if whole:
                mean, worst = sum(whole) / len(whole), max(whole)
                text += f"; over {WIDE}, mean {mean:+.4f}, worst {worst:+.4f} nats"
            said.append(text)
    return [*said, f"results in {folder}"]


def _plot_curves(curves: Sequence[Curve], path: Path) -> None:
    """Loss over learning rate: a panel for each value of the grid's first key."""
    panels: dict[str, list[tuple[str, Curve]]] = defaultdict(list)
    for curve in curves:
        values = [*curve.point.values.items()]
        panels[in_words(dict(values[:1]))].append((in_words(dict(values[1:])), curve))
    figure = Figure(figsize=(1 + 5 * len(panels), 4.5), layout="constrained", dpi=120)
    axes_of = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, lines) in zip(axes_of, panels.items(), strict=True):
        for index, (label, curve) in enumerate(lines):
            finite = {rate: x for rate, x in curve.losses.items() if math.isfinite(x)}
            if finite:
                colour = f"C{index % 10}"
                axes.plot(*zip(*finite.items(), strict=True), "o-", color=colour, label=label, ms=4)
                axes.plot(curve.best, curve.least, "*", color=colour, ms=14)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="learning rate", title=title)
        axes.grid(alpha=0.3)
        if axes.has_data() and len(lines) <= _LINES:
            axes.legend()
    unit = curves[0].point.config.loss_unit
    axes_of[0].set_ylabel(f"validation loss (nats per {unit})")
    figure.savefig(path)
