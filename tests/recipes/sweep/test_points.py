"""The points of a grid, the results of their runs, and summaries."""

import json
import math
from typing import Any

import pytest

from recipes.charlm.config import CharlmConfig
from recipes.errors import RecipeError
from recipes.run.folder import ROWS as rows_file
from recipes.sweep.points import (
    Row,
    append_row,
    by_format,
    make_points,
    read_curves,
    read_rows,
    report,
)

FORMATS: dict[str, list[Any]] = {
    "model.library": ["plain", "unitscale"],
    "precision.policy": ["float32", "float16", "fp8"],
}
WHEN: dict[str, Any] = {
    "model.library=plain precision.policy=fp8": None,
    "model.library=plain": {"optimizer.umup": False, "optimizer.multipliers": {}},
}


def config(
    grid: dict[str, list[Any]], when: dict[str, Any] | None = None, **keys: Any
) -> CharlmConfig:
    sweep = {"grid": grid, "when": WHEN if when is None else when}
    tree = {"recipe": "charlm", "name": "x", "optimizer": {"multipliers": {"bias": 0.5}}}
    return CharlmConfig.model_validate({**tree, **keys, "sweep": sweep})


def test_every_combination_but_those_left_out() -> None:
    settings = config({"model.kind": ["conv", "rnn"], **FORMATS})
    points = make_points(settings)
    assert len(points) == 2 * 5
    assert len({str(point) for point in points}) == 10
    for point in points:
        run = point.config
        assert isinstance(run, CharlmConfig)
        own = [run.model.kind, run.model.library, run.precision.policy]
        assert list(point.values.values()) == own
        plain = run.model.library == "plain"
        assert run.optimizer.umup == (not plain)
        assert run.optimizer.multipliers["bias"] == (0.03 if plain else 0.5)
    assert make_points(config({}))[0].values == {}
    # What a sweep leaves in its folder has every key, and is the same sweep.
    again = make_points(CharlmConfig.model_validate(settings.model_dump()))
    assert [point.settings for point in again] == [point.settings for point in points]


def test_values_are_those_of_the_grid_and_a_point_has_words() -> None:
    when = {"optimizer.final_fraction=1e-4": None}
    (point,) = make_points(config({"optimizer.final_fraction": [1e-4, 0.1]}, when))
    assert point.values == {"optimizer.final_fraction": 0.1}
    grid = {"optimizer.multipliers": [{"bias": 0.1}, {"bias": 0.2}]}
    points = make_points(config(grid, {"optimizer.multipliers.bias=0.1": {"train.steps": 2}}))
    assert [point.further for point in points] == [{"train.steps": 2}, {}]
    (point,) = make_points(config({"model.kind": ["rnn"], "optimizer.name": ["sgd"]}))
    assert str(point) == "kind=rnn optimizer=sgd"
    assert str(make_points(config({}))[0]) == "base"


def test_words_hold_of_what_the_config_says_and_later_ones_win() -> None:
    when = {
        "model.layers=2": {"optimizer.learning_rate": 0.5},  # the default
        "model.width=16 optimizer.umup=true": {"optimizer.learning_rate": 3.0, "model.heads": 2},
        "model.width=8 model.layers=3": {"optimizer.learning_rate": 9.0},
    }
    points = make_points(config({"model.width": [8, 16]}, when))
    assert [point.config.optimizer.learning_rate for point in points] == [0.5, 3.0]
    # Where a search starts is no other point.
    assert [point.settings for point in points] == [
        {"model.width": 8},
        {"model.width": 16, "model.heads": 2},
    ]


# grid, when, and what the message has to name
WRONG: list[tuple[Any, Any, str]] = [
    ({"model.kid": ["rnn"]}, {}, r"sweep\.grid: model\.kid is not a key .*mean model\.kind"),
    ({"optimizer.learning_rate": [1.0]}, {}, r"optimizer\.learning_rate cannot be set here"),
    ({"sweep.seeds": [[1]]}, {}, r"sweep\.grid: sweep\.seeds cannot be set here"),
    ({"model.kind": []}, {}, r"sweep\.grid: expected points; got none"),
    ({"model.kind": ["mlp"]}, {}, r"the point kind=mlp is not valid: model\.kind .*'co"),
    ({"model.heads": [3]}, {}, r"heads must divide width; got 3 and 64"),
    ({}, {"model.kid=rnn": {}}, r"sweep\.when: model\.kid is not a key"),
    ({}, {"model.kind=rnn": {"model.with": 8}}, r"sweep\.when: model\.with is not a key"),
    ({"model.width": [8]}, {"seed=0": {"model.width": 4}}, r"sweep\.when: model\.width cannot"),
    ({"model.library": ["plain"], "precision.policy": ["fp8"]}, None, r"expected points; got none"),
]


def test_errors() -> None:
    for grid, when, message in WRONG:
        with pytest.raises(RecipeError, match=message):
            make_points(config(grid, when))
    with pytest.raises(RecipeError, match=r"precision\.monitor"):
        make_points(config({}, precision={"policy": "fp8", "monitor": 0.1}))


ROWS = [
    Row({"model.kind": "rnn"}, 0.25, 0, 2.5),
    Row({"model.kind": "rnn"}, 1.0, 1, math.inf),
    Row({"model.kind": "conv"}, 1.0, 0, None, "MemoryError: too large"),
]


def test_rows_come_back_as_they_were_but_for_one_that_a_crash_cut_short(tmp_path) -> None:
    assert read_rows(tmp_path) == []
    for row in ROWS:
        append_row(tmp_path, row)
    for line in (tmp_path / rows_file).read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # no Infinity: JSON for any reader
    with (tmp_path / rows_file).open("ab") as file:
        file.write(b'\xff{"point": {"mod')
    assert read_rows(tmp_path) == ROWS
    append_row(tmp_path, ROWS[1])
    assert read_rows(tmp_path) == [*ROWS, ROWS[1]]


def test_the_best_rate_counts_and_the_mean_over_seeds(tmp_path) -> None:
    settings = config({"model.kind": ["conv", "rnn"], **FORMATS})
    sweep = settings.sweep.model_copy(update={"seeds": [0, 1]})
    points = make_points(settings.model_copy(update={"sweep": sweep}))
    for point in points:
        library, policy = point.values["model.library"], point.values["precision.policy"]
        loss = {"float32": 2.0, "float16": 2.5, "fp8": 2.25}[policy]
        if (point.values["model.kind"], library, policy) == ("rnn", "plain", "float16"):
            loss = float("inf")
        rows = [(rate, seed, loss + more) for rate, seed, more in ((0.4, 0, 0.0), (0.4, 1, 1.0))]
        rows += [(0.1, 0, loss + 1.0), (0.1, 1, loss + 1.0)]
        rows += [(9.0, 0, 0.5), (9.0, 1, None)]  # the other seed failed
        for rate, seed, found in rows:
            append_row(tmp_path, Row(point.settings, rate, seed, found))
    curves = read_curves([*points], tmp_path)
    assert curves[0].losses == {0.1: 3.0, 0.4: 2.5}
    assert (curves[0].best, curves[0].least) == (0.4, 2.5)
    best = by_format(curves)
    assert best["kind=conv"]["plain", "float32"].least == 2.5
    report(points, tmp_path)
    table = (tmp_path / "results.md").read_text()
    cells = ["inf at 0.1", *(f"{loss:.4f} at 0.4" for loss in (2.5, 3, 2.5, 2.75))]
    assert " | ".join(["kind=rnn", *cells]) in table


def test_a_grid_without_formats_or_rows_has_a_table(tmp_path) -> None:
    points = make_points(config({"model.width": [8, 16]}))
    report(points, tmp_path)
    append_row(tmp_path, Row(points[0].settings, 0.5, 0, 2.0))
    report(points, tmp_path)
    assert "width=8 | 2.0000 at 0.5" in (tmp_path / "results.md").read_text()
