"""What is shown elsewhere: TensorBoard reads it back, and fake packages note what they are told."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.run import processes
from recipes.run.folder import open_run
from recipes.run.loggers import TensorBoard, check_logger, open_logger
from recipes.run.metrics import open_metrics, read_metrics
from tests.recipes.runs import run

MakeConfig = Callable[..., GPTConfig]


class Refusal(Exception):
    """What a package raises that cannot start a run."""


class Server:
    """What both packages would send: the runs by id, each with the values by step."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[int, dict[str, float]]] = {}
        self.told: list[dict[str, Any]] = []
        self.params: dict[str, dict[str, str]] = {}
        self.open: str | None = None
        self.refuses = False

    def start(self, key: str, **told: Any) -> None:
        if self.refuses:
            raise Refusal("no key")
        assert self.open is None, "the run before was not ended"
        self.open = key
        self.told.append(told)
        self.runs.setdefault(key, {})

    def log(self, values: dict[str, float], step: int) -> None:
        assert self.open is not None, "no run is open"
        self.runs[self.open].setdefault(step, {}).update(values)

    def end(self) -> None:
        self.open = None


class Wandb(ModuleType):
    Error = Refusal

    def __init__(self, server: Server) -> None:
        super().__init__("wandb")
        self.server = server

    def init(self, *, id: str, **told: Any) -> SimpleNamespace:
        self.server.start(id, **told)
        return SimpleNamespace(log=self.server.log, finish=self.server.end)


class Mlflow(ModuleType):
    MlflowException = Refusal

    def __init__(self, server: Server) -> None:
        super().__init__("mlflow")
        self.server = server
        self.log_metrics, self.end_run = server.log, server.end

    def start_run(self, *, run_id: str | None, run_name: str) -> SimpleNamespace:
        name = run_id or f"made-{len(self.server.runs)}"
        self.server.start(name, run_name=run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id=name))

    def log_params(self, params: dict[str, str]) -> None:
        assert len(params) <= 100
        assert self.server.open is not None
        mine = self.server.params.setdefault(self.server.open, {})
        assert not mine.keys() & params.keys(), "MLflow's parameters are written once"
        mine.update(params)


@pytest.fixture(params=["wandb", "mlflow"])
def logger(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def server(logger: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    fake = {"wandb": Wandb, "mlflow": Mlflow}[logger](server)
    monkeypatch.setitem(sys.modules, logger, fake)
    yield server
    assert server.open is None, "a run was left open"


def scalars(folder: Path, tag: str) -> dict[int, float]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_tensorboard_has_a_line_at_once(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.write(1, {"loss": 2.5, "speed": 100.0})
    assert scalars(tmp_path, "loss") == {1: 2.5}
    board.close()


def test_tensorboard_drops_what_is_computed_again(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    for step in (1, 2, 3):
        board.write(step, {"loss": float(step)})
    board.close()
    board = TensorBoard(tmp_path, resume_step=2)
    board.write(3, {"loss": 30.0})
    board.close()
    assert scalars(tmp_path, "loss") == {1: 1.0, 2: 2.0, 3: 30.0}


def test_tensorboard_is_the_default(make_config: MakeConfig) -> None:
    config = make_config()
    metrics = open_metrics(config, open_run(config), 0)
    metrics.write(1, loss=2.5)
    metrics.close()
    assert scalars(open_run(config), "loss") == {1: 2.5}


def test_none(make_config: MakeConfig) -> None:
    config = make_config("train.logger=none")
    folder = open_run(config)
    metrics = open_metrics(config, folder, 0)
    metrics.write(1, loss=2.5)
    metrics.close()
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "metrics.jsonl"}


def test_a_run_and_its_sequel(logger: str, server: Server, make_config: MakeConfig) -> None:
    """Every number of the run is there, by one id; a new run of that name has another."""
    config = make_config("train.steps=2", f"train.logger={logger}")
    folder = run(config)[0].folder
    (name,) = server.runs
    expected: dict[int, dict[str, float]] = {}
    for row in read_metrics(folder / "metrics.jsonl"):
        expected.setdefault(row.pop("step"), {}).update(row)
    assert server.runs == {name: expected}
    assert len(expected) == 2
    assert not (folder / "tensorboard").exists()

    metrics = open_metrics(config, folder, 2)
    metrics.write(3, loss=1.0)
    metrics.close()
    assert server.runs[name][3] == {"loss": 1.0}

    folder.rename(folder.with_name("aside"))
    open_logger(config, open_run(config), 0).close()
    assert len(server.runs) == 2


@pytest.mark.parametrize("logger", ["wandb"])
def test_what_wandb_is_told(server: Server, make_config: MakeConfig) -> None:
    config = make_config("train.logger=wandb")
    folder = open_run(config)
    open_logger(config, folder, 0).close()
    assert server.told == [
        {"name": "tiny", "resume": "allow", "dir": str(folder), "config": config.model_dump()}
    ]
    assert next(iter(server.runs)).startswith("tiny-")


@pytest.mark.parametrize("logger", ["mlflow"])
def test_what_mlflow_is_told(server: Server, make_config: MakeConfig) -> None:
    config = make_config("train.logger=mlflow")
    board = open_logger(config, open_run(config), 0)
    board.write(1, {"saturated/body[0].up": 0.5})
    board.close()
    ((name, params),) = server.params.items()
    assert server.runs == {name: {1: {"saturated/body_0_.up": 0.5}}}
    assert server.told == [{"run_name": "tiny"}]
    assert params["optimizer.learning_rate"] == "0.01"


def test_a_logger_that_cannot_start(logger: str, server: Server, make_config: MakeConfig) -> None:
    server.refuses = True
    config = make_config(f"train.logger={logger}")
    message = rf"train\.logger: {logger} could not start a run: no key; .*tensorboard"
    with pytest.raises(RecipeError, match=message):
        open_logger(config, open_run(config), 0)


def test_a_package_that_is_missing(
    logger: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before the run's folder is made."""
    monkeypatch.setitem(sys.modules, logger, None)
    config = make_config(f"train.logger={logger}")
    with pytest.raises(RecipeError, match=rf"train\.logger: {logger} .*pip install {logger}, or"):
        run(config)
    assert not Path(config.train.runs_dir).exists()


@pytest.mark.parametrize("choice", ["tensorboard", "none"])
def test_packages_are_imported_only_when_asked_for(
    choice: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    config = make_config(f"train.logger={choice}")
    check_logger(config)
    open_logger(config, open_run(config), 0).close()


def test_the_first_process_alone_logs(
    logger: str, server: Server, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(f"train.logger={logger}")
    monkeypatch.setattr(processes.jax, "process_index", lambda: 1)
    metrics = open_metrics(config, open_run(config), 0)
    metrics.write(1, loss=1.0)
    metrics.close()
    assert server.runs == {}


def test_a_run_may_go_on_with_another_logger(make_config: MakeConfig) -> None:
    assert open_run(make_config("train.logger=none")) == open_run(make_config())


def test_a_logger_that_does_not_exist(make_config: MakeConfig) -> None:
    with pytest.raises(RecipeError, match=r"train\.logger.*tensorboard.*wandb.*mlflow.*none"):
        make_config("train.logger=wandbb")
