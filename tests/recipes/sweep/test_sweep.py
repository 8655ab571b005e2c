"""Sweeps: finished runs are not lost or repeated, whatever happens to a run."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from recipes.cli import main
from recipes.config import RunConfig
from recipes.errors import RecipeError
from recipes.recipe import recipe_of
from recipes.run.pool import each
from recipes.run.state import init_state
from recipes.run.step import advance, make_evaluation, make_train_step, mean_loss
from recipes.sweep import search as module
from recipes.sweep.points import append_row, read_rows
from recipes.sweep.search import Trials, missing, sweep
from recipes.train import train

from ..characters import make, write
from ..dying import dies_at_two

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
    config = make(tmp_path, sweep=GRID)
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
    config = make(tmp_path, sweep=GRID | {"seeds": [0, 1]})
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
    sweep(make(tmp_path, sweep=GRID | {"when": when}), console=QUIET)
    assert machine.norms == {"pre"}


def test_rows_of_another_sweep_or_text_are_refused(machine, tmp_path) -> None:
    folder = sweep(make(tmp_path, sweep=GRID), console=QUIET)
    with pytest.raises(RecipeError, match=r"another config:\n  train\.steps: 3 -> 4\n.*--fresh"):
        sweep(make(tmp_path, sweep=GRID, train={"steps": 4}), console=QUIET)
    config = make(tmp_path, sweep=GRID, train={"steps": 4})
    sweep(config, fresh=True, console=QUIET)
    assert (tmp_path / "runs" / "tiny-sweep.old-1" / "rows.jsonl").exists()
    with pytest.raises(RecipeError, match=r"name: .*tiny-sweep is the folder of a sweep"):
        train(make(tmp_path, sweep=GRID, name=folder.name), console=QUIET)
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
    path = write(
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "conv"])
def test_runs_of_all_rates_and_seeds(kind, tmp_path) -> None:
    config = make(tmp_path, model={"kind": kind}, train={"eval_batches": 2})
    trials = Trials(config)
    found = [*trials([0.01, 0.1, 1e30], 0), *trials([0.1], 1)]
    assert found[2] == math.inf
    expected = [alone(config, rate, seed) for rate, seed in ((0.01, 0), (0.1, 0), (0.1, 1))]
    np.testing.assert_allclose([*found[:2], found[3]], expected, rtol=1e-5)
    assert abs(found[1] - found[0]) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        ({"umup": False, "weight_decay": 0.1, "clip_norm": 0.5}, {}),
        ({"weight_decay": 0.1, "warmup_steps": 1, "schedule": "cosine"}, {}),
        ({"weight_decay": 0.1}, {"weights": "float16", "moments": ["float8_e4m3fn", "float16"]}),
    ],
    ids=["plain", "u-muP", "few bits"],
)
def test_a_rate_is_the_optimizer_s_own(optimizer, precision, tmp_path) -> None:
    """The rate affects neither u-muP's weight decay nor the clipping norm."""
    library = "unitscale" if optimizer.get("umup", True) else "plain"
    optimizer = {"name": "adamw"} | optimizer
    config = make(tmp_path, model={"library": library}, optimizer=optimizer, precision=precision)
    (found,) = Trials(config)([0.03], 0)
    np.testing.assert_allclose(found, alone(config, 0.03, 0), rtol=1e-5)
