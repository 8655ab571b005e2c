"""Classification of sentences or sentence pairs: files, token records and scores.

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
from scipy.special import softmax
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from tokenizers import Tokenizer

from ..errors import RecipeError, clipped, json_lines, read_text, write_json
from .config import ClassificationConfig, DataConfig
from .records import CHUNK, Records, make_records, padding_copy


class Row(NamedTuple):
    """A text, an optional second one, the name of the label, and the line in the file."""

    text: str
    pair: str | None
    label: str
    line: int


class Dataset(NamedTuple):
    """Training and validation rows; `labels[i]` is the name of label i."""

    train: list[Row]
    validation: list[Row]
    labels: tuple[str, ...]

    def ids(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the label ids of rows, (rows,)."""
        ids = {name: number for number, name in enumerate(self.labels)}
        return np.array([ids[row.label] for row in rows])


def load_classification(
    data: DataConfig, columns: ClassificationConfig, known: Sequence[str] = ()
) -> Dataset:
    """Read the training and the validation file.

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
    labels = columns.labels
    if not labels:
        labels = {row.label for row in found["data.train"]}
        if len(labels) == 1:
            raise RecipeError(
                f"data.train: {data.train}: expected at least two labels; got only "
                f"{clipped(min(labels))}; give more rows, or list classification.labels"
            )
        # "01" and "1" would be two labels of one number.
        whole = all(re.fullmatch("0|-?[1-9][0-9]*", name) for name in labels)
        labels = known if labels == {*known} else sorted(labels, key=int if whole else str)
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
    return Dataset(found["data.train"], found["data.validation"], tuple(labels))


def _read(path: str, key: str, kind: str | None, columns: ClassificationConfig) -> Iterator[Row]:
    kind, where = kind or Path(path).suffix.lower().removeprefix("."), f"{key}: {path}"
    if kind not in ("tsv", "csv", "jsonl"):
        raise RecipeError(
            f"{key}: expected a file that ends in .tsv, .csv or .jsonl; got {path}; rename it, or "
            "set data.format"
        )
    raw = read_text(Path(path), key)
    found = _objects(raw, where) if kind == "jsonl" else _table(raw, where, kind, columns.header)
    for line, fields in found:
        values = {}
        for name in ("text", "pair", "label"):
            column = getattr(columns, name)
            if column is not None and column not in fields:
                raise RecipeError(
                    f"{where}:{line}: expected the column {column!r}; got only "
                    f"{', '.join(map(repr, fields)) or 'an empty object'}; correct the columns in "
                    "the section classification, or, of a file that does not name them, give "
                    "positions: 'classification={header: false, text: 0, label: 1}'"
                )
            value = fields.get(column)
            if name == "label" and isinstance(value, int) and not isinstance(value, bool):
                value = str(value)
            empty = name == "label" and isinstance(value, str) and not value.strip()
            if column is not None and (empty or not isinstance(value, str)):
                wanted = "a name or a whole number" if name == "label" else "text"
                raise RecipeError(
                    f"{where}:{line}: expected {wanted} as {column!r}; got {clipped(value)}; "
                    "correct the row"
                )
            values[name] = value
        yield Row(values["text"], values["pair"], values["label"].strip(), line)


def _table(text: str, where: str, kind: str, header: bool) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Yield the first line of each row, and its fields by position and, with a header, by name."""
    tabs: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind == "tsv" else {}
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, **tabs)
    first: list[str] = []
    following = 1
    try:
        for row in reader:
            line, following = following, reader.line_num + 1
            if not row:
                continue
            if len(row) != len(first or row):
                raise RecipeError(
                    f"{where}:{line}: expected {len(first)} fields, as the first line has; got "
                    f"{len(row)}; correct the row"
                )
            if first or not header:
                names = [name.strip() for name in first] if header else []
                yield line, dict(zip(names, row, strict=False)) | dict(enumerate(row))
            first = first or row
    except csv.Error as error:
        raise RecipeError(
            f"{where}:{following}: not a row of {kind.upper()}: {error}; correct the row"
        ) from error


def _objects(text: str, where: str) -> Iterator[tuple[int, dict[Any, Any]]]:
    for line, fields in json_lines(text.split("\n"), f"{where}:"):
        if not isinstance(fields, dict):
            raise RecipeError(
                f"{where}:{line}: expected an object; got {clipped(fields)}; correct the line"
            )
        yield line, fields


def make_classification_records(
    dataset: Dataset,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    mark_matches: bool = False,
) -> Records:
    """Tokenize rows; if texts are too long, the longer one of a pair is truncated first.

    Args:
      dataset: What the rows are of.
      rows: Texts, or pairs of them.
      tokenizer: Puts a special token first.
      sequence_length: Tokens of a record, special tokens included.
      mark_matches: As `mark` of `make_records`, where there are pairs.
    """
    tokenizer = padding_copy(tokenizer, sequence_length)
    pairs = rows[0].pair is not None
    special = tokenizer.num_special_tokens_to_add(pairs)
    if sequence_length < special + 1 + pairs:
        raise RecipeError(
            f"data.sequence_length: expected at least {special + 1 + pairs}, a token of each text "
            f"and {special} special tokens; got {sequence_length}; raise it"
        )
    tokenizer.enable_truncation(sequence_length, strategy="longest_first")
    texts: list[Any] = [(row.text, row.pair) if pairs else row.text for row in rows]
    encodings = (
        encoding
        for start in range(0, len(texts), CHUNK)
        for encoding in tokenizer.encode_batch(texts[start : start + CHUNK])
    )
    return make_records(encodings, {"label": dataset.ids(rows)}, mark=mark_matches)


def score_classification(
    predicted: np.ndarray, labels: np.ndarray, classes: int
) -> dict[str, float]:
    """Score predicted label ids (rows,) against the true ones (rows,); 1 is perfect.

    Returns:
      `accuracy`; `f1` of label 1, where there are two; `f1_macro`, the mean over the labels that
      are true or predicted of some row; and `matthews`, 0 where all labels or predictions are one.
    """
    mean: dict[str, Any] = {"average": "macro", "zero_division": 0}
    scores = {"accuracy": accuracy_score(labels, predicted)}
    if classes == 2:
        scores["f1"] = f1_score(labels, predicted, labels=[1], **mean)
    scores["f1_macro"] = f1_score(labels, predicted, **mean)
    one = np.unique([labels, predicted]).size == 1  # scikit-learn would warn
    scores["matthews"] = 0.0 if one else matthews_corrcoef(labels, predicted)
    return {name: float(score) for name, score in scores.items()}


def write_labels(
    folder: Path, rows: Sequence[Row], logits: np.ndarray, labels: Sequence[str]
) -> None:
    """Write `predictions.json`, with line, label and probability, from logits (rows, labels)."""
    best, shares = logits.argmax(axis=-1).tolist(), softmax(logits, axis=-1)
    tree = [
        {"line": row.line, "label": labels[label], "probability": float(share[label])}
        for row, label, share in zip(rows, best, shares, strict=True)
    ]
    write_json(folder / "predictions.json", tree)
