"""A run's folder: made once, and resumed only by the config that made it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import filelock
import yaml
from pydantic import ValidationError

from ..atomic import write_whole
from ..config import RunConfig
from ..errors import RecipeError, refused
from .formats import FORMAT_KEYS

Config = TypeVar("Config", bound=RunConfig)

CONFIG = "config.yaml"
"""The file in a run's folder that says what it is a run of."""
ROWS = "rows.jsonl"
"""The file in a sweep's folder that keeps what each of its runs ended with."""

# Runs and caches may be moved, and runs resumed on other devices, shown elsewhere, measured and
# saved more or less often: these say nothing about what they hold.
_FREE = (
    "sweep.",
    "train.runs_dir",
    "train.logger",
    "train.eval_every",
    "train.eval_batches",
    "train.checkpoint_every",
    "train.keep",
    "train.sample_tokens",
    "train.sample_prompt",
    "data.cache_dir",
    "mesh.data",
    "mesh.fsdp",
    "mesh.context",
    "mesh.tensor",
    "model.attention_implementation",
)


@contextlib.contextmanager
def locked(config: RunConfig) -> Iterator[None]:
    """Within the block no other process trains this run; one that dies leaves nothing locked."""
    folder = run_folder(config)
    path = folder.with_name(f".{folder.name}.lock")  # beside it: --fresh moves the folder
    lock = filelock.FileLock(path, blocking=False)
    with _writing(folder):
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()  # says what is wrong with the folder
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
    """Makes the folder of a run, or opens the one that an earlier start of the same run made."""
    folder = run_folder(config)
    with _writing(folder):
        if fresh and folder.exists():
            folder.rename(_free_name(folder))
        if folder.exists():
            _check_same(config, folder, free=FORMAT_KEYS if convert else ())
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG, dump_config(config))
    return folder


def is_run(folder: str | Path) -> bool:
    """Whether a folder is that of a run."""
    return (Path(folder) / CONFIG).is_file()


def is_sweep(folder: Path) -> bool:
    """Whether a folder is that of a sweep, which keeps losses alone."""
    return (folder / ROWS).is_file()


def existing_run(config: RunConfig) -> Path:
    """The folder of a run that has been trained, for evaluation and generation."""
    folder = run_folder(config)
    if not is_run(folder):
        raise RecipeError(
            f"name: no run at {folder}; train it first, or set name or train.runs_dir to a run "
            "that exists"
        )
    formats = ("policy", "policies", "fp8_readout", "scalify")
    _check_same(config, folder, sections=("model", *formats))
    return folder


def earlier_run(init: str, kind: type[Config], other: str = "") -> Config:
    """The config of the run that `init` names, which is to be of this kind.

    Args:
      init: The folder of the run.
      kind: The config of its recipe.
      other: What else `init` may name, for the message.

    Raises:
      RecipeError: The folder is not that of a run, or of one of another recipe.
    """
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
    """The config of the run in a folder."""
    path = folder / CONFIG
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        wanted = get_args(kind.model_fields["recipe"].annotation)
        name = tree.get("recipe", "gpt") if isinstance(tree, dict) else None
        if wanted and name is not None and name not in wanted:
            raise RecipeError(
                f"{path}: expected a run of recipe {', '.join(wanted)}; got one of {name}; name "
                "the folder of such a run"
            )
        return kind.model_validate(tree)
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise RecipeError(
            f"{path}: expected the config of a run of {kind.__name__}; got: {error}; name the "
            "folder of such a run"
        ) from error


def run_folder(config: RunConfig) -> Path:
    return Path(config.train.runs_dir) / config.name


def other_data(folder: Path) -> RecipeError:
    """What to say where the data is not that of the folder."""
    return RecipeError(
        f"data: it is not what {folder} was trained on (another Python, or changed files); restore "
        "the files, change name, or pass --fresh"
    )


def _writing(folder: Path) -> contextlib.AbstractContextManager[None]:
    todo = "free space, change its permissions, or set train.runs_dir to another folder"
    return refused(f"train.runs_dir: cannot write the run folder {folder}", todo)


def _check_same(
    config: RunConfig,
    folder: Path,
    sections: tuple[str, ...] | None = None,
    free: tuple[str, ...] = (),
) -> None:
    path = folder / CONFIG
    if not path.exists():
        if _is_bare(folder):
            return
        raise RecipeError(
            f"name: {folder} exists but is not a run (it has no {CONFIG}); change name"
        )
    new, text, old = config.model_dump(), path.read_bytes(), None
    with contextlib.suppress(yaml.YAMLError):
        old = yaml.safe_load(text)
    if sections is None and _is_bare(folder) and text == _dump(old).encode():
        return  # of a start that failed before its first step
    if not isinstance(old, dict):
        raise RecipeError(f"{path} is damaged; change name, or use --fresh to move it aside")
    # A key that is newer than the run had its default.
    with contextlib.suppress(ValidationError):
        old = type(config).model_validate(old).model_dump()
    before, after = flatten(old), flatten(new)
    keys = [*after, *(key for key in before if key not in after)]
    keys = [key for key in keys if sections is None or key.split(".")[0] in sections]
    free = (*_FREE, *free)
    keys = [key for key in keys if not key.startswith(free)]
    changed = [key for key in keys if before.get(key) != after.get(key)]
    if changed:
        listed = "\n".join(f"  {key}: {before.get(key)} -> {after.get(key)}" for key in changed)
        todo = "use the config of that run, or the name of another"
        if sections is None:
            todo = (
                "change name to start a new run, use the config of that run to resume it, or pass "
                "--fresh to move it aside"
            )
            if all(key.startswith(FORMAT_KEYS) for key in changed):
                todo += ", or --convert to go on in these formats"
        raise RecipeError(f"name: {folder} holds a run of another config:\n{listed}\n{todo}")


def _is_bare(folder: Path) -> bool:
    """Whether nothing in a folder was made by training."""
    return folder.is_dir() and not any(
        path.is_file() and path != folder / CONFIG for path in folder.rglob("*")
    )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested sections by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _free_name(folder: Path) -> Path:
    number = 1
    while (free := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    return free


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML, every key written out.

    Example:
      >>> dump_config(RunConfig(recipe="gpt", name="demo")).splitlines()[:2]
      ['recipe: gpt', 'name: demo']
    """
    return _dump(config.model_dump())


def _dump(tree: Any) -> str:
    return yaml.safe_dump(tree, sort_keys=False)
