"""Counts of a sweep of character models, from its rows."""

import math
from pathlib import Path

import pytest
import yaml

from recipes.bench._study import HALF, REGULAR, REGULAR_HALF, UNIT, counts, read_best
from recipes.errors import RecipeError
from recipes.sweep import Row, append_row

from ..characters import tree


def test_models_are_counted() -> None:
    best = {
        "kept": {UNIT: 2.0, HALF: 2.01, REGULAR: 2.0},
        "better": {UNIT: 2.0, HALF: 1.9, REGULAR: 2.1, REGULAR_HALF: 2.1},
        "worse": {UNIT: 2.0, HALF: 2.02, REGULAR: 1.9, REGULAR_HALF: math.inf},
        "lost": {UNIT: 2.0, HALF: math.inf},
        "diverges in FP32": {UNIT: math.inf, HALF: math.inf, REGULAR: math.inf},
    }
    above, near, regular, no_worse = counts(best).rows
    assert (above["count"], above["of"], above["within"]) == (2, 4, False)
    assert (near["count"], near["of"]) == (1, 4)
    assert (regular["count"], regular["of"]) == (1, 2)
    assert (no_worse["count"], no_worse["of"]) == (3, 4)
    assert no_worse["within"] is False


def test_the_best_rates_of_a_sweep_are_read(tmp_path: Path) -> None:
    grid = {"policy": ["float32", "float16"], "model.norm": ["none"]}
    config = tree(tmp_path, sweep={"grid": grid})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with pytest.raises(RecipeError, match="of recipe charlm with 0 points; run the sweep first"):
        read_best(tmp_path)
    for policy, losses in {"float32": (2.0, 3.0), "float16": (2.5, 2.002)}.items():
        for rate, loss in enumerate(losses, 1):
            point = {"policy": policy, "model.norm": "none"}
            append_row(tmp_path, Row(point, float(rate), 0, loss))
    for path in (tmp_path, tmp_path / "rows.jsonl"):
        (losses,) = read_best(path).values()
        assert losses == {UNIT: 2.0, HALF: 2.002}
