"""A folder of what was made from a text once: complete or not there, whoever else builds it."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import filelock
import platformdirs

from ..config import DataConfig
from ..errors import RecipeError, refused
from ._sources import find_sources

Made = TypeVar("Made")

_VERSION = 2  # of what the folders hold; raised when that changes


# Of a folder that has to be built again.
_FAULTS = (RecipeError, OSError, ValueError, KeyError, TypeError)


def cache_key(config: DataConfig, settings: Mapping[str, Any]) -> str:
    """Tells apart what is made from other bytes, other parts of them, or by other settings.

    Where a file is and when it was written are no part of it.
    """
    if config.mixture is not None:
        files: list[Any] = [cache_key(text, settings) for text in config.texts]
    else:
        sources = find_sources(config)
        files = [[one.format, _digest(path)] for one in sources for path in one.files]
    keys = {"max_bytes", "text_key", "split", "documents"}
    everything = [_VERSION, files, config.model_dump(include=keys), settings]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:24]


def _digest(path: Path) -> str:
    with (
        refused(f"data.path: {path} cannot be read", "check its permissions"),
        path.open("rb") as file,
    ):
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder(config: DataConfig) -> Path:
    """Where caches are: `data.cache_dir`, or the user's cache folder (XDG_CACHE_HOME counts)."""
    if config.cache_dir is not None:
        return Path(config.cache_dir)
    return Path(platformdirs.user_cache_dir("unitscale", appauthor=False))


def cached(
    config: DataConfig,
    name: str,
    build: Callable[[Path], None],
    read: Callable[[Path], Made],
    say: Callable[[str], None] = print,
) -> Made:
    """Reads a folder of the cache, building it first where it is missing or damaged.

    It is built under another name and renamed when complete. A process that comes while another
    builds waits for it; what a killed process left is removed.

    Args:
      config: The `data` section, for `cache_dir`.
      name: Of the folder.
      build: Fills an empty folder.
      read: Gives what the folder holds; raises one of `_FAULTS` where that cannot be.
      say: Called with a line about a damaged cache.
    """
    root = cache_folder(config)
    folder, draft = root / name, root / f"{name}.tmp"
    where, todo = f"data.cache_dir: cannot write {root}", "or set data.cache_dir to another folder"
    with refused(where, f"free space, change its permissions, {todo}", exit_code=1):
        with contextlib.suppress(*_FAULTS):  # a folder of this name is complete, if not damaged
            return read(folder)
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f"{name}.lock"):
            if folder.exists():
                try:
                    return read(folder)  # another process was first
                except _FAULTS as error:
                    say(f"the cache {folder} is damaged ({error}); building it again")
                    shutil.rmtree(folder)
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            try:
                build(draft)
                draft.rename(folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
            return read(folder)
