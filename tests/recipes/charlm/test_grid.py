from __future__ import annotations

import re
from typing import Any

import pytest

from recipes.charlm.config import CharlmConfig
from recipes.charlm.grid import describe, make_points
from recipes.charlm.results import best_losses, report
from recipes.charlm.rows import Row
from recipes.errors import RecipeError

FORMATS: dict[str, list[Any]] = {
    "model.parametrization": ["regular", "unit"],
    "model.precision": ["float32", "float16", "fp8"],
}


def config(grid: dict[str, list[Any]], **options: Any) -> CharlmConfig:
    return CharlmConfig.model_validate({"name": "x", "sweep": {"grid": grid, **options}})


def test_every_combination_but_fp8_without_scales() -> None:
    points = make_points(config({"model.kind": ["conv", "rnn"], **FORMATS}))
    assert len(points) == 2 * 5
    assert len({describe(p.values) for p in points}) == 10
    for point in points:
        assert point.values["model.kind"] == point.config.model.kind
        assert point.values["model.precision"] == point.config.model.precision
    assert make_points(config({}))[0].values == {}


def test_a_point_in_words() -> None:
    assert describe({"model.kind": "rnn", "optimizer.name": "sgd"}) == "kind=rnn optimizer=sgd"
    assert describe({}) == "base"


def test_searches_start_by_parametrization_and_optimizer() -> None:
    grid = {"model.parametrization": ["regular", "unit"], "optimizer.name": ["sgd", "adam"]}
    found = [p.start for p in make_points(config(grid, start={"unit_sgd": 3.0}))]
    defaults = config({}).sweep.start
    assert found == [defaults.regular_sgd, defaults.regular_adam, 3.0, defaults.unit_adam]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"model.kid": ["rnn"]}, r"sweep\.grid: model\.kid is not a key .*did you mean model\.ki"),
        ({"optimizer.learning_rate": [1.0]}, r"optimizer\.learning_rate cannot be in a grid"),
        ({"model.kind": ["rnn", "rnn"]}, r"model\.kind: expected different values"),
        ({"model.kind": []}, r"model\.kind: expected different values; got \[\]"),
        ({"model.kind": ["mlp"]}, r"the point kind=mlp is no run: model\.kind: Input should be"),
        ({"model.heads": [3]}, r"heads must divide width; got 3 and 64"),
        (
            {"model.parametrization": ["regular"], "model.precision": ["fp8"]},
            r"no point is left: regular models have no fp8",
        ),
    ],
)
def test_errors(grid, message) -> None:
    with pytest.raises(RecipeError, match=message):
        make_points(config(grid))


def test_results_take_the_best_rate_and_the_mean_over_seeds(tmp_path) -> None:
    settings = config({"model.kind": ["conv", "rnn"], **FORMATS}, seeds=[0, 1])
    points = make_points(settings)
    rows = []
    for point in points:
        model = point.config.model
        loss = {"float32": 2.0, "float16": 2.5, "fp8": 2.25}[model.precision]
        if model.kind == "rnn" and model.parametrization == "regular" and loss == 2.5:
            loss = float("inf")
        for rate, more in ((0.1, 1.0), (0.4, 0.0)):
            rows += [Row(point.values, rate, 0, loss + more), Row(point.values, rate, 1, loss + 1)]
        rows.append(Row(point.values, 9.0, 0, 0.5))  # one seed only
        rows.append(Row(point.values, 9.0, 1, None, "failed"))
    best = best_losses(points, rows)
    assert best["kind=conv"]["regular", "float32"] == 2.5
    assert best["kind=rnn"]["regular", "float16"] == float("inf")
    text = report(points, rows, tmp_path)
    assert text[0].startswith("regular FP16: 1 of 2 models diverge; over FP32, mean +0.5000")
    assert text[2].startswith("unit FP8: 0 of 2 models diverge; over FP32, mean +0.2500")
    table = (tmp_path / "results.md").read_text()
    assert re.search(r"kind=rnn \| inf \| 2\.5000 \| 3\.0000 \| 2\.5000 \| 2\.7500", table), table
    assert (tmp_path / "scatter.png").stat().st_size > 10_000
