"""What a finished sweep of character models says of unit scaling, in counts."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..charlm.config import CharlmConfig
from ..errors import RecipeError
from ..registry import load_config
from ..run.folder import CONFIG, is_run
from ..sweep import (
    ByFormat,
    Curve,
    by_format,
    curves_by_format,
    make_points,
    paired,
    read_curves,
)
from ._compare import spread_of
from ._table import Table, asked

MOST_ABOVE = 0.005
LEAST_NO_WORSE = 0.9
UNIT, HALF = ("unitscale", "float32"), ("unitscale", "float16")
REGULAR, REGULAR_HALF = ("plain", "float32"), ("plain", "float16")


def read_study(path: Path) -> list[Curve]:
    """What a sweep of character models found, from its folder or the file of rows in it."""
    folder = path if path.is_dir() else path.parent
    if not is_run(folder):
        raise RecipeError(
            f"--charlm: expected the folder of a sweep, with {CONFIG} and rows.jsonl; got "
            f"{path}; run `python -m recipes sweep configs/charlm/small.yaml` and give its folder"
        )
    config = load_config(folder / CONFIG)
    curves = read_curves(make_points(config), folder)
    if not isinstance(config, CharlmConfig) or not curves:
        raise RecipeError(
            f"--charlm: expected the folder of a sweep; got {folder}, of recipe {config.recipe} "
            f"with {len(curves)} points; run the sweep first"
        )
    return curves


def study(curves: Sequence[Curve]) -> Table:
    """Counts of models, and where there are several seeds also what their spread allows."""
    table = counts(by_format(curves))
    models = curves_by_format(curves).values()
    both = [(of[UNIT].seeds, of[REGULAR].seeds) for of in models if UNIT in of and REGULAR in of]
    if not both or len(both[0][0]) < 2:
        return table
    kept = sum(_is_kept(*pair) for pair in both)
    what = "unit FP32 above regular FP32 by no more than the seeds' standard deviation"
    return Table(table.title, [*table.rows, _row(what, kept, len(both), 1.0)])


def _is_kept(unit: Sequence[float], regular: Sequence[float]) -> bool:
    means = statistics.fmean(unit), statistics.fmean(regular)
    if not all(map(math.isfinite, means)):
        return means[0] <= means[1]
    return means[0] - means[1] <= spread_of(unit, regular)


def counts(best: ByFormat) -> Table:
    """How many models of the grid keep their FP32 loss in FP16, and are no worse unit scaled."""
    unit, regular = paired(best, HALF), paired(best, REGULAR_HALF)
    near = sum(abs(half / full - 1) <= MOST_ABOVE for full, half in unit)
    both = [(x[UNIT], x[REGULAR]) for x in best.values() if UNIT in x and REGULAR in x]
    no_worse = sum(unit <= regular for unit, regular in both)
    above = f"FP16 at most {MOST_ABOVE:.1%} above"
    rows: list[dict[str, Any]] = [
        _row(f"unit {above} unit FP32", _kept(unit), len(unit), 1.0),
        _row(f"unit FP16 within {MOST_ABOVE:.1%} of unit FP32 either way", near, len(unit)),
        _row(f"regular {above} regular FP32", _kept(regular), len(regular)),
        _row("unit FP32 no worse than regular FP32", no_worse, len(both), LEAST_NO_WORSE),
    ]
    return Table("Character models, each at its best learning rate", rows)


def _kept(pairs: list[tuple[float, float]]) -> int:
    return sum(half <= (1 + MOST_ABOVE) * full for full, half in pairs)


def _row(what: str, count: int, total: int, least: float | None = None) -> dict[str, Any]:
    share = count / total if total else math.nan
    row = {"models with": what, "count": count, "of": total, "share": share}
    return row if least is None else row | asked(share, least=least, form=".0%")
