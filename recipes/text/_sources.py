"""Which files a config names, and how each of them holds text."""

import glob
import sysconfig
from pathlib import Path
from typing import NamedTuple

from ..config import DataConfig
from ..errors import RecipeError

# Folders of the standard library that are not its own text: what pip put there, and test suites,
# which some distributions leave out and which hold deliberately broken files.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
# What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` leave in a folder.
_DATASET_MARKS = ("dataset_dict.json", "state.json")


class Source(NamedTuple):
    """One file of text, or one folder of a Hugging Face dataset.

    Attributes:
      path: Where it is.
      format: `text`, `jsonl`, `parquet` or `dataset`.
      mine: Whether the user named it, so that a fault in it is theirs to mend.
    """

    path: Path
    format: str
    mine: bool = True

    @property
    def files(self) -> list[Path]:
        """The files that hold it."""
        if self.format != "dataset":
            return [self.path]
        return sorted(file for file in self.path.rglob("*") if file.is_file())


def find_sources(config: DataConfig) -> list[Source]:
    """The sources of a config of one text, in the order in which they are read.

    Files of a folder come in the order of their relative paths, so the same folder gives the same
    text on every machine; hidden files are left out.
    """
    if config.path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        names = sorted(file.relative_to(root) for file in root.rglob("*.py"))
        library = [root / name for name in names if not _NOT_LIBRARY & set(name.parts)]
        _some(library, f"data.path is null, but {root} has no .py files; set data.path")
        return [Source(file, "text", mine=False) for file in library]
    path = Path(config.path)
    if path.is_dir():
        is_dataset = any((path / mark).is_file() for mark in _DATASET_MARKS)
        if config.format == "dataset" or (config.format == "auto" and is_dataset):
            return [Source(path, "dataset")]
        files = _some(
            sorted(_visible(path, config.pattern)),
            f"data.path: the folder {path} has no file that matches data.pattern "
            f"{config.pattern!r}; change data.pattern or give another folder",
        )
    elif path.exists():
        files = [path]
    else:
        files = _some(
            sorted(filter(Path.is_file, map(Path, glob.glob(config.path, recursive=True)))),
            f"data.path: no file matches the glob pattern {config.path!r}; change the pattern, or "
            "give a file or a folder"
            if glob.has_magic(config.path)
            else f"data.path: {config.path} does not exist; give a text file, a folder, a glob "
            "pattern, or null for the Python standard library",
        )
    return [Source(file, _format_of(file, config)) for file in files]


def describe_sources(config: DataConfig) -> str:
    """What the text is called in messages."""
    return ", ".join(text.path or "the Python standard library" for text in config.texts)


def _some(files: list[Path], message: str) -> list[Path]:
    if not files:
        raise RecipeError(message)
    return files


def _format_of(file: Path, config: DataConfig) -> str:
    if config.format == "dataset":
        raise RecipeError(
            f"data.path: expected the folder of a Hugging Face dataset (data.format dataset); got "
            f"the file {file}; give the folder that save_to_disk wrote"
        )
    return _FORMATS.get(file.suffix.lower(), "text") if config.format == "auto" else config.format


def _visible(folder: Path, pattern: str) -> list[Path]:
    try:
        found = [file for file in folder.glob(pattern) if file.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise RecipeError(
            f"data.pattern: {pattern!r} is not a glob pattern relative to data.path ({error}); "
            "use one such as '**/*.txt'"
        ) from error
    names = (file.relative_to(folder) for file in found)
    return [folder / name for name in names if not any(p.startswith(".") for p in name.parts)]
