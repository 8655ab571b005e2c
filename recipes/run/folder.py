"""A run's folder, which only a run with the same config may resume, and its metrics."""

import contextlib
import difflib
import importlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import filelock
import yaml

from ..config import FORMAT_KEYS, RunConfig
from ..errors import RecipeError, refused, write_whole

Config = TypeVar("Config", bound=RunConfig)

CONFIG = "config.yaml"
"""File name of the config in a run's folder."""
ROWS = "rows.jsonl"
"""File name of the results in a sweep's folder."""
SCORES = "scores.json"
"""File name of the scores in a run's folder."""

# Keys that may change when a run is resumed, because they do not affect its state.
_FREE = (
    *("sweep.", "train.runs_dir", "data.cache_dir", "model.attention_implementation"),
    *(f"train.{key}" for key in ("logger", "eval_every", "checkpoint_every", "keep", "sample_")),
    *(f"mesh.{axis}" for axis in ("data", "fsdp", "context", "tensor")),
)


def run_folder(config: RunConfig) -> Path:
    return Path(config.train.runs_dir) / config.name


def is_run(folder: str | Path) -> bool:
    return (Path(folder) / CONFIG).is_file()


def downloaded(init: str) -> str:
    """Return the folder of a model on the Hugging Face Hub, such as org/name; paths unchanged.

    It is downloaded unless it is in the cache of `huggingface_hub`.
    """
    path = Path(init)
    is_path = path.exists() or Path(path.parts[0]).is_dir() or path.parts[0] in ("runs", "configs")
    if is_path or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", init) or path.suffix == ".yaml":
        return init
    hub = importlib.import_module("huggingface_hub")  # slow to import; tokenizers needs it
    try:
        files = ["*.json", "model*.safetensors", "*.jinja"]  # no second copy of the weights
        return hub.snapshot_download(init, allow_patterns=files)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise RecipeError(
            f"{init}: expected a folder, or a model that can be downloaded; {reason}; run `hf "
            f"download {init} --local-dir {path.name}` where there is a network (`hf auth login` "
            f"first if the model has a license to accept), and give {path.name} instead"
        ) from error


def similar(path: Path, *folders: Path) -> str:
    """Suggest the existing path that is most like a missing one; "" if there is none."""
    near = [found for folder in (path.parent, *folders) for found in folder.glob("[!.]*")]
    names = [x.name for x in near if (x.suffix == ".yaml" or x.is_dir()) and x != path]
    close = difflib.get_close_matches(path.name, names, 1, 0.5)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def saved_steps(folder: Path) -> list[int]:
    """List, in order, the steps of a run's fully written checkpoints; damage is not checked."""
    place = folder / "checkpoints"
    names = [path.name for path in place.iterdir()] if place.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


@contextlib.contextmanager
def locked(config: RunConfig) -> Iterator[None]:
    """Lock a run against other processes; a process that dies releases its lock."""
    folder = run_folder(config)
    path = folder.with_name(f".{folder.name}.lock")  # outside the folder, which --fresh moves
    lock = filelock.FileLock(path, blocking=False)
    with writing(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except filelock.Timeout:
            todo = "wait for it, stop it, or change name"
            raise RecipeError(f"name: another process is training in {folder}; {todo}") from None
        except NotImplementedError:
            pass  # a file system without locks
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


def open_run(config: RunConfig, *, fresh: bool = False, convert: bool = False) -> Path:
    """Make the folder of a run, or reopen it if its config is the same.

    Keys that may change are recorded with the next checkpoint (`record_config`), so that a command
    that fails earlier leaves the run as it was.
    """
    folder, number = run_folder(config), 1
    with writing(folder):
        files = [path for path in folder.rglob("*") if path.is_file()]
        if files and not is_run(folder):
            raise RecipeError(f"name: {folder} exists but is not a run (no {CONFIG}); change name")
        if fresh and files:
            init = getattr(config, "init", None)
            if init is not None and Path(init).absolute() == folder.absolute():
                raise RecipeError(f"name: --fresh would move {folder}, which is init; change name")
            while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
                number += 1
            folder.rename(aside)
            files = []
        if files and files != [folder / CONFIG]:  # else no step was taken: any config may start
            changed = _changes(config, folder)
            formats = all(key.startswith(FORMAT_KEYS) for key in changed)
            if changed and not (convert and formats):
                todo = "change name, use the config of that run, or pass --fresh to move it aside"
                todo += ", or --convert to resume in these formats" if formats else ""
                if "train.steps" in changed and (start := config.continued_by(folder)):
                    todo += f"; to train longer, set another name, and {start}"
                raise _other_config(folder, changed, todo)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            record_config(config)
    return folder


def record_config(config: RunConfig) -> None:
    """Write a config to the folder of its run."""
    text = yaml.safe_dump(config.model_dump(), sort_keys=False)
    write_whole(run_folder(config) / CONFIG, text)


def existing_run(config: RunConfig) -> Path:
    """Return the folder of a trained run, whose model and formats must match the config."""
    folder = run_folder(config)
    if not is_run(folder):
        raise RecipeError(f"name: no run at {folder}; train it first, or name another")
    changed = _changes(config, folder)
    changed = {k: how for k, how in changed.items() if k.split(".")[0] in ("model", "precision")}
    if changed:
        raise _other_config(folder, changed, "use the config of that run, or the name of another")
    return folder


def _changes(config: RunConfig, folder: Path) -> dict[str, str]:
    """Return the keys that differ from a folder's config, each with "old -> new"."""
    kept = written_config(folder, type(config))
    before, after = flatten(kept.model_dump()), flatten(config.model_dump())
    return {
        key: f"{before.get(key)} -> {after.get(key)}"
        for key in after | before
        if key != "name" and not key.startswith(_FREE) and before.get(key) != after.get(key)
    }


def _other_config(folder: Path, changed: dict[str, str], todo: str) -> RecipeError:
    listed = "\n".join(f"  {key}: {how}" for key, how in changed.items())
    return RecipeError(f"name: {folder} holds a run of another config:\n{listed}\n{todo}")


def with_kept_scan(config: Config) -> Config:
    """Replace `model.scan` auto by the value in the run's folder, if the model is otherwise equal.

    Earlier versions did not stack layers. Neither do runs with `precision.layers`, whose patterns
    name single layers.
    """
    model: Any = getattr(config, "model", None)
    if model.scan != "auto":
        return config
    scan, folder = False if config.precision.layers else "auto", run_folder(config)
    with contextlib.suppress(RecipeError):  # the folder is not that of such a run
        kept: Any = written_config(folder, type(config))
        if kept.model.model_copy(update={"scan": "auto"}) == model:
            scan = kept.model.scan
    return config.model_copy(update={"model": model.model_copy(update={"scan": scan})})


def earlier_run(init: str, kind: type[Config], other: str = "") -> Config:
    """Read the config of the run in `init`; the message says that `other` is allowed, too."""
    folder = Path(init)
    if not is_run(folder):
        (recipe,), near = get_args(kind.model_fields["recipe"].annotation), Path("runs", init)
        hint = f"; did you mean {near}?" if is_run(near) else similar(folder)
        raise RecipeError(
            f"init: expected the folder of a run of recipe {recipe}{other}; got {folder}; train "
            f"one, such as `python -m recipes train {recipe}/quickstart.yaml`{hint}"
        )
    return written_config(folder, kind).kept_in(folder)


def written_config(folder: Path, kind: type[Config]) -> Config:
    """Read the config of the run in a folder, which must be of the class `kind`."""
    path = folder / CONFIG
    try:
        tree = yaml.safe_load(path.read_text("utf-8"))
        if not isinstance(tree, dict):
            raise ValueError("no mapping of keys")
        found, wanted = tree.get("recipe", "gpt"), get_args(kind.model_fields["recipe"].annotation)
        if wanted and found not in wanted:
            raise RecipeError(f"{path}: expected recipe {wanted[0]}; got {found}; name another run")
        return kind.model_validate(kind.upgraded(tree))
    except (OSError, yaml.YAMLError, ValueError, AttributeError, KeyError, TypeError) as error:
        todo = "give the folder of such a run, or move this one aside with --fresh"
        what = f"{path}: expected the config of a run of {kind.__name__}"
        raise RecipeError(f"{what}; got: {error}; {todo}") from error


def other_data(folder: Path) -> RecipeError:
    why = "another Python version, or changed files"
    todo = "restore the files, change name, or pass --fresh"
    return RecipeError(f"data: it is not what {folder} was trained on ({why}); {todo}")


def writing(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Turn an OSError in the block into a RecipeError that names a run's folder."""
    todo = "free space, change its permissions, or set train.runs_dir to another folder"
    return refused(f"train.runs_dir: cannot write the run folder {folder}", todo)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + key
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


class Logger(NamedTuple):
    """Shows the metrics of a run: `write(step, values)` and `close()`."""

    write: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], Any]


class Metrics:
    """Writes metrics to `metrics.jsonl` and to a logger; to nothing without a folder."""

    def __init__(self, folder: Path | None, logger: Logger | None = None, *, resume_step: int = 0):
        self._lines, self._logger = None, logger
        if folder is not None:
            path = folder / "metrics.jsonl"
            kept = [row for row in read_metrics(path) if row["step"] <= resume_step]
            write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
            self._lines = path.open("a", encoding="utf-8")

    def write(self, step: int, **values: float) -> None:
        """Record named values; `step` is the number of steps done so far."""
        if self._lines:
            self._lines.write(json.dumps({"step": step, **values}) + "\n")
            self._lines.flush()
        if self._logger:
            self._logger.write(step, values)

    def close(self) -> None:
        for opened in filter(None, (self._lines, self._logger)):
            opened.close()


def open_metrics(config: RunConfig, folder: Path | None, resume_step: int) -> Metrics:
    """Open the metrics of a run whose next step is `resume_step`; without a folder, write none."""
    if folder is None:
        return Metrics(None)
    name = config.train.logger
    logger = _tensorboard(folder, resume_step) if name == "tensorboard" else None
    try:
        if name in ("wandb", "mlflow"):
            logger = (_wandb if name == "wandb" else _mlflow)(config, folder)
    except Exception as error:  # each package has its own exceptions
        todo = f"pip install {name} and set it up, or choose another"
        told = f"train.logger: {name} could not start a run: {error}; {todo}"
        raise RecipeError(told, exit_code=1) from error
    return Metrics(folder, logger, resume_step=resume_step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics file, without a last line that a crash cut short."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def _tensorboard(folder: Path, resume_step: int) -> Logger:
    """Start a new event file in `tensorboard/`."""
    (folder / "tensorboard").mkdir(exist_ok=True)
    names = "proto.event_pb2", "event_file_writer", "summary"
    event, files, summary = (importlib.import_module(f"tensorboardX.{name}") for name in names)
    # Not tensorboardX's SummaryWriter, which writes in a thread and loses errors such as disk full.
    path = folder / "tensorboard" / "events"
    events = files.EventsWriter(str(path), f".{os.getpid()}.{time.time_ns()}")

    def add(**fields: Any) -> None:
        events.write_event(event.Event(wall_time=time.time(), **fields))
        events.flush()

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            add(step=step, summary=summary.scalar(name, value))

    # This event makes TensorBoard drop later steps that an earlier session wrote.
    start = event.SessionLog(status=event.SessionLog.START)
    add(step=resume_step + 1, session_log=start)
    return Logger(write, events.close)


def _wandb(config: RunConfig, folder: Path) -> Logger:
    """Start or resume a W&B run, which keeps the first values of steps computed twice."""
    wandb = importlib.import_module("wandb")
    name = _kept(folder / "wandb.id") or f"{config.name[:40]}-{secrets.token_hex(4)}"
    told = {"name": config.name, "dir": str(folder), "config": config.model_dump()}
    run = wandb.init(id=name, resume="allow", **told)
    write_whole(folder / "wandb.id", name)
    return Logger(lambda step, values: run.log(dict(values), step=step), run.finish)


def _mlflow(config: RunConfig, folder: Path) -> Logger:
    """Start or resume an MLflow run, which keeps both values of steps computed twice."""
    mlflow = importlib.import_module("mlflow")
    kept = _kept(folder / "mlflow.id")
    run = mlflow.start_run(run_id=kept, run_name=config.name)
    if kept is None:
        # All versions accept 100 parameters at once, of up to 500 characters.
        items = [(k, str(v)[:500]) for k, v in flatten(config.model_dump()).items()]
        for start in range(0, len(items), 100):
            mlflow.log_params(dict(items[start : start + 100]))
    write_whole(folder / "mlflow.id", run.info.run_id)

    def write(step: int, values: Mapping[str, float]) -> None:
        named = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in values.items()}
        mlflow.log_metrics(named, step=step)

    return Logger(write, mlflow.end_run)


def _kept(path: Path) -> str | None:
    return path.read_text(encoding="utf-8").strip() if path.exists() else None
