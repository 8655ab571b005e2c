"""Metrics are read back, also after a crash; loggers and console get the same numbers."""

import io
import sys
from collections.abc import Callable
from math import log
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.bert.config import BertConfig
from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.run import processes
from recipes.run.evaluate import shown
from recipes.run.folder import open_run
from recipes.run.report import (
    Metrics,
    Reporter,
    Stopwatch,
    check_logger,
    open_metrics,
    read_metrics,
)
from tests.recipes.runs import run

MakeConfig = Callable[..., GPTConfig]


class Refusal(Exception):
    """Raised by a package that cannot start a run."""


@pytest.fixture(params=["wandb", "mlflow"])
def logger(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def package(logger: str, monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A package that notes what it is told."""
    package = MagicMock(Error=Refusal, MlflowException=Refusal)
    package.start_run.return_value.info.run_id = "made"
    monkeypatch.setitem(sys.modules, logger, package)
    return package


def scalars(folder: Path, tag: str) -> dict[int, float]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_resuming_drops_what_is_computed_again(make_config: MakeConfig) -> None:
    folder = open_run(config := make_config())
    path = folder / "metrics.jsonl"
    assert read_metrics(path) == []
    metrics = open_metrics(config, folder, 0)
    for step in (1, 2, 3):
        metrics.write(step, loss=float(step), speed=9.0)
        # At once, in both files.
        assert read_metrics(path)[-1] == {"step": step, "loss": float(step), "speed": 9.0}
        assert scalars(folder, "loss")[step] == step
    metrics.close()
    with path.open("ab") as file:
        file.write(b'{"step": 4, "lo\xff')  # the crash
    metrics = open_metrics(config, folder, 2)
    metrics.write(3, loss=30.0)
    metrics.close()
    expected = {1: 1.0, 2: 2.0, 3: 30.0}
    assert {row["step"]: row["loss"] for row in read_metrics(path)} == expected
    assert scalars(folder, "loss") == expected
    with pytest.raises(FileNotFoundError):
        Metrics(folder / "missing")


@pytest.mark.parametrize("choice", ["tensorboard", "none"])
def test_packages_are_imported_only_when_asked_for(
    choice: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    config = make_config(*([] if choice == "tensorboard" else ["train.logger=none"]))
    check_logger(config)
    metrics = open_metrics(config, folder := open_run(config), 0)
    metrics.write(1, loss=2.5)
    metrics.close()
    own = {"tensorboard"} if choice == "tensorboard" else set()
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "metrics.jsonl", *own}


def test_a_run_and_its_sequel(logger: str, package: MagicMock, make_config: MakeConfig) -> None:
    """Every number of the run is there, by one id; a new run of that name has another."""
    start = {"wandb": package.init, "mlflow": package.start_run}[logger]
    log = {"wandb": package.init().log, "mlflow": package.log_metrics}[logger]
    end = {"wandb": package.init().finish, "mlflow": package.end_run}[logger]
    start.reset_mock()
    config = make_config("train.steps=2", f"train.logger={logger}")
    folder = run(config)[0].folder
    told = [{**each.kwargs, **each.args[0]} for each in log.call_args_list]
    assert told == read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in told] == [1, 2]
    assert not (folder / "tensorboard").exists()
    end.assert_called_once()

    metrics = open_metrics(config, folder, 2)
    metrics.write(3, **{"saturated/body[0].up": 0.5})
    metrics.close()
    first, second = start.call_args_list
    if logger == "wandb":
        log.assert_called_with({"saturated/body[0].up": 0.5}, step=3)
        given = {"name": "tiny", "resume": "allow", "dir": str(folder)}
        assert first.kwargs == given | {"id": first.kwargs["id"], "config": config.model_dump()}
        assert first.kwargs["id"].startswith("tiny-")
        assert second == first
    else:
        log.assert_called_with({"saturated/body_0_.up": 0.5}, step=3)
        assert (first, second) == (
            call(run_id=None, run_name="tiny"),
            call(run_id="made", run_name="tiny"),
        )
        parameters = [each.args[0] for each in package.log_params.call_args_list]
        assert max(map(len, parameters)) <= 100
        merged = {key: value for part in parameters for key, value in part.items()}
        assert len(merged) == sum(map(len, parameters))  # written once
        assert merged["optimizer.learning_rate"] == "0.01"

    folder.rename(folder.with_name("aside"))
    open_metrics(config, open_run(config), 0).close()
    assert start.call_args != first or logger == "mlflow"
    assert start.call_args.kwargs.get("run_id") is None


def test_a_logger_that_cannot_start(
    logger: str, package: MagicMock, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.init.side_effect = package.start_run.side_effect = Refusal("no key")
    config = make_config(f"train.logger={logger}")
    with monkeypatch.context() as patch:  # only the first process logs
        patch.setattr(processes.jax, "process_index", lambda: 1)
        metrics = open_metrics(config, open_run(config), 0)
        metrics.write(1, loss=1.0)
        metrics.close()
    with pytest.raises(RecipeError, match=rf"train\.logger: {logger} could not start .*: no key"):
        open_metrics(config, open_run(config), 0)
    monkeypatch.setitem(sys.modules, logger, None)
    other = make_config(f"train.logger={logger}", "name=other")
    with pytest.raises(RecipeError, match=rf"train\.logger: {logger} .*pip install {logger}"):
        run(other)
    assert not (Path(other.train.runs_dir) / "other").exists()  # said before a folder is made
    with pytest.raises(RecipeError, match=r"train\.logger.*tensorboard.*wandb.*mlflow.*none"):
        make_config("train.logger=wandbb")


@pytest.mark.parametrize("terminal", [True, False], ids=["bar", "lines"])
def test_the_console_shows_progress(terminal: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120)
    with Reporter(100, 9, 512, console, "images") as reporter:
        reporter.advance(10)
        reporter.report(10, 2.5, None)  # resumed right before a log line: no speed is known
        reporter.advance(20)
        reporter.report(20, 2.34567, 1024.0)
        reporter.say("step 20  validation [bold] loss")
    found = output.getvalue()
    if terminal:
        for part in ("20/100", "loss 2.3457", "1,024 images/s", "left", "validation [bold] loss"):
            assert part in found
    else:
        assert found == (
            "step 10/100  loss 2.5000\n"
            "step 20/100  loss 2.3457  1,024 images/s  0:00:40 left\n"
            "step 20  validation [bold] loss\n"
        )


def test_speed_leaves_pauses_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 11.0, 13.0, 15.0, 15.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = Stopwatch(9)  # at 0 s
    clock.restart(10)  # at 10 s
    with clock.paused():  # from 11 s to 13 s
        pass
    assert clock.speed(16, 512) == 6 * 512 / 3  # at 15 s
    assert clock.speed(10, 512) is None


def test_a_loss_in_words() -> None:
    config, loss = GPTConfig(name="a"), 2 * log(2)
    assert shown(config, loss) == "1.3863 nats per token, 2.0000 bits"
    assert shown(config, loss, 4.0).endswith("2.0000 bits, 0.5000 bits per byte")
    masked = BertConfig(recipe="bert", name="a")
    assert shown(masked, 2.0, 4.0) == f"2.0000 nats per {masked.loss_unit}"
