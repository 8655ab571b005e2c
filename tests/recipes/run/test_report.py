"""Reading metrics, also after a crash; loggers and console get the same numbers."""

import sys
from collections.abc import Callable
from math import log
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.bert.config import BertConfig
from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.run.folder import (
    open_metrics,
    open_run,
    read_metrics,
)
from recipes.train import shown

MakeConfig = Callable[..., GPTConfig]


class Refusal(Exception):
    """Raised by a fake package that cannot start a run."""


@pytest.fixture(params=["wandb", "mlflow"])
def logger(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def package(logger: str, monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A fake package that records calls."""
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


@pytest.mark.parametrize("choice", ["tensorboard", "none"])
def test_packages_are_imported_only_when_asked_for(
    choice: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    config = make_config(*([] if choice == "tensorboard" else ["train.logger=none"]))
    metrics = open_metrics(config, folder := open_run(config), 0)
    metrics.write(1, loss=2.5)
    metrics.close()
    own = {"tensorboard"} if choice == "tensorboard" else set()
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "metrics.jsonl", *own}


def test_a_run_and_its_sequel(logger: str, package: MagicMock, make_config: MakeConfig) -> None:
    """All metrics have the run's id; a new run of the same name gets a new id."""
    start = {"wandb": package.init, "mlflow": package.start_run}[logger]
    log = {"wandb": package.init().log, "mlflow": package.log_metrics}[logger]
    end = {"wandb": package.init().finish, "mlflow": package.end_run}[logger]
    start.reset_mock()
    config = make_config(f"train.logger={logger}")
    folder = open_run(config)
    for step in (1, 2):
        metrics = open_metrics(config, folder, step - 1)
        metrics.write(step, **{"loss": 0.5, "saturated/body[0].up": step})
        metrics.close()
    told = [{**each.kwargs, **each.args[0]} for each in log.call_args_list]
    assert not (folder / "tensorboard").exists()
    assert end.call_count == 2
    first, second = start.call_args_list
    if logger == "wandb":
        assert told == read_metrics(folder / "metrics.jsonl")
        given = {"name": "tiny", "resume": "allow", "dir": str(folder)}
        assert first.kwargs == given | {"id": first.kwargs["id"], "config": config.model_dump()}
        assert first.kwargs["id"].startswith("tiny-")
        assert second == first
    else:
        assert told == [{"step": n, "loss": 0.5, "saturated/body_0_.up": n} for n in (1, 2)]
        assert first == call(run_id=None, run_name="tiny")
        assert second == call(run_id="made", run_name="tiny")
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
    with pytest.raises(RecipeError, match=rf"train\.logger: {logger} could not start .*: no key"):
        open_metrics(config, open_run(config), 0)
    monkeypatch.setitem(sys.modules, logger, None)
    with pytest.raises(RecipeError, match=rf"train\.logger: {logger} .*pip install {logger}"):
        open_metrics(config, open_run(config), 0)


def test_a_loss_in_words() -> None:
    config, loss = GPTConfig(name="a"), 2 * log(2)
    assert shown(config, loss) == "1.3863 nats per token, 2.0000 bits"
    assert shown(config, loss, 4.0).endswith("2.0000 bits, 0.5000 bits per byte")
    masked = BertConfig(recipe="bert", name="a")
    assert shown(masked, 2.0, 4.0) == f"2.0000 nats per {masked.loss_unit}"
