"""Which files a config names, and how each of them holds text."""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..config import DataConfig
from ..errors import RecipeError

# Folders of the standard library that are not its own text: what pip put there, and test suites,
# which some distributions leave out and which hold deliberately broken files.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
# What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` leave in a folder.
_DATASET_MARKS = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class Source:
    """One file of text, or one folder of a Hugging Face dataset.

    Args:
      path: Where it is.
      format: `text`, `jsonl`, `parquet` or `dataset`.
      mine: Whether the user named it, so that a fault in it is theirs to mend.
    """

    path: Path
    format: str
    mine: bool = True

    @property
    def has_rows(self) -> bool:
        """Whether the text comes in rows, which nothing separates but the format."""
        return self.format != "text"

    @property
    def files(self) -> list[Path]:
        """The files that hold it."""
        if self.format != "dataset":
            return [self.path]
        return sorted(file for file in self.path.rglob("*") if file.is_file())


def find_sources(config: DataConfig) -> list[Source]:
    """The sources of a config, in the order in which they are read.

    Files of a folder come in the order of their relative paths, so the same folder gives the same
    text on every machine; hidden files are left out.

    Args:
      config: The `data` section.

    Raises:
      RecipeError: Nothing is there, or nothing matches.
    """
    if config.path is None:
        return [Source(file, "text", mine=False) for file in _standard_library()]
    path = Path(config.path)
    if not path.exists():
        files = _globbed(config.path)
    elif path.is_dir():
        if config.format == "dataset" or (config.format == "auto" and _is_dataset(path)):
            return [Source(path, "dataset")]
        files = _in_folder(path, config.pattern)
    else:
        files = [path]
    return [Source(file, _format_of(file, config)) for file in files]


def describe_sources(config: DataConfig) -> str:
    """What the text is called in messages."""
    return config.path or "the Python standard library"


def _format_of(file: Path, config: DataConfig) -> str:
    if config.format == "dataset":
        raise RecipeError(
            f"data.path: expected the folder of a Hugging Face dataset (data.format dataset); got "
            f"the file {file}; give the folder that save_to_disk wrote"
        )
    return _FORMATS.get(file.suffix.lower(), "text") if config.format == "auto" else config.format


def _is_dataset(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in _DATASET_MARKS)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(file.relative_to(root) for file in root.rglob("*.py"))
    files = [root / name for name in names if not _NOT_LIBRARY & set(name.parts)]
    if not files:
        raise RecipeError(
            f"data.path is null, but the Python standard library at {root} has no .py files; "
            "set data.path to a text file or a folder"
        )
    return files


def _globbed(pattern: str) -> list[Path]:
    if not glob.has_magic(pattern):
        raise RecipeError(
            f"data.path: {pattern} does not exist; give a text file, a folder, a glob pattern, or "
            "null for the Python standard library"
        )
    files = sorted(
        file for name in glob.glob(pattern, recursive=True) if (file := Path(name)).is_file()
    )
    if not files:
        raise RecipeError(
            f"data.path: no file matches the glob pattern {pattern!r}; change the pattern, or give "
            "a file or a folder"
        )
    return files


def _in_folder(folder: Path, pattern: str) -> list[Path]:
    files = sorted(_visible(folder, pattern))
    if not files:
        raise RecipeError(
            f"data.path: the folder {folder} has no file that matches data.pattern {pattern!r}; "
            "change data.pattern or give another folder"
        )
    return files


def _visible(folder: Path, pattern: str) -> Iterator[Path]:
    try:
        for file in folder.glob(pattern):
            hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
            if file.is_file() and not hidden:
                yield file
    except (ValueError, NotImplementedError) as error:
        raise RecipeError(
            f"data.pattern: {pattern!r} is not a glob pattern relative to data.path ({error}); "
            "use one such as '**/*.txt'"
        ) from error
