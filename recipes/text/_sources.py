"""The files that a config names, their documents, and a cache of what is made from them."""

import glob
import hashlib
import itertools
import json
import string
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import filelock
import platformdirs

from ..config import DataConfig
from ..errors import RecipeError, clipped, json_lines, read_text, refused

PIECE = 16 * 2**20
"""Characters of a text file after which its document ends, at the next end of a line."""
_ROWS = 1024  # read at once

# Folders of the standard library that are not its own text: what pip put there, and test suites,
# which some distributions leave out and which hold deliberately broken files.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
# What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` leave in a folder.
_DATASET_MARKS = ("dataset_dict.json", "state.json")


class Document(NamedTuple):
    """A text, and whether it was a row, which needs something to end it."""

    text: str
    is_row: bool


def find_sources(config: DataConfig) -> list[tuple[Path, str]]:
    """Paths of a config of one text in the order in which they are read, and their formats.

    A path is a file, or the folder of a dataset. Hidden files are left out.
    """
    if config.path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        names = (file.relative_to(root) for file in root.rglob("*.py"))
        found = [root / name for name in names if not _NOT_LIBRARY & set(name.parts)]
        return [(file, "text") for file in sorted(found)]
    path = Path(config.path)
    is_dataset = any((path / mark).is_file() for mark in _DATASET_MARKS)
    if path.is_dir() and (config.format == "dataset" or (config.format == "auto" and is_dataset)):
        return [(path, "dataset")]
    if config.format == "dataset":
        raise RecipeError(
            "data.path: expected the folder of a Hugging Face dataset (data.format dataset); got "
            f"{path}; give the folder that save_to_disk wrote"
        )
    if path.is_dir():
        found = [path / name for name in glob.glob(config.pattern, root_dir=path, recursive=True)]
    else:
        found = [path] if path.exists() else map(Path, glob.glob(config.path, recursive=True))
    files = sorted(file for file in found if file.is_file())
    if not files:
        none = f"has no file that matches data.pattern {config.pattern!r}"
        raise RecipeError(
            f"data.path: {path} {none if path.is_dir() else 'does not exist'}; give a text file, a "
            "folder, a glob pattern that matches files, or null for the Python standard library"
        )
    auto = config.format == "auto"
    return [
        (file, _FORMATS.get(file.suffix.lower(), "text") if auto else config.format)
        for file in files
    ]


def documents(config: DataConfig) -> Iterator[Document]:
    """Stream the documents that a config names, the last one cut at `max_bytes` of UTF-8.

    A document is a row of JSONL, Parquet or a dataset; of a text file it is what `data.documents`
    says: the file, its stretches between blank lines, or its lines. Concatenated, the documents of
    text files are the files; empty documents are left out. A file longer than `PIECE` is cut after
    a line into several documents.
    """
    if config.mixture is not None:
        for text in config.texts:
            yield from documents(text)
        return
    left, empty = config.max_bytes, True
    for path, kind in find_sources(config):
        for text in _texts(path, config) if kind == "text" else _rows(path, kind, config):
            if left is not None:
                raw = text.encode("utf-8")
                text = raw[:left].decode("utf-8", errors="ignore")
                left -= len(raw)
            if text:
                empty = False
                yield Document(text, kind != "text")
            if left is not None and left <= 0:
                return
    if empty:
        raise RecipeError(
            f"data.path: {config.path} holds no text (0 bytes); give a file that has text"
        )


def _texts(path: Path, config: DataConfig) -> Iterator[str]:
    parts: dict[str, Callable[[TextIO], Iterator[str]]] = {
        "file": lambda file: iter(lambda: file.read(PIECE) + file.readline(PIECE), ""),
        "blank_line": _stretches,
        "line": iter,
    }
    try:
        with (
            refused(f"data.path: {path} cannot be read", "check its permissions"),
            path.open(encoding="utf-8", newline="\n") as file,
        ):
            yield from parts[config.documents](file)
    except UnicodeDecodeError:
        read_text(path, "data.path")  # says where in the file
        raise


def _stretches(file: TextIO) -> Iterator[str]:
    """Lines up to and with the blank lines that follow them."""
    held = ""
    blank = string.whitespace  # of ASCII alone
    for is_blank, lines in itertools.groupby(file, key=lambda line: not line.strip(blank)):
        held += "".join(lines)
        if is_blank and held.strip(blank):
            yield held
            held = ""
    if held:
        yield held


def _rows(path: Path, kind: str, config: DataConfig) -> Iterator[str]:
    """The text field of each row, in order."""
    read = {"jsonl": _jsonl, "parquet": _parquet, "dataset": _dataset}[kind]
    key = config.text_key
    try:
        for place, row in read(path, config):
            text = row.get(key) if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise RecipeError(
                    f"data.path: {path} {place}: expected an object with text in the field "
                    f"{key!r}; got {clipped(row)}; set data.text_key to the one that holds the "
                    "text, or correct the row"
                )
            text.encode("utf-8")  # refuses half of a surrogate pair, which JSON can spell
            yield text
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"data.path: reading {path} needs the package {error.name}, which is not installed; "
            "pip install 'unitscale[hf]'"
        ) from error
    # pyarrow raises Python's own errors for files that are missing or damaged.
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RecipeError(
            f"data.path: {path} cannot be read: {reason}; check the file, data.format and "
            "data.text_key"
        ) from error


def _jsonl(path: Path, config: DataConfig) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, row in json_lines(lines, f"data.path: {path} line "):
            yield f"line {number}", row


def _parquet(path: Path, config: DataConfig) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet  # noqa: PLC0415 - optional

    with pyarrow.parquet.ParquetFile(path) as file:
        file.schema_arrow.field(config.text_key)  # which raises where there is none
        batches = file.iter_batches(batch_size=_ROWS, columns=[config.text_key])
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _dataset(path: Path, config: DataConfig) -> Iterator[tuple[str, Any]]:
    import datasets  # noqa: PLC0415 - optional

    found = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.DatasetDict):
        if config.split not in found:
            raise RecipeError(
                f"data.split: expected one of the splits {', '.join(map(str, found))} of {path}; "
                f"got {config.split!r}; change data.split"
            )
        found = found[config.split]
    rows = found.select_columns([config.text_key])
    yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


def cache_key(config: DataConfig, settings: Mapping[str, Any]) -> str:
    """A hash of the text's bytes, of which of them are read, and of other settings.

    Where a file is and when it was written are no part of it.
    """
    texts = [
        [[kind, _digest(file)] for path, kind in find_sources(text) for file in _files(path)]
        for text in config.texts
    ]
    keys = {"max_bytes", "text_key", "split", "documents"}
    everything = [texts, config.model_dump(include=keys), settings]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:24]


def _files(path: Path) -> list[Path]:
    return sorted(filter(Path.is_file, path.rglob("*"))) if path.is_dir() else [path]


def _digest(path: Path) -> str:
    with (
        refused(f"data.path: {path} cannot be read", "check its permissions"),
        path.open("rb") as file,
    ):
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder(config: DataConfig) -> Path:
    """The folder of caches: `data.cache_dir`, or the user's (XDG_CACHE_HOME counts)."""
    return Path(config.cache_dir or platformdirs.user_cache_dir("unitscale", appauthor=False))


def cached(config: DataConfig, name: str, build: Callable[[Path], None]) -> Path:
    """The path of a file of the cache, which `build` writes if it is not there.

    A file is renamed when it is complete. A process that comes while another builds waits for it.
    """
    root = cache_folder(config)
    path, draft = root / name, root / f"{name}.tmp"
    where, todo = f"data.cache_dir: cannot write {root}", "or set data.cache_dir to another folder"
    with refused(where, f"free space, change its permissions, {todo}", exit_code=1):
        if path.exists():  # also where the folder is read-only
            return path
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f"{name}.lock"):
            if not path.exists():
                try:
                    build(draft)
                    draft.replace(path)
                finally:
                    draft.unlink(missing_ok=True)
    return path
