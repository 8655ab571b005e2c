"""Where the numbers of a run go besides `metrics.jsonl`: TensorBoard, Weights & Biases or MLflow.

The last two are packages that a user installs, imported only where a config names them. They read
where to send what from their own environment variables. A run that is resumed goes on there too:
its id is kept in its folder.
"""

import importlib
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.summary import scalar

from ..atomic import write_whole
from ..config import RunConfig
from ..errors import RecipeError
from .folder import flatten

# Protocol buffers make their classes at run time, out of sight of type checkers.
_Event: Any = getattr(event_pb2, "Event")  # noqa: B009
_SessionLog: Any = getattr(event_pb2, "SessionLog")  # noqa: B009
_Summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009

_MOST_PARAMS = 100  # that MLflow takes at once
_LONGEST_PARAM = 500  # characters that every version of it takes


class Logger(Protocol):
    """Shows the numbers of a run."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records values by name at a step (steps done so far)."""
        ...

    def close(self) -> None: ...


class NoLogger:
    """Shows nothing."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    """Writes a new event file in `tensorboard/`."""

    def __init__(self, folder: Path, resume_step: int = 0):
        (folder / "tensorboard").mkdir(exist_ok=True)
        # Written event by event: the library's own summary writer leaves it to a thread.
        path = folder / "tensorboard" / "events"
        self._events = EventsWriter(str(path), f".{os.getpid()}.{time.time_ns()}")
        # A restart tells TensorBoard to drop what an earlier session wrote from here on.
        start = _SessionLog(status=_SessionLog.START)
        self._write_event(step=resume_step + 1, session_log=start)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [scalar(name, value).value[0] for name, value in values.items()]
        self._write_event(step=step, summary=_Summary(value=scalars))

    def close(self) -> None:
        self._events.close()

    def _write_event(self, **fields: Any) -> None:
        self._events.write_event(_Event(wall_time=time.time(), **fields))
        self._events.flush()


class Wandb:
    """Logs to a run of Weights & Biases.

    Of steps that a resumed run computes again, it keeps the first values.
    """

    def __init__(self, config: RunConfig, folder: Path):
        wandb = load_package("wandb")
        name = _kept(folder / "wandb.id") or f"{config.name[:40]}-{secrets.token_hex(4)}"
        try:
            self._run = wandb.init(
                id=name,
                name=config.name,
                resume="allow",
                dir=str(folder),
                config=config.model_dump(),
            )
        except wandb.Error as error:
            todo = "run `wandb login`, or set WANDB_MODE=offline"
            raise _not_started("wandb", error, todo) from error
        write_whole(folder / "wandb.id", name)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """Logs to a run of MLflow, and the config as its parameters.

    Of steps that a resumed run computes again, it keeps both values.
    """

    def __init__(self, config: RunConfig, folder: Path):
        self._mlflow = mlflow = load_package("mlflow")
        kept = _kept(folder / "mlflow.id")
        try:
            run = mlflow.start_run(run_id=kept, run_name=config.name)
            if kept is None:
                flat = {k: str(v)[:_LONGEST_PARAM] for k, v in flatten(config.model_dump()).items()}
                items = list(flat.items())
                for start in range(0, len(items), _MOST_PARAMS):
                    mlflow.log_params(dict(items[start : start + _MOST_PARAMS]))
        except mlflow.MlflowException as error:
            todo = "set MLFLOW_TRACKING_URI to a server that answers, or to a folder"
            raise _not_started("mlflow", error, todo) from error
        write_whole(folder / "mlflow.id", run.info.run_id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        named = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in values.items()}
        self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def load_package(name: str) -> Any:
    """The optional package of a logger.

    Raises:
      RecipeError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(
            f"train.logger: {name} needs the package {name}, which cannot be imported ({error}); "
            f"pip install {name}, or set train.logger tensorboard"
        ) from error


def check_logger(config: RunConfig) -> None:
    """Raises where the package that a config logs with is missing, before anything is made."""
    if config.train.logger in ("wandb", "mlflow"):
        load_package(config.train.logger)


def open_logger(config: RunConfig, folder: Path, resume_step: int) -> Logger:
    """The logger of a config, for a run that goes on after a step.

    Raises:
      RecipeError: Its package is not installed, or cannot start a run.
    """
    match config.train.logger:
        case "tensorboard":
            return TensorBoard(folder, resume_step)
        case "wandb":
            return Wandb(config, folder)
        case "mlflow":
            return Mlflow(config, folder)
        case "none":
            return NoLogger()


def _kept(path: Path) -> str | None:
    """The id that an earlier start of the run left."""
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def _not_started(name: str, error: Exception, todo: str) -> RecipeError:
    return RecipeError(
        f"train.logger: {name} could not start a run: {error}; {todo}, or set train.logger "
        "tensorboard",
        exit_code=1,
    )
