from typing import Any

import pytest

from recipes.charlm.config import CharlmConfig
from recipes.errors import RecipeError
from recipes.sweep import make_points

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
        assert list(point.values.values()) == [run.model.kind, run.model.library, run.policy]
        plain = run.model.library == "plain"
        assert run.optimizer.umup == (not plain)
        assert run.optimizer.multipliers.bias == (0.03 if plain else 0.5)
    assert make_points(config({}))[0].values == {}
    # What a sweep leaves in its folder has every key, and is the same sweep.
    again = make_points(CharlmConfig.model_validate(settings.model_dump()))
    assert [point.settings for point in again] == [point.settings for point in points]


def test_numbers_are_those_of_the_grid() -> None:
    when = {"optimizer.final_fraction=1e-4": None}
    (point,) = make_points(config({"optimizer.final_fraction": [1e-4, 0.1]}, when))
    assert point.values == {"optimizer.final_fraction": 0.1}


def test_words_hold_of_a_section_that_the_grid_lists() -> None:
    grid = {"optimizer.multipliers": [{"bias": 0.1}, {"bias": 0.2}]}
    when = {"optimizer.multipliers.bias=0.1": {"train.steps": 2}}
    points = make_points(config(grid, when))
    assert [point.further for point in points] == [{"train.steps": 2}, {}]


def test_a_point_in_words() -> None:
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


@pytest.mark.parametrize(
    ("grid", "when", "message"),
    [
        ({"model.kid": ["rnn"]}, {}, r"sweep\.grid: model\.kid is not a key .*mean model\.kind"),
        ({"optimizer.learning_rate": [1.0]}, {}, r"optimizer\.learning_rate cannot be set here"),
        ({"sweep.seeds": [[1]]}, {}, r"sweep\.grid: sweep\.seeds cannot be set here"),
        ({"model.kind": ["rnn", "rnn"]}, {}, r"model\.kind: expected at least one value"),
        ({"model.kind": []}, {}, r"model\.kind: expected at least one value, none .*got \[\]"),
        ({"model.kind": ["mlp"]}, {}, r"the point kind=mlp is no run: model\.kind .*expected 'co"),
        ({"model.heads": [3]}, {}, r"heads must divide width; got 3 and 64"),
        ({}, {"model.kid=rnn": {}}, r"sweep\.when: model\.kid is not a key"),
        ({}, {"model.kind=rnn": {"model.with": 8}}, r"sweep\.when: model\.with is not a key"),
        ({"model.width": [8]}, {"seed=0": {"model.width": 4}}, r"sweep\.when: model\.width cannot"),
        (
            {"model.library": ["plain"], "precision.policy": ["fp8"]},
            None,
            r"no point is left: sweep\.when",
        ),
    ],
)
def test_errors(grid, when, message) -> None:
    with pytest.raises(RecipeError, match=message):
        make_points(config(grid, when))


def test_runs_that_a_sweep_does_not_do() -> None:
    with pytest.raises(RecipeError, match=r"got mesh or monitor; set both null"):
        make_points(config({}, precision={"policy": "fp8", "monitor": 0.1}))
