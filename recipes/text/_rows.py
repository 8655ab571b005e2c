"""Text in rows: JSONL, Parquet, and Hugging Face datasets on disk, read a few rows at a time."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..config import DataConfig
from ..errors import RecipeError
from ._sources import Source

_ROWS = 1024  # read at once


def row_texts(source: Source, config: DataConfig) -> Iterator[str]:
    """The text field of each row, in order.

    Args:
      source: One whose `has_rows` holds.
      config: The `data` section; `text_key` names the field, `split` the split of a dataset.

    Raises:
      RecipeError: A file that cannot be read or is not of its format, a row without the field, or
        a field that is no text. The message names file and line (or row).
    """
    readers = {"jsonl": _jsonl, "parquet": _parquet, "dataset": _dataset}
    return readers[source.format](source.path, config)


def _jsonl(path: Path, config: DataConfig) -> Iterator[str]:
    key = config.text_key
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"data.path: {path} line {number}"
                try:
                    row = json.loads(line)
                except UnicodeDecodeError as error:
                    raise RecipeError(
                        f"{where}: expected UTF-8; got byte 0x{line[error.start]:02x} at offset "
                        f"{error.start} of the line; convert the file to UTF-8"
                    ) from error
                except (ValueError, RecursionError) as error:
                    raise RecipeError(
                        f"{where}: expected one JSON object; got malformed JSON ({error}); correct "
                        "or remove the line"
                    ) from error
                if not isinstance(row, dict):
                    raise RecipeError(
                        f"{where}: expected one JSON object; got {_kind(row)}; correct or remove "
                        "the line"
                    )
                if key not in row:
                    raise _no_field(where, key, row)
                yield _text(where, key, row[key])
    except OSError as error:
        raise _unreadable(path, error) from error


def _parquet(path: Path, config: DataConfig) -> Iterator[str]:
    parquet = _optional("pyarrow.parquet", "Parquet files", path)
    errors = (_optional("pyarrow", "Parquet files", path).ArrowException, OSError)
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if config.text_key not in names:
                raise _no_field(f"data.path: {path}", config.text_key, names)
            batches = file.iter_batches(batch_size=_ROWS, columns=[config.text_key])
            yield from _columns((batch.column(0).to_pylist() for batch in batches), path, config)
    except errors as error:
        raise _unreadable(path, error) from error


def _dataset(path: Path, config: DataConfig) -> Iterator[str]:
    datasets = _optional("datasets", "a Hugging Face dataset", path)
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(path, error) from error
    if isinstance(found, datasets.DatasetDict):
        if config.split not in found:
            raise RecipeError(
                f"data.split: expected one of the splits {', '.join(found)} of {path}; got "
                f"{config.split!r}; change data.split"
            )
        found = found[config.split]
    if config.text_key not in found.column_names:
        raise _no_field(f"data.path: {path}", config.text_key, found.column_names)
    rows = found.select_columns([config.text_key]).iter(batch_size=_ROWS)
    yield from _columns((batch[config.text_key] for batch in rows), path, config)


def _columns(columns: Iterable[list[Any]], path: Path, config: DataConfig) -> Iterator[str]:
    row = 0
    for column in columns:
        for value in column:
            row += 1
            yield _text(f"data.path: {path} row {row}", config.text_key, value)


def _text(where: str, key: str, value: Any) -> str:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise RecipeError(
                f"{where}: expected text in the field {key!r}; got a lone surrogate at character "
                f"{error.start}, which is no character; correct or remove the row"
            ) from error
        return value
    raise RecipeError(
        f"{where}: expected text in the field {key!r}; got {_kind(value)}; correct or remove the "
        "row, or set data.text_key to a field of text"
    )


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", type(None): "null", bool: "true or false"}
    return names.get(type(value), f"{value!r:.40}")


def _no_field(where: str, key: str, fields: Iterable[str]) -> RecipeError:
    listed = ", ".join(fields) or "none"
    return RecipeError(
        f"{where}: expected the field {key!r}; got the fields {listed}; set data.text_key to the "
        "one that holds the text"
    )


def _unreadable(path: Path, error: Exception) -> RecipeError:
    reason = str(error).strip().splitlines()[:1]
    return RecipeError(
        f"data.path: {path} cannot be read: {(reason or [type(error).__name__])[0]}; check the "
        "file and data.format"
    )


def _optional(module: str, what: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RecipeError(
            f"data.path: {path}: reading {what} needs the package {module.partition('.')[0]}, "
            "which is not installed; pip install 'unitscale[hf]'"
        ) from error
