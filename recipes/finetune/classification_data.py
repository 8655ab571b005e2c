"""Sentences, or pairs of them, and their labels from TSV, CSV or JSONL files.

TSV has no quotation marks: every tab divides, as in the files of GLUE. CSV has them as RFC 4180
says, so a field may span lines. JSONL has one object a line.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import RecipeError
from .config import ClassificationConfig, DataConfig
from .files import read_utf8, shown


class Row(NamedTuple):
    """A text, a second one or None, the id of the label, and the line of the file."""

    text: str
    pair: str | None
    label: int
    line: int


class Dataset(NamedTuple):
    """Rows to train and to score on; `labels[i]` is the name of label i."""

    train: list[Row]
    validation: list[Row]
    labels: tuple[str, ...]


class _Named(NamedTuple):
    text: str
    pair: str | None
    label: str
    line: int


_Fields = tuple[int, dict[Any, Any]]
"""The line that a row begins at, and what it has by column."""


def load_classification(data: DataConfig, columns: ClassificationConfig) -> Dataset:
    """Reads both files.

    Args:
      data: Their paths and format.
      columns: What to read of a row. Without listed labels, those of the training file are learned:
        whole numbers in their order, other names in that of the alphabet.

    Raises:
      RecipeError: A file cannot be read, has no rows, a malformed row, a row without one of the
        columns, or a label that is not among the labels (file and line named); or the training file
        has one label only.
    """
    train = _read(data.train, "data.train", data.format, columns)
    validation = _read(data.validation, "data.validation", data.format, columns)
    labels = tuple(columns.labels or _learn(train, data.train))
    return Dataset(
        _with_ids(train, labels, data.train, "data.train"),
        _with_ids(validation, labels, data.validation, "data.validation"),
        labels,
    )


def _learn(rows: Sequence[_Named], path: str) -> list[str]:
    names = {row.label for row in rows}
    if len(names) < 2:
        raise RecipeError(
            f"data.train: {path}: expected at least two labels; got only {shown(min(names))}; "
            "give more rows, or list classification.labels"
        )
    return sorted(names, key=int) if all(map(_is_whole, names)) else sorted(names)


def _is_whole(name: str) -> bool:
    digits = name.removeprefix("-")
    # "01" and "1" would be two labels of one number.
    return digits.isascii() and digits.isdecimal() and str(int(name)) == name


def _with_ids(rows: Sequence[_Named], labels: Sequence[str], path: str, key: str) -> list[Row]:
    ids = {name: number for number, name in enumerate(labels)}
    listed = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
    found = []
    for row in rows:
        if row.label not in ids:
            raise RecipeError(
                f"{key}: {path}:{row.line}: expected a label out of {listed}; got "
                f"{shown(row.label)}; correct the row, or list classification.labels"
            )
        found.append(Row(row.text, row.pair, ids[row.label], row.line))
    return found


def _read(path: str, key: str, kind: str | None, columns: ClassificationConfig) -> list[_Named]:
    kind = kind or Path(path).suffix.lower().removeprefix(".")
    if kind not in _READERS:
        raise RecipeError(
            f"{key}: expected a file that ends in .{', .'.join(_READERS)}; got {path}; rename it, "
            "or set data.format"
        )
    where = f"{key}: {path}"
    rows = []
    for line, fields in _READERS[kind](read_utf8(Path(path), key), where, columns):
        text = _text(fields, columns.text, f"{where}:{line}")
        pair = None
        if columns.pair is not None:
            pair = _text(fields, columns.pair, f"{where}:{line}")
        rows.append(_Named(text, pair, _label(fields, columns.label, f"{where}:{line}"), line))
    if not rows:
        raise RecipeError(f"{where}: expected rows; got none; give a file that has some")
    return rows


def _text(fields: dict[Any, Any], column: int | str, where: str) -> str:
    value = fields[column]
    if not isinstance(value, str):
        raise RecipeError(
            f"{where}: expected text as {column!r}; got {shown(value)}; correct the row"
        )
    return value


def _label(fields: dict[Any, Any], column: int | str, where: str) -> str:
    value = fields[column]
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    name = value.strip() if isinstance(value, str) else ""
    if not name:
        raise RecipeError(
            f"{where}: expected a name or a whole number as {column!r}; got {shown(value)}; "
            "correct the row"
        )
    return name


def _tsv(text: str, where: str, columns: ClassificationConfig) -> Iterator[_Fields]:
    rows = ((n, line.removesuffix("\r")) for n, line in enumerate(text.split("\n"), 1))
    return _table(((n, row.split("\t")) for n, row in rows if row), where, columns)


def _csv(text: str, where: str, columns: ClassificationConfig) -> Iterator[_Fields]:
    return _table(_csv_rows(text, where), where, columns)


def _csv_rows(text: str, where: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise RecipeError(
                f"{where}:{line}: not a row of CSV: {error}; correct its quotation marks"
            ) from error
        if row is None:
            return
        if row:
            yield line, row
        line = reader.line_num + 1


def _table(
    rows: Iterator[tuple[int, list[str]]], where: str, columns: ClassificationConfig
) -> Iterator[_Fields]:
    wanted = [c for c in (columns.text, columns.pair, columns.label) if c is not None]
    names: list[str] | None = None
    width = None
    for line, row in rows:
        if width is None:
            width = len(row)
            names = [name.strip() for name in row] if columns.header else None
            _check_columns(wanted, names, width, f"{where}:{line}")
            if names is not None:
                continue
        if len(row) != width:
            raise RecipeError(
                f"{where}:{line}: expected {width} fields, as the first line has; got {len(row)}; "
                "correct the row"
            )
        yield line, dict(enumerate(row)) | dict(zip(names or (), row, strict=bool(names)))


def _check_columns(
    wanted: Sequence[int | str], names: list[str] | None, width: int, where: str
) -> None:
    for column in wanted:
        if isinstance(column, int):
            if column >= width:
                raise RecipeError(
                    f"{where}: expected a column at position {column}, from 0; got {width} "
                    "columns; correct the columns in the section classification"
                )
        elif names is None:
            raise RecipeError(
                f"{where}: expected positions of columns, from 0, of a file without a header; got "
                f"the name {column!r}; give positions, or set classification.header true"
            )
        elif names.count(column) != 1:
            got = "it twice" if column in names else f"only {', '.join(map(repr, names))}"
            raise RecipeError(
                f"{where}: expected the column {column!r}; got {got}; correct the columns in the "
                "section classification, or, of a file that does not name them, give positions: "
                "'classification={header: false, text: 0, label: 1}'"
            )


def _jsonl(text: str, where: str, columns: ClassificationConfig) -> Iterator[_Fields]:
    wanted = [c for c in (columns.text, columns.pair, columns.label) if c is not None]
    for line, row in enumerate(text.split("\n"), 1):
        if not row.strip():
            continue
        try:
            fields = json.loads(row)
        except (json.JSONDecodeError, RecursionError) as error:
            raise RecipeError(
                f"{where}:{line}: not valid JSON: {error}; correct the line"
            ) from error
        if not isinstance(fields, dict):
            raise RecipeError(
                f"{where}:{line}: expected an object; got {shown(fields)}; correct the line"
            )
        for column in wanted:
            if column not in fields:
                keys = ", ".join(map(repr, fields)) or "an empty object"
                raise RecipeError(
                    f"{where}:{line}: expected the key {column!r}; got only {keys}; correct the "
                    "line, or the columns in the section classification"
                )
        yield line, fields


_READERS: dict[str, Callable[[str, str, ClassificationConfig], Iterator[_Fields]]] = {
    "tsv": _tsv,
    "csv": _csv,
    "jsonl": _jsonl,
}
