"""A run's folder: made once, and resumed only by the config that made it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import filelock
import yaml

from ..config import FORMAT_KEYS, RunConfig
from ..errors import RecipeError, refused, write_whole

Config = TypeVar("Config", bound=RunConfig)

CONFIG = "config.yaml"
"""The config in a run's folder."""
ROWS = "rows.jsonl"
"""The results in a sweep's folder."""
SCORES = "scores.json"
"""The scores in a run's folder."""

# Keys that may change when a run is resumed: they say nothing about what its state is.
_FREE = (
    "sweep.",
    *(f"train.{key}" for key in ("runs_dir", "logger", "eval_", "checkpoint_every", "keep")),
    "train.sample_",
    "data.cache_dir",
    *(f"mesh.{axis}" for axis in ("data", "fsdp", "context", "tensor")),
    "model.attention_implementation",
)


def run_folder(config: RunConfig) -> Path:
    return Path(config.train.runs_dir) / config.name


def is_run(folder: str | Path) -> bool:
    return (Path(folder) / CONFIG).is_file()


def saved_steps(folder: Path) -> list[int]:
    """The steps of a run's complete checkpoints, damaged or not, in order."""
    place = folder / "checkpoints"
    names = [path.name for path in place.iterdir()] if place.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


@contextlib.contextmanager
def locked(config: RunConfig) -> Iterator[None]:
    """Keep other processes from training a run; one that dies leaves nothing locked."""
    folder = run_folder(config)
    path = folder.with_name(f".{folder.name}.lock")  # beside it: --fresh moves the folder
    lock = filelock.FileLock(path, blocking=False)
    with _writing(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()  # its error says what is wrong with the folder
        try:
            lock.acquire()
        except filelock.Timeout:
            raise RecipeError(
                f"name: another process is training in {folder}; wait for it, stop it, or change "
                "name"
            ) from None
        except NotImplementedError:
            pass  # a file system without locks
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


def open_run(config: RunConfig, *, fresh: bool = False, convert: bool = False) -> Path:
    """Make the folder of a run, or open that of an earlier start of the same run.

    `fresh` moves an earlier run aside; `convert` lets its number formats differ.
    """
    folder, number = run_folder(config), 1
    with _writing(folder):
        if fresh and folder.exists():
            while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
                number += 1
            folder.rename(aside)
        files = [path for path in folder.rglob("*") if path.is_file()]
        if files and not is_run(folder):
            raise RecipeError(
                f"name: {folder} exists but is not a run (it has no {CONFIG}); change name"
            )
        if files != [folder / CONFIG]:  # a start that failed before its first step binds nobody
            changed = _changes(config, folder) if files else {}
            formats = all(key.startswith(FORMAT_KEYS) for key in changed)
            if changed and not (convert and formats):
                todo = (
                    "change name to start a new run, use the config of that run to resume it, or "
                    "pass --fresh to move it aside"
                )
                todo += ", or --convert to go on in these formats" if formats else ""
                raise _other_config(folder, changed, todo)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG, dump_config(config))
    return folder


def existing_run(config: RunConfig) -> Path:
    """The folder of a trained run, whose model and formats must be the config's."""
    folder = run_folder(config)
    if not is_run(folder):
        raise RecipeError(
            f"name: no run at {folder}; train it first, or set name or train.runs_dir to a run "
            "that exists"
        )
    changed = _changes(config, folder)
    changed = {k: how for k, how in changed.items() if k.split(".")[0] in ("model", "precision")}
    if changed:
        raise _other_config(folder, changed, "use the config of that run, or the name of another")
    return folder


def _changes(config: RunConfig, folder: Path) -> dict[str, str]:
    """The keys in which a config differs from that of a folder, and their values."""
    kept = written_config(folder, type(config))
    before, after = flatten(kept.model_dump()), flatten(config.model_dump())
    return {
        key: f"{before.get(key)} -> {after.get(key)}"
        for key in after | before
        if not key.startswith(_FREE) and before.get(key) != after.get(key)
    }


def _other_config(folder: Path, changed: dict[str, str], todo: str) -> RecipeError:
    listed = "\n".join(f"  {key}: {how}" for key, how in changed.items())
    return RecipeError(f"name: {folder} holds a run of another config:\n{listed}\n{todo}")


def earlier_run(init: str, kind: type[Config], other: str = "") -> Config:
    """The config of the run that `init` names; `other` names alternatives for the message."""
    folder = Path(init)
    if not is_run(folder):
        (recipe,) = get_args(kind.model_fields["recipe"].annotation)
        raise RecipeError(
            f"init: expected the folder of a run of recipe {recipe}{other}; got {folder}; train "
            f"one first, such as `python -m recipes train configs/{recipe}/quickstart.yaml`, and "
            "give its folder"
        )
    return written_config(folder, kind).kept_in(folder)


def written_config(folder: Path, kind: type[Config]) -> Config:
    """The config of the run in a folder, which must be of a kind."""
    path = folder / CONFIG
    try:
        return kind.model_validate(kind.upgraded(yaml.safe_load(path.read_text("utf-8"))))
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise RecipeError(
            f"{path}: expected the config of a run of {kind.__name__}; got: {error}; name the "
            "folder of such a run, or move this one aside with --fresh"
        ) from error


def other_data(folder: Path) -> RecipeError:
    """The error for data that differs from what was trained on."""
    return RecipeError(
        f"data: it is not what {folder} was trained on (another Python, or changed files); restore "
        "the files, change name, or pass --fresh"
    )


def _writing(folder: Path) -> contextlib.AbstractContextManager[None]:
    todo = "free space, change its permissions, or set train.runs_dir to another folder"
    return refused(f"train.runs_dir: cannot write the run folder {folder}", todo)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested sections by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + key
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML, every key written out."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)
