"""Sentences, or pairs of them, and their labels from TSV, CSV or JSONL files.

TSV has no quotation marks: every tab divides, as in the files of GLUE. CSV has them as RFC 4180
says, so a field may span lines. JSONL has one object a line.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import RecipeError, clipped, json_lines, read_text
from .config import ClassificationConfig, DataConfig

_FORMATS = "tsv", "csv", "jsonl"


class Row(NamedTuple):
    """A text, a second one or None, the name of the label, and the line of the file."""

    text: str
    pair: str | None
    label: str
    line: int


class Dataset(NamedTuple):
    """Rows to train and to score on; `labels[i]` is the name of label i."""

    train: list[Row]
    validation: list[Row]
    labels: tuple[str, ...]

    def ids(self, rows: Sequence[Row]) -> np.ndarray:
        """Ids of the rows' labels, (rows,)."""
        ids = {name: number for number, name in enumerate(self.labels)}
        return np.array([ids[row.label] for row in rows])


def load_classification(
    data: DataConfig, columns: ClassificationConfig, known: Sequence[str] = ()
) -> Dataset:
    """Reads both files.

    Args:
      data: Their paths and format.
      columns: What to read of a row. Without listed labels, those of the training file are learned:
        whole numbers in their order, other names in that of the alphabet.
      known: Labels of the pretrained model, in whose order the same are learned.

    Raises:
      RecipeError: A file cannot be read, has no rows, a malformed row, a row without one of the
        columns, or a label that is not among the labels (file and line named); or the training file
        has one label only.
    """
    paths = {"data.train": data.train, "data.validation": data.validation}
    found = {key: list(_read(path, key, data.format, columns)) for key, path in paths.items()}
    labels = tuple(columns.labels or _learn(found["data.train"], data.train))
    if not columns.labels and {*labels} == {*known}:
        labels = tuple(known)
    for key, rows in found.items():
        if not rows:
            raise RecipeError(f"{key}: {paths[key]}: expected rows; got none; give some")
        unknown = next((row for row in rows if row.label not in labels), None)
        if unknown is not None:
            listed = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
            raise RecipeError(
                f"{key}: {paths[key]}:{unknown.line}: expected a label out of {listed}; got "
                f"{clipped(unknown.label)}; correct the row, or list classification.labels"
            )
    return Dataset(found["data.train"], found["data.validation"], labels)


def _learn(rows: Sequence[Row], path: str) -> list[str]:
    names = {row.label for row in rows}
    if len(names) == 1:
        raise RecipeError(
            f"data.train: {path}: expected at least two labels; got only {clipped(min(names))}; "
            "give more rows, or list classification.labels"
        )
    # "01" and "1" would be two labels of one number.
    whole = all(re.fullmatch("0|-?[1-9][0-9]*", name) for name in names)
    return sorted(names, key=int if whole else str)


def _read(path: str, key: str, kind: str | None, columns: ClassificationConfig) -> Iterator[Row]:
    kind = kind or Path(path).suffix.lower().removeprefix(".")
    if kind not in _FORMATS:
        raise RecipeError(
            f"{key}: expected a file that ends in .{', .'.join(_FORMATS)}; got {path}; rename it, "
            "or set data.format"
        )
    where, raw = f"{key}: {path}", read_text(Path(path), key)
    found = _jsonl(raw, where) if kind == "jsonl" else _table(raw, where, kind, columns.header)
    for line, fields in found:
        at = f"{where}:{line}"
        text = _text(fields, columns.text, at)
        pair = None if columns.pair is None else _text(fields, columns.pair, at)
        label = _field(fields, columns.label, at)
        if isinstance(label, int) and not isinstance(label, bool):
            label = str(label)
        if not isinstance(label, str) or not label.strip():
            raise RecipeError(
                f"{at}: expected a name or a whole number as {columns.label!r}; got "
                f"{clipped(label)}; correct the row"
            )
        yield Row(text, pair, label.strip(), line)


def _text(fields: dict[Any, Any], column: int | str, where: str) -> str:
    value = _field(fields, column, where)
    if not isinstance(value, str):
        raise RecipeError(
            f"{where}: expected text as {column!r}; got {clipped(value)}; correct the row"
        )
    return value


def _field(fields: dict[Any, Any], column: int | str, where: str) -> Any:
    if column not in fields:
        raise RecipeError(
            f"{where}: expected the column {column!r}; got only "
            f"{', '.join(map(repr, fields)) or 'an empty object'}; correct the columns in the "
            "section classification, or, of a file that does not name them, give positions: "
            "'classification={header: false, text: 0, label: 1}'"
        )
    return fields[column]


_Fields = tuple[int, dict[Any, Any]]
"""The line that a row begins at, and what it has by column."""


def _table(text: str, where: str, kind: str, header: bool) -> Iterator[_Fields]:
    """Rows by position and, with a header, by name."""
    tabs: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind == "tsv" else {}
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, **tabs)
    names: list[str] = []
    width: int | None = None
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise RecipeError(
                f"{where}:{line}: not a row of {kind.upper()}: {error}; correct the row"
            ) from error
        if row is None:
            return
        if row and width is None:
            width = len(row)
            if header:
                names = [name.strip() for name in row]
                continue
        if row:
            if len(row) != width:
                raise RecipeError(
                    f"{where}:{line}: expected {width} fields, as the first line has; got "
                    f"{len(row)}; correct the row"
                )
            yield line, dict(zip(names, row, strict=False)) | dict(enumerate(row))


def _jsonl(text: str, where: str) -> Iterator[_Fields]:
    for line, fields in json_lines(text.split("\n"), f"{where}:"):
        if not isinstance(fields, dict):
            raise RecipeError(
                f"{where}:{line}: expected an object; got {clipped(fields)}; correct the line"
            )
        yield line, fields
