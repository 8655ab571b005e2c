"""Report how a run goes: metrics in files and in loggers, a progress bar or lines on the console.

Weights & Biases and MLflow are packages that a user installs, imported only where a config names
them. They read where to send metrics from their own environment variables; a resumed run continues
there by the id kept in its folder.
"""

import contextlib
import importlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
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
    match config.train.logger:
        case "tensorboard":
            logger = _tensorboard(folder, resume_step)
        case "wandb":
            logger = _wandb(config, folder)
        case "mlflow":
            logger = _mlflow(config, folder)
    return Metrics(folder, logger, resume_step=resume_step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without a last line cut short by a crash."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def check_logger(config: RunConfig) -> None:
    """Raise an error if the package of the logger is missing, before a folder is made."""
    if config.train.logger in ("wandb", "mlflow"):
        _package(config.train.logger)


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


def _wandb(config: RunConfig, folder: Path) -> Logger:
    """A run of Weights & Biases; of steps computed again it keeps the first values."""
    wandb = _package("wandb")
    name = _kept(folder / "wandb.id") or f"{config.name[:40]}-{secrets.token_hex(4)}"
    told = {"name": config.name, "dir": str(folder), "config": config.model_dump()}
    try:
        run = wandb.init(id=name, resume="allow", **told)
    except wandb.Error as error:
        todo = "run `wandb login`, or set WANDB_MODE=offline"
        raise _not_started("wandb", error, todo) from error
    write_whole(folder / "wandb.id", name)
    return Logger(lambda step, values: run.log(dict(values), step=step), run.finish)


def _mlflow(config: RunConfig, folder: Path) -> Logger:
    """A run of MLflow with the config as parameters; of steps computed again it keeps both."""
    mlflow = _package("mlflow")
    kept = _kept(folder / "mlflow.id")
    try:
        run = mlflow.start_run(run_id=kept, run_name=config.name)
        if kept is None:
            # Every version takes 100 parameters at once, of 500 characters each.
            items = [(k, str(v)[:500]) for k, v in flatten(config.model_dump()).items()]
            for start in range(0, len(items), 100):
                mlflow.log_params(dict(items[start : start + 100]))
    except mlflow.MlflowException as error:
        todo = "set MLFLOW_TRACKING_URI to a server that answers, or to a folder"
        raise _not_started("mlflow", error, todo) from error
    write_whole(folder / "mlflow.id", run.info.run_id)

    def write(step: int, values: Mapping[str, float]) -> None:
        named = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in values.items()}
        mlflow.log_metrics(named, step=step)

    return Logger(write, mlflow.end_run)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(
            f"train.logger: {name} needs the package {name}, which cannot be imported ({error}); "
            f"pip install {name}, or set train.logger tensorboard"
        ) from error


def _kept(path: Path) -> str | None:
    """The id that an earlier start of the run left."""
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def _not_started(name: str, error: Exception, todo: str) -> RecipeError:
    return RecipeError(
        f"train.logger: {name} could not start a run: {error}; {todo}, or set train.logger "
        "tensorboard",
        exit_code=1,
    )


class Stopwatch:
    """The speed of steps since it was last started."""

    def __init__(self, start: int):
        self.restart(start)

    def restart(self, done: int) -> None:
        self._since, self._clock, self._paused = done, time.perf_counter(), 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of a block."""
        begin = time.perf_counter()
        yield
        self._paused += time.perf_counter() - begin

    def speed(self, done: int, per_step: int) -> float | None:
        """Units per second; None if no step was done since the start."""
        seconds = time.perf_counter() - self._clock - self._paused
        if done == self._since:
            return None
        return (done - self._since) * per_step / max(seconds, 1e-9)


class Reporter:
    """A progress bar on a terminal, and plain lines elsewhere."""

    def __init__(
        self, steps: int, start: int, per_step: int, console: Console, unit: str = "tokens"
    ):
        self._steps, self._per_step, self._console = steps, per_step, console
        self._unit = unit
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn(f"loss {{task.fields[loss]}}  {{task.fields[speed]}} {unit}/s"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=console,
            )
            self._task = bar.add_task("train", total=steps, completed=start, loss="-", speed="-")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self._bar:
            self._bar.update(self._task, completed=step)

    def report(self, step: int, loss: float, per_second: float | None) -> None:
        """Show a loss, and the speed if it is known."""
        speed = "-" if per_second is None else f"{per_second:,.0f}"
        if self._bar:
            self._bar.update(self._task, completed=step, loss=f"{loss:.4f}", speed=speed)
            return
        left = ""
        if per_second is not None:
            seconds = (self._steps - step) * self._per_step / per_second
            left = f"  {speed} {self._unit}/s  {timedelta(seconds=round(seconds))} left"
        self.say(f"step {step}/{self._steps}  loss {loss:.4f}{left}")

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)
