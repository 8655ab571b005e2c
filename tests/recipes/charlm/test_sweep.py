"""Sweeps: nothing that was finished is lost or done again, whatever happens to a run."""

from __future__ import annotations

import math

import pytest
from rich.console import Console

from recipes.charlm import sweep as module
from recipes.charlm.rows import append_row, read_rows
from recipes.charlm.sweep import sweep
from recipes.cli import main
from recipes.errors import RecipeError

from .characters import make, write
from .dying import dies_at_two

GRID = {"grid": {"model.norm": ["pre", "post", "none"]}, "rates": 3, "rounds": 2}
QUIET = Console(quiet=True)


class Machine:
    """Stands in for training: counts what it is asked for, and fails where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.broken: set[str] = set()
        self.trained: list[tuple[str, float]] = []
        monkeypatch.setattr(module, "_make_runs", self.make_runs)

    def make_runs(self, config):
        norm = config.model.norm

        def runs(rates, seeds):
            if norm in self.broken:
                raise MemoryError(f"no room for {norm}\nand more")
            assert len(rates) == len(seeds) == config.sweep.rates * len(config.sweep.seeds)
            self.trained += [(norm, rate) for rate in dict.fromkeys(rates)]
            middle = 4 * config.sweep.start.unit_adam
            return [math.inf if r > 5 * middle else abs(math.log(r / middle)) for r in rates]

        return runs


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
    failed = [row for row in rows if row.error]
    assert [(r.point, r.error) for r in failed] == [
        ({"model.norm": "post"}, "MemoryError: no room for post")
    ]
    # Three rates and, because the best was the highest, three more; the last ones diverge.
    assert len(rows) == 6 + 1 + 6
    assert math.inf in [row.loss for row in rows]
    assert (folder / "scatter.png").exists()
    machine.broken, machine.trained = set(), []
    sweep(config, console=QUIET)
    assert {norm for norm, _ in machine.trained} == {"post"}
    machine.trained = []
    sweep(config, console=QUIET)
    assert machine.trained == []
    assert len(read_rows(folder)) == 19


def test_a_sweep_goes_on_within_a_point(machine, tmp_path) -> None:
    config = make(tmp_path, sweep=GRID)
    folder = sweep(config, console=QUIET)
    rows = read_rows(folder)
    kept = [r for r in rows if r.point == {"model.norm": "pre"}][:2]
    (folder / "rows.jsonl").unlink()
    for row in kept:
        append_row(folder, row)
    machine.trained = []
    sweep(config, console=QUIET)
    again = read_rows(folder)
    assert sorted(map(str, again)) == sorted(map(str, rows))
    assert ("pre", kept[0].learning_rate) not in machine.trained


def test_rows_of_another_sweep_are_refused(machine, tmp_path) -> None:
    sweep(make(tmp_path, sweep=GRID), console=QUIET)
    with pytest.raises(RecipeError, match=r"another config:\n  train\.steps: 3 -> 4\n.*--fresh"):
        sweep(make(tmp_path, sweep=GRID, train={"steps": 4}), console=QUIET)
    sweep(make(tmp_path, sweep=GRID, train={"steps": 4}), fresh=True, console=QUIET)
    assert (tmp_path / "runs" / "tiny-sweep.old-1" / "rows.jsonl").exists()


def test_a_process_that_dies_costs_its_own_point(tmp_path, monkeypatch) -> None:
    failed = []
    monkeypatch.setattr(module, "_fail", lambda task, message: failed.append(task))
    tasks = [(number, str(tmp_path)) for number in range(5)]
    ended = dict(module._each(tasks, 2, dies_at_two))
    assert set(ended) == set(tasks)
    message = ended[2, str(tmp_path)]
    assert message is not None
    assert "its process was killed" in message
    assert [task for task in failed if task[0] == 2] == [tasks[2]]
    done = {int(path.name) for path in tmp_path.iterdir()}
    assert done >= {number for (number, _), error in ended.items() if error is None}


@pytest.mark.slow
def test_the_command_trains_in_processes_of_its_own(tmp_path, capsys) -> None:
    grid = {"model.parametrization": ["regular", "unit"]}
    start = {"regular_adam": 0.01, "unit_adam": 0.1}  # three steps: far from where losses grow
    path = write(tmp_path, sweep={"grid": grid, "rates": 3, "rounds": 1, "start": start})
    assert main(["sweep", str(path), "model.layers=1", "--jobs", "2"]) == 0
    assert "2/2  parametrization=" in capsys.readouterr().out
    rows = read_rows(tmp_path / "runs" / "tiny-sweep")
    assert len(rows) == 6
    assert all(row.loss is not None and 2 < row.loss < 12 for row in rows)


def test_errors_of_the_command(tmp_path, capsys) -> None:
    assert main(["sweep", "model.layers=1"]) == 2
    assert "sweep: expected a config file; got none" in capsys.readouterr().err
    assert main(["sweep", str(write(tmp_path)), "sweep.grid={model.kid: [rnn]}"]) == 2
    assert "model.kid is not a key of the config; did you mean model.kind?" in (
        capsys.readouterr().err
    )
    other = tmp_path / "gpt.yaml"
    other.write_text("name: g\n")
    assert main(["sweep", str(other)]) == 2
    assert "expected a config of recipe charlm; got recipe gpt" in capsys.readouterr().err
