"""The results of a sweep's runs: a file of rows, and a table."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..run.folder import ROWS, flatten
from ._points import Point, in_words, key_of

LIBRARY, POLICY = "model.library", "precision.policy"


class Row(NamedTuple):
    """One run: the settings of its point, its learning rate and seed, and how it ended.

    `loss` is infinite for a run that diverged, and None for one that failed with `error`.
    """

    point: dict[str, Any]
    learning_rate: float
    seed: int
    loss: float | None
    error: str | None = None


def append_row(folder: Path, row: Row) -> None:
    """Append a line of JSON in one write, so that several processes can."""
    loss = "inf" if row.loss == math.inf else row.loss  # JSON has no infinity
    with (folder / ROWS).open("ab", buffering=0) as file:
        file.write(f"{json.dumps(row._asdict() | {'loss': loss})}\n".encode())


def read_rows(folder: Path) -> list[Row]:
    """Read all rows of a folder, without a line that a crash cut short."""
    path, rows = folder / ROWS, []
    if not path.exists():
        return rows
    raw = path.read_bytes()
    if raw and not raw.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    for line in raw.splitlines():
        try:
            row = Row(**json.loads(line))
        except ValueError:
            continue
        rows.append(row._replace(loss=None if row.loss is None else float(row.loss)))
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


def by_format(curves: Sequence[Curve]) -> dict[str, dict[tuple[str, str], Curve]]:
    """The curves of each model, by library and policy."""
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
