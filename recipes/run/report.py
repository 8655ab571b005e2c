"""The metrics of a run, in its folder and in a logger.

Packages of loggers are imported only where a config names them, and set up by their own environment
variables; a resumed run continues there by the id kept in its folder.
"""

import contextlib
import importlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.summary import scalar

from ..config import RunConfig
from ..errors import RecipeError, write_whole
from .folder import flatten
from .processes import is_first

# Protocol buffers make their classes at run time, out of sight of type checkers.
_Event: Any = getattr(event_pb2, "Event")  # noqa: B009
_SessionLog: Any = getattr(event_pb2, "SessionLog")  # noqa: B009
_Summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009


class Logger(NamedTuple):
    """Shows the metrics of a run: `write(step, values)` and `close()`."""

    write: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], Any]


class Metrics:
    """Metrics as lines of JSON in `metrics.jsonl`, and in a logger; nowhere without a folder."""

    def __init__(self, folder: Path | None, logger: Logger | None = None, *, resume_step: int = 0):
        self._lines, self._logger = None, logger
        if folder is not None:
            path = folder / "metrics.jsonl"
            kept = [row for row in read_metrics(path) if row["step"] <= resume_step]
            write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
            self._lines = path.open("a", encoding="utf-8")

    def write(self, step: int, **values: float) -> None:
        """Record values by name at a step (steps done so far)."""
        if self._lines:
            self._lines.write(json.dumps({"step": step, **values}) + "\n")
            self._lines.flush()
        if self._logger:
            self._logger.write(step, values)

    def close(self) -> None:
        for opened in filter(None, (self._lines, self._logger)):
            opened.close()


def open_metrics(config: RunConfig, folder: Path, resume_step: int) -> Metrics:
    """The metrics of a run that resumes after a step; only the first process writes."""
    if not is_first():
        return Metrics(None)
    logger = None
    if config.train.logger == "tensorboard":
        logger = _tensorboard(folder, resume_step)
    elif config.train.logger != "none":
        start = _wandb if config.train.logger == "wandb" else _mlflow
        try:
            logger = start(_package(config), config, folder)
        except RecipeError:
            raise
        except Exception as error:  # each package has its own kinds
            raise RecipeError(
                f"train.logger: {config.train.logger} could not start a run: {error}; set it up as "
                "its documentation says, or set train.logger tensorboard",
                exit_code=1,
            ) from error
    return Metrics(folder, logger, resume_step=resume_step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without a last line cut short by a crash."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def _package(config: RunConfig) -> Any:
    name = config.train.logger
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(
            f"train.logger: {name} needs the package {name}, which cannot be imported ({error}); "
            f"pip install {name}, or set train.logger tensorboard"
        ) from error


def _tensorboard(folder: Path, resume_step: int) -> Logger:
    """A new event file in `tensorboard/`."""
    (folder / "tensorboard").mkdir(exist_ok=True)
    # The library's SummaryWriter writes in a thread, where an error, such as a full disk, is lost.
    path = folder / "tensorboard" / "events"
    events = EventsWriter(str(path), f".{os.getpid()}.{time.time_ns()}")

    def add(**fields: Any) -> None:
        events.write_event(_Event(wall_time=time.time(), **fields))
        events.flush()

    def write(step: int, values: Mapping[str, float]) -> None:
        scalars = [scalar(name, value).value[0] for name, value in values.items()]
        add(step=step, summary=_Summary(value=scalars))

    # A restart makes TensorBoard drop what an earlier session wrote from here on.
    add(step=resume_step + 1, session_log=_SessionLog(status=_SessionLog.START))
    return Logger(write, events.close)


def _wandb(wandb: Any, config: RunConfig, folder: Path) -> Logger:
    """A run of Weights & Biases; of steps computed again it keeps the first values."""
    name = _kept(folder / "wandb.id") or f"{config.name[:40]}-{secrets.token_hex(4)}"
    told = {"name": config.name, "dir": str(folder), "config": config.model_dump()}
    run = wandb.init(id=name, resume="allow", **told)
    write_whole(folder / "wandb.id", name)
    return Logger(lambda step, values: run.log(dict(values), step=step), run.finish)


def _mlflow(mlflow: Any, config: RunConfig, folder: Path) -> Logger:
    """A run of MLflow with the config as parameters; of steps computed again it keeps both."""
    kept = _kept(folder / "mlflow.id")
    run = mlflow.start_run(run_id=kept, run_name=config.name)
    if kept is None:
        # Every version takes 100 parameters at once, of 500 characters each.
        items = [(k, str(v)[:500]) for k, v in flatten(config.model_dump()).items()]
        for start in range(0, len(items), 100):
            mlflow.log_params(dict(items[start : start + 100]))
    write_whole(folder / "mlflow.id", run.info.run_id)

    def write(step: int, values: Mapping[str, float]) -> None:
        named = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in values.items()}
        mlflow.log_metrics(named, step=step)

    return Logger(write, mlflow.end_run)


def _kept(path: Path) -> str | None:
    """The id that an earlier start of the run left."""
    return path.read_text(encoding="utf-8").strip() if path.exists() else None
