"""Read the files of tasks, and make padded records of tokens for training and scoring.

Long contexts of SQuAD are split into overlapping windows. A window without the whole answer has
start and end at [CLS]. Classification reads CSV files, and TSV files without quoting.
"""

import csv
import dataclasses
import functools
import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Encoding, Tokenizer

from ..errors import RecipeError, clipped, read_text
from .config import ClassificationConfig, DataConfig

_CHUNK = 1024  # texts to tokenize in one call


@dataclasses.dataclass(frozen=True)
class Records:
    """Arrays `ids`, `segments`, `mask` (0 on padding) of (records, length); labels (records,)."""

    arrays: dict[str, np.ndarray]

    @functools.cached_property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for name, array in sorted(self.arrays.items()):
            digest.update(f"{name} {array.shape}".encode() + array.tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.arrays["ids"])

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return {name: array[index].astype(np.int32) for name, array in self.arrays.items()}

    def batches(self, size: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield batches in order; the last one is padded with copies of the last record."""
        for start in range(0, len(self), size):
            yield self[np.minimum(np.arange(start, start + size), len(self) - 1)]


Tokens = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, segments and mask of a record


def _tokens(encoding: Encoding, mark: bool) -> Tokens:
    """Make a record; `mark` assigns the first text's segment id to shared tokens of the second."""
    ids = np.array(encoding.ids, np.int32)
    segments = np.array(encoding.type_ids, np.int8)
    if mark:  # Chen et al., 2017, Reading Wikipedia to Answer Open-Domain Questions: "exact match"
        second = _second_text(encoding)
        segments[second] &= ~np.isin(ids[second], ids[: second.start])
    return ids, segments, np.array(encoding.attention_mask, np.int8)


def _stack(rows: Sequence[Tokens], **labels: Any) -> Records:
    tokens = zip(("ids", "segments", "mask"), map(np.stack, zip(*rows, strict=True)), strict=True)
    return Records({**dict(tokens), **{k: np.array(v, np.int32) for k, v in labels.items()}})


def _second_text(encoding: Encoding) -> slice:
    """Return the positions of the second text of a pair; an empty slice for a single text."""
    parts: Sequence[int | None] = encoding.sequence_ids
    first = parts.index(1) if 1 in parts else 0
    return slice(first, first + parts.count(1))


def _padding_copy(tokenizer: Tokenizer, length: int, least: int, *, pairs: bool) -> Tokenizer:
    """Copy a tokenizer, with padding to `length`, which must leave `least` tokens for texts."""
    special = tokenizer.num_special_tokens_to_add(pairs)
    if length < least + special:
        raise RecipeError(
            f"data.sequence_length: expected at least {least + special}, with {special} special "
            f"tokens; got {length}; raise it"
        )
    copy = Tokenizer.from_str(tokenizer.to_str())
    found = (copy.token_to_id(token) for token in ("[PAD]", "<pad>"))
    copy.enable_padding(length=length, pad_id=next((i for i in found if i is not None), 0))
    return copy


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


_Text = Annotated[str, Field(pattern=r"\S")]


class Answer(_Strict):
    """An answer's text and the position of its first character in the context."""

    text: _Text
    answer_start: int


class Question(_Strict):
    """A question about a context, with its correct answers, if there are any."""

    id: str
    question: _Text
    answers: list[Answer]
    is_impossible: bool = False
    context: str = ""  # filled in from its paragraph


class _Paragraph(_Strict):
    context: str
    qas: list[Question]


class _Article(_Strict):
    paragraphs: list[_Paragraph]


class _File(_Strict):
    data: list[_Article]


def read_squad(path: str | Path, key: str = "data.train") -> list[Question]:
    """Read and check the questions of a file; messages name the config key `key`."""
    where = f"{key}: {path}"
    try:
        file = _File.model_validate_json(read_text(Path(path), key))
    except ValidationError as error:
        wrong = error.errors()[0]
        place = ".".join(map(str, wrong["loc"])) or "the file"
        raise RecipeError(
            f"{where}: {place}: {wrong['msg']}; got {clipped(wrong['input'])}; correct the file, "
            "which must have SQuAD's format"
        ) from error
    questions: dict[str, Question] = {}
    for paragraph in (one for article in file.data for one in article.paragraphs):
        for asked in paragraph.qas:
            wrong = _complaint(asked, paragraph.context)
            if wrong or asked.id in questions:
                wrong = wrong or "expected unique ids; got this one twice"
                raise RecipeError(f"{where}: question {asked.id!r}: {wrong}; correct the file")
            questions[asked.id] = asked.model_copy(update={"context": paragraph.context})
    if not any(asked.answers for asked in questions.values()):
        raise RecipeError(f"{where}: expected questions with answers; got none; give another file")
    return list(questions.values())


def _complaint(asked: Question, context: str) -> str | None:
    """Return what is wrong with a question, or None."""
    if asked.is_impossible == bool(asked.answers):
        return f"expected is_impossible {not asked.answers}, as it has {len(asked.answers)} answers"
    for text, start in ((answer.text, answer.answer_start) for answer in asked.answers):
        if start < 0 or not context.startswith(text, start):
            return f"expected {clipped(text)} at character {start} of the context"
    return None


class Window(NamedTuple):
    """The part of a context in a record."""

    question: int
    first: int  # position of its first token in the record
    offsets: np.ndarray  # (tokens, 2): begin and end of each token, in characters


class SquadFeatures(NamedTuple):
    """Questions, records with labels `start` and `end`, and the window of each record."""

    questions: Sequence[Question]
    records: Records
    windows: list[Window]


def make_squad_features(
    questions: Sequence[Question], tokenizer: Tokenizer, length: int, mark: bool = False
) -> SquadFeatures:
    """Tokenize questions, each with windows of its context that overlap by half."""
    most = min(max(length // 3, 1), 64)  # tokens of a question; the rest is cut
    tokenizer = _padding_copy(tokenizer, length, most + 1, pairs=True)
    rows: list[Tokens] = []
    windows: list[Window] = []
    labels: list[tuple[int, int]] = []
    for begin in range(0, len(questions), _CHUNK):
        chunk = questions[begin : begin + _CHUNK]
        for number, encoding in enumerate(_encode(chunk, tokenizer, length, most), begin):
            for part in (encoding, *encoding.overflowing):
                context = _second_text(part)
                offsets = np.array(part.offsets[context], np.int32).reshape(-1, 2)
                windows.append(Window(number, context.start, offsets))
                labels.append(_label(windows[-1], questions[number]))
                rows.append(_tokens(part, mark))
    start, end = zip(*labels, strict=True)
    return SquadFeatures(questions, _stack(rows, start=start, end=end), windows)


def _encode(
    questions: Sequence[Question], tokenizer: Tokenizer, length: int, most: int
) -> list[Encoding]:
    """Encode the first window of each question, with further windows in its `overflowing`."""
    tokenizer.no_truncation()  # cut questions below, as its truncation may lose text silently
    texts = [question.question.strip() for question in questions]
    sizes = []
    for i, asked in enumerate(tokenizer.encode_batch(texts, add_special_tokens=False)):
        sizes.append(min(sum(asked.attention_mask), most))
        texts[i] = texts[i][: asked.offsets[sizes[i] - 1][1]]
    found: dict[int, Encoding] = {}
    for size in set(sizes):
        room = length - tokenizer.num_special_tokens_to_add(True) - size
        tokenizer.enable_truncation(length, stride=room // 2, strategy="only_second")
        members = [i for i, own in enumerate(sizes) if own == size]
        pairs = [(texts[i], questions[i].context) for i in members]
        found |= zip(members, tokenizer.encode_batch(pairs), strict=True)
    return [found[i] for i in range(len(questions))]


def _label(window: Window, question: Question) -> tuple[int, int]:
    """Return the first and last token of the first answer, or (0, 0) if it is not all there."""
    if not question.answers or not window.offsets.size:
        return 0, 0
    text, start = question.answers[0].text, question.answers[0].answer_start
    start += len(text) - len(text.lstrip())  # skip white space around it
    stop = start + len(text.strip())
    begins, ends = window.offsets.T
    if start < begins[0] or stop > ends[-1]:
        return 0, 0
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(begins, stop, side="left")) - 1
    # An answer has no token if the tokenizer drops all of its characters.
    return (window.first + first, window.first + last) if first <= last else (0, 0)


def with_answers(records: Records, others: float, seed: int) -> Records:
    """Keep all records with an answer, and `others` times as many random ones without."""
    answered = records.arrays["start"] > 0
    held, without = np.flatnonzero(answered), np.flatnonzero(~answered)
    count = min(len(without), round(others * len(held)))
    chosen = np.random.default_rng(seed).choice(without, count, replace=False)
    kept = np.sort(np.concatenate([held, chosen]))
    return Records({name: array[kept] for name, array in records.arrays.items()})


class Row(NamedTuple):
    """A text, an optional second text, the label's name, and the line in the file."""

    text: str
    pair: str | None
    label: str
    line: int


class Dataset(NamedTuple):
    """Training and validation rows, and the label names by id."""

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
    """Read both files; if `known` has the same labels, keep its order, else sort them."""
    train = list(_rows(data.train, "data.train", columns))
    validation = list(_rows(data.validation, "data.validation", columns))
    names = {row.label for row in train}
    if len(names) < 2 or not validation:
        raise RecipeError(
            f"data: expected rows of two labels or more in {data.train}, and rows in "
            f"{data.validation}; got {clipped(names)} and {len(validation)} rows; add rows"
        )
    # Sort by number, but not if there are leading zeros: "01" and "1" are different labels.
    whole = all(re.fullmatch("0|-?[1-9][0-9]*", name) for name in names)
    labels = known if names == {*known} else sorted(names, key=int if whole else str)
    unknown = next((row for row in validation if row.label not in names), None)
    if unknown is not None:
        raise RecipeError(
            f"data.validation: {data.validation}:{unknown.line}: expected a label of data.train, "
            f"{clipped(labels)}; got {clipped(unknown.label)}; correct the row"
        )
    return Dataset(train, validation, tuple(labels))


def _rows(path: str, key: str, columns: ClassificationConfig) -> Iterator[Row]:
    """Read the rows of a TSV or CSV file; a row's line number is that of its last line."""
    kind, text = Path(path).suffix.lower(), read_text(Path(path), key)
    if kind not in (".tsv", ".csv"):
        raise RecipeError(f"{key}: expected a file that ends in .tsv or .csv; got {path}")
    tabs: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind == ".tsv" else {}
    reader, names = csv.reader(io.StringIO(text, newline=""), strict=True, **tabs), None
    wanted = columns.text, columns.pair, columns.label
    try:
        for row in filter(None, reader):
            if names is None:
                names = [name.strip() for name in row] if columns.header else range(len(row))
                if columns.header:
                    continue
            if len(row) != len(names):
                raise csv.Error(f"expected {len(names)} fields, as in the first line")
            fields: dict[Any, str] = dict(zip(names, row, strict=True))
            first, second, label = (fields.get(column) for column in wanted)
            label = (label or "").strip()
            if first is None or not label or (second is None) != (columns.pair is None):
                raise csv.Error(
                    f"expected text, pair and label in the columns {wanted}; got {clipped(fields)} "
                    "(without names: 'classification={header: false, text: 0, label: 1}')"
                )
            yield Row(first, second, label, reader.line_num)
    except csv.Error as error:
        raise RecipeError(f"{key}: {path}:{reader.line_num}: {error}; correct the row") from error


def make_classification_records(
    dataset: Dataset, rows: Sequence[Row], tokenizer: Tokenizer, length: int, mark: bool = False
) -> Records:
    """Tokenize rows; texts that are too long are truncated, the longer one of a pair first."""
    pairs = rows[0].pair is not None
    tokenizer = _padding_copy(tokenizer, length, 1 + pairs, pairs=pairs)
    tokenizer.enable_truncation(length, strategy="longest_first")
    texts: list[Any] = [(row.text, row.pair) if pairs else row.text for row in rows]
    chunks = (texts[start : start + _CHUNK] for start in range(0, len(texts), _CHUNK))
    tokens = [_tokens(one, mark) for chunk in chunks for one in tokenizer.encode_batch(chunk)]
    return _stack(tokens, label=dataset.ids(rows))
