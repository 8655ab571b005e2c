"""Sweeps: points of a grid; finished runs are not lost or repeated, whatever happens to a run."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from recipes.charlm.config import CharlmConfig
from recipes.cli import main
from recipes.config import RunConfig
from recipes.errors import RecipeError
from recipes.recipe import recipe_of
from recipes.run.folder import ROWS as rows_file
from recipes.run.pool import each
from recipes.run.state import init_state
from recipes.run.step import advance, make_evaluation, make_train_step, mean_loss
from recipes.sweep import search as module
from recipes.sweep.points import (
    Row,
    append_row,
    by_format,
    make_points,
    read_curves,
    read_rows,
    report,
)
from recipes.sweep.search import Trials, missing, sweep

from ..dying import dies_at_two
from ..support import charlm_config, write_charlm

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
    # The config in a sweep's folder has every key, and describes the same sweep.
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
    ({}, {"model.layers": None}, r"sweep\.when: expected conditions such as .*got 'model\.layers'"),
    ({}, {"precision=fp8": {}}, r"sweep\.when: precision has no value; use precision\.policy or"),
    ({"precision": ["fp8"]}, {"precision.policy=fp8": None}, r"expected points; got none"),
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
    cells = ["inf at 0.1", *(f"{loss:.4f} at 0.4" for loss in (2.5, 3, 2.5, 2.75))]
    assert " | ".join(["kind=rnn", *cells]) in (tmp_path / "results.md").read_text()


NORMS = ["pre", "post", "none"]
GRID = {"grid": {"model.norm": NORMS}, "rates": 3, "rounds": 2}
QUIET = Console(quiet=True)


class Machine:
    """Replaces training: counts calls, and fails on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.broken: set[str] = set()
        self.trained: list[tuple[str, float, int]] = []
        monkeypatch.setattr(module, "Trials", self.make_trials)

    def make_trials(self, config):
        norm = config.model.norm
        middle = 4 * config.optimizer.learning_rate

        def trials(rates, seed):
            if norm in self.broken:
                raise MemoryError(f"no room for {norm}\nand more")
            self.trained += [(norm, rate, seed) for rate in rates]
            return [math.inf if r > 5 * middle else abs(math.log(r / middle)) for r in rates]

        return trials

    @property
    def norms(self) -> set[str]:
        return {norm for norm, *_ in self.trained}


@pytest.fixture
def machine(monkeypatch) -> Machine:
    return Machine(monkeypatch)


def test_one_failure_stops_nothing_and_is_tried_again(machine, tmp_path) -> None:
    config = charlm_config(tmp_path, sweep=GRID)
    machine.broken = {"post"}
    with pytest.raises(RecipeError, match=r"1 of 3 points failed, messages in .*rows\.jsonl"):
        sweep(config, console=QUIET)
    folder = tmp_path / "runs" / "tiny-sweep"
    rows = read_rows(folder)
    assert [(r.point, r.error) for r in rows if r.error] == [
        ({"model.norm": "post"}, "MemoryError: no room for post")
    ]
    # Three rates and, because the best was the highest, three more; the last ones diverge.
    assert len(rows) == 6 + 1 + 6
    assert math.inf in [row.loss for row in rows]
    machine.broken, machine.trained = set(), []
    sweep(config, console=QUIET)
    assert machine.norms == {"post"}
    machine.trained = []
    sweep(config, console=QUIET)
    assert machine.trained == []
    assert len(read_rows(folder)) == 19


def test_a_sweep_goes_on_within_a_point_and_over_more_of_them(machine, tmp_path) -> None:
    config = charlm_config(tmp_path, sweep=GRID | {"seeds": [0, 1]})
    folder = sweep(config, console=QUIET)
    rows = read_rows(folder)
    kept = [r for r in rows if r.point == {"model.norm": "pre"}][:2]
    (folder / "rows.jsonl").unlink()
    for row in kept:
        append_row(folder, row)
    machine.trained = []
    sweep(config, console=QUIET)
    assert sorted(map(str, read_rows(folder))) == sorted(map(str, rows))
    assert not {("pre", r.learning_rate, r.seed) for r in kept} & set(machine.trained)
    machine.trained = []
    # A point that has other settings is another one; more points are no other sweep.
    when = {"model.norm=pre": {"model.layers": 3}}
    sweep(charlm_config(tmp_path, sweep=GRID | {"when": when}), console=QUIET)
    assert machine.norms == {"pre"}


def test_rows_of_another_sweep_or_text_are_refused(machine, tmp_path) -> None:
    sweep(charlm_config(tmp_path, sweep=GRID), console=QUIET)
    with pytest.raises(RecipeError, match=r"another config:\n  train\.steps: 3 -> 4\n.*--fresh"):
        sweep(charlm_config(tmp_path, sweep=GRID, train={"steps": 4}), console=QUIET)
    config = charlm_config(tmp_path, sweep=GRID, train={"steps": 4})
    folder = sweep(config, fresh=True, console=QUIET)
    (folder / "data.json.tmp").mkdir()
    with pytest.raises(RecipeError, match=r"cannot write .*tiny-sweep: Is a directory"):
        sweep(config, console=QUIET)
    assert (tmp_path / "runs" / "tiny-sweep.old-1" / "rows.jsonl").exists()
    text = tmp_path / "text.txt"
    text.write_text(text.read_text("utf-8")[::-1], "utf-8")
    with pytest.raises(RecipeError, match=r"data: it is not what .*tiny-sweep was trained on"):
        sweep(config, console=QUIET)


@pytest.mark.slow
def test_a_process_that_dies_costs_its_own_point(tmp_path) -> None:
    tasks = [(number, str(tmp_path)) for number in range(5)]
    ended = dict(each(tasks, 2, dies_at_two))
    assert set(ended) == set(tasks)
    assert "worker process was killed" in str(ended[2, str(tmp_path)])
    done = {int(path.name) for path in tmp_path.iterdir()}
    assert done >= {number for (number, _), error in ended.items() if error is None}


@pytest.mark.slow
def test_the_command_trains_in_processes_of_its_own(tmp_path, capsys) -> None:
    plain = {"optimizer.umup": False, "optimizer.learning_rate": 0.01}
    grid = {"model.library": ["plain", "unitscale"]}
    # Three steps: far from where losses grow.
    path = write_charlm(
        tmp_path,
        optimizer={"learning_rate": 0.1},
        sweep={"grid": grid, "when": {"model.library=plain": plain}, "rates": 3, "rounds": 1},
    )
    assert main(["sweep", "model.layers=1"]) == 2
    assert "expected a config file" in capsys.readouterr().err
    assert main(["sweep", str(path), "model.layers=1", "--jobs", "2"]) == 0
    assert "2/2  library=" in capsys.readouterr().out
    rows = read_rows(tmp_path / "runs" / "tiny-sweep")
    assert len(rows) == 6
    assert all(row.loss is not None and 2 < row.loss < 12 for row in rows)


@settings(max_examples=30)
@given(best=st.integers(-9, 9), rates=st.integers(3, 6), known=st.sets(st.integers(-9, 9)))
def test_the_best_rate_is_found_and_bracketed_wherever_it_is(best, rates, known) -> None:
    """Starting from any known losses, no rate is trained twice or far from the best."""

    def loss(place: int) -> float:
        # Above the best the loss soon diverges, as it does with learning rates.
        return math.inf if place > best + 2 else (place - best) ** 2

    losses, trained = {place: loss(place) for place in known}, []
    while places := missing(losses, rates, 8):
        trained += places
        losses |= {place: loss(place) for place in places}
    assert min(losses, key=lambda place: losses[place]) == best
    assert {best - 1, best, best + 1} <= set(losses)
    assert not known & set(trained)
    assert len(trained) == len(set(trained))
    assert set(trained) <= set(range(-abs(best) - rates - 1, abs(best) + rates + 2))


def alone(config: RunConfig, rate: float, seed: int) -> float:
    """Return the validation loss of a single training run."""
    optimizer = config.optimizer.model_copy(update={"learning_rate": rate})
    config = config.model_copy(update={"seed": seed, "optimizer": optimizer})
    graphdef, rule, state = init_state(config)
    data, steps = recipe_of(config).load_data(config), config.train.steps
    step = make_train_step(graphdef, rule, config)
    state = advance(step, state, data.training(seed), 0, steps)
    batches = data.validation(config.train.eval_batches)
    return mean_loss(make_evaluation(graphdef), state.params, state.rest, batches)


PLAIN = {"name": "adamw", "umup": False, "weight_decay": 0.1, "clip_norm": 0.5}
SCHEDULED = {"name": "adamw", "weight_decay": 0.1, "warmup_steps": 1, "schedule": "cosine"}
FEW = {"weights": "float16", "moments": ["float8_e4m3fn", "float16"]}
TRIALS: dict[str, dict[str, Any]] = {
    "attention": {"model": {"kind": "attention"}},
    "conv": {"model": {"kind": "conv"}},
    "plain": {"optimizer": PLAIN, "model": {"library": "plain"}},
    "u-muP": {"optimizer": SCHEDULED},
    "few bits": {"optimizer": {"name": "adamw", "weight_decay": 0.1}, "precision": FEW},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
def test_runs_of_all_rates_and_seeds(name, tmp_path) -> None:
    """The rate affects neither u-muP's weight decay nor the clipping norm."""
    config = charlm_config(tmp_path, **TRIALS[name], train={"eval_batches": 2})
    trials = Trials(config)
    found = [*trials([0.01, 0.1, 1e30], 0), *trials([0.1], 1)]
    assert found[2] == math.inf
    expected = [alone(config, rate, seed) for rate, seed in ((0.01, 0), (0.1, 0), (0.1, 1))]
    np.testing.assert_allclose([*found[:2], found[3]], expected, rtol=1e-5)
