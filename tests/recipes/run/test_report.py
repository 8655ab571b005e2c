"""Metrics are read back, also after a crash; loggers and console get the same numbers."""

import io
import sys
from collections.abc import Callable, Iterator
from math import log
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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
    TensorBoard,
    check_logger,
    open_metrics,
    read_metrics,
)
from tests.recipes.runs import run

MakeConfig = Callable[..., GPTConfig]


class Refusal(Exception):
    """Raised by a package that cannot start a run."""


class Server:
    """The runs that both packages would send, by id: the values by step."""

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


def test_resuming_drops_what_is_computed_again(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    metrics = Metrics(tmp_path, TensorBoard(tmp_path))
    for step in (1, 2, 3):
        metrics.write(step, loss=float(step), speed=9.0)
        # At once, in both files.
        assert read_metrics(tmp_path / "metrics.jsonl")[-1] == {
            "step": step,
            "loss": float(step),
            "speed": 9.0,
        }
        assert scalars(tmp_path, "loss")[step] == step
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "lo\xff')  # the crash
    metrics = Metrics(tmp_path, TensorBoard(tmp_path, resume_step=2), resume_step=2)
    metrics.write(3, loss=30.0)
    metrics.close()
    expected = {1: 1.0, 2: 2.0, 3: 30.0}
    assert {
        row["step"]: row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")
    } == expected
    assert scalars(tmp_path, "loss") == expected
    with pytest.raises(FileNotFoundError):
        Metrics(tmp_path / "missing")


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
    if logger == "wandb":
        told = {"name": "tiny", "resume": "allow", "dir": str(folder)}
        assert server.told == [told | {"config": config.model_dump()}]
        assert name.startswith("tiny-")
    else:
        assert server.told == [{"run_name": "tiny"}]
        assert server.params[name]["optimizer.learning_rate"] == "0.01"

    metrics = open_metrics(config, folder, 2)
    metrics.write(3, **{"saturated/body[0].up": 0.5})
    metrics.close()
    key = "saturated/body[0].up" if logger == "wandb" else "saturated/body_0_.up"
    assert server.runs[name][3] == {key: 0.5}

    folder.rename(folder.with_name("aside"))
    open_metrics(config, open_run(config), 0).close()
    assert len(server.runs) == 2


def test_a_logger_that_cannot_start(
    logger: str, server: Server, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.refuses = True
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
