"""Counts of a sweep of character models, from its rows."""

import math
from pathlib import Path

import pytest
import yaml

from recipes.bench._study import HALF, REGULAR, REGULAR_HALF, UNIT, counts, read_study, study
from recipes.errors import RecipeError
from recipes.sweep import Row, append_row, by_format

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
        read_study(tmp_path)
    for policy, losses in {"float32": (2.0, 3.0), "float16": (2.5, 2.002)}.items():
        for rate, loss in enumerate(losses, 1):
            point = {"policy": policy, "model.norm": "none"}
            append_row(tmp_path, Row(point, float(rate), 0, loss))
    for path in (tmp_path, tmp_path / "rows.jsonl"):
        (losses,) = by_format(read_study(path)).values()
        assert losses == {UNIT: 2.0, HALF: 2.002}


def test_seeds_say_what_a_difference_is_worth(tmp_path: Path) -> None:
    norms, libraries = ["pre", "post", "none"], ["plain", "unitscale"]
    grid = {"policy": ["float32"], "model.norm": norms, "model.library": libraries}
    plain = {"optimizer.umup": False}
    config = tree(tmp_path, sweep={"grid": grid, "seeds": [0, 1, 2]})
    config["sweep"]["when"] = {"model.library=plain": plain}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    runs = {  # standard deviations of 0.1; means above by 0.05, 0.15, and one that diverges
        "pre": ((2.0, 2.1, 2.2), (2.05, 2.15, 2.25)),
        "post": ((2.0, 2.1, 2.2), (2.15, 2.25, 2.35)),
        "none": ((2.0, 2.1, 2.2), (2.0, 2.1, math.inf)),
    }
    for norm, both in runs.items():
        for library, losses in zip(libraries, both, strict=True):
            point = {"policy": "float32", "model.norm": norm, "model.library": library}
            point |= plain if library == "plain" else {}
            for seed, loss in enumerate(losses):
                append_row(tmp_path, Row(point, 1.0, seed, loss))
    *_, no_worse, kept = study(read_study(tmp_path)).rows
    assert (no_worse["count"], no_worse["of"]) == (0, 3)
    assert (kept["count"], kept["of"], kept["within"]) == (1, 3, False)
