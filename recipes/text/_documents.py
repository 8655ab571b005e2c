"""The documents of a config, one at a time, whatever they are kept in."""

import codecs
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..config import DataConfig
from ..errors import RecipeError, json_lines, refused
from ._sources import Source, describe_sources, find_sources

PIECE = 16 * 2**20
"""Bytes of a text file after which its document ends, with the line or after as many again."""
_ROWS = 1024  # read at once


class Document(NamedTuple):
    """A text, and whether it was a row, which needs something to end it."""

    text: str
    is_row: bool


def documents(config: DataConfig) -> Iterator[Document]:
    """The documents that a config names, streamed.

    A document is a row of JSONL, Parquet or a dataset; of a text file it is what `data.documents`
    says: the file, its stretches between blank lines, or its lines. Concatenated, the documents of
    text files are the files, byte for byte; empty documents are left out. A file longer than
    `PIECE` bytes is cut after a line into several documents.

    Yields:
      Each text; the last one is cut where `max_bytes` of UTF-8 are reached, at a character.

    Raises:
      RecipeError: Nothing is there, a file cannot be read, a file is not UTF-8 (the message has its
        name and the byte offset), a row is malformed (name and line), or there is no text at all.
    """
    if config.mixture is not None:
        for text in config.texts:
            yield from documents(text)
        return
    left, empty = config.max_bytes, True
    for source in find_sources(config):
        is_row = source.format != "text"
        for text in _rows(source, config) if is_row else _texts(source, config):
            if left is not None:
                raw = text.encode("utf-8")
                text = raw[:left].decode("utf-8", errors="ignore")
                left -= len(raw)
            if text:
                empty = False
                yield Document(text, is_row)
            if left is not None and left <= 0:
                return
    if empty:
        raise RecipeError(
            f"data.path: {describe_sources(config)} holds no text (0 bytes); give a file that has "
            "text"
        )


def _texts(source: Source, config: DataConfig) -> Iterator[str]:
    parts: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {
        "file": _pieces,
        "blank_line": _stretches,
        "line": iter,
    }
    offset = 0
    try:
        with (
            refused(f"data.path: {source.path} cannot be read", "check its permissions"),
            source.path.open("rb") as file,
        ):
            for raw in parts[config.documents](file):
                yield raw.decode("utf-8")
                offset += len(raw)
    except UnicodeDecodeError as error:
        if source.mine:
            wide = offset == 0 and error.object.startswith(
                (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            )
            raise RecipeError(
                f"data.path: {source.path} is not UTF-8 text: byte "
                f"0x{error.object[error.start]:02x} at offset {offset + error.start} "
                f"({error.reason}); convert the file to UTF-8, for example with "
                f"`iconv -f {'utf-16' if wide else 'latin1'} -t utf-8`"
            ) from error


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(PIECE) + file.readline(PIECE):
        # Of a line without an end, the last character is read whole.
        while (byte := file.read(1)) and byte[0] & 0xC0 == 0x80:
            piece += byte
        file.seek(-len(byte), 1)
        yield piece


def _stretches(file: BinaryIO) -> Iterator[bytes]:
    """Lines up to and with the blank lines that follow them."""
    held = b""
    for blank, lines in itertools.groupby(file, key=lambda line: not line.strip()):
        held += b"".join(lines)
        if blank and held.strip():
            yield held
            held = b""
    if held:
        yield held


def _rows(source: Source, config: DataConfig) -> Iterator[str]:
    """The text field of each row, in order."""
    readers = {"jsonl": _jsonl, "parquet": _parquet, "dataset": _dataset}
    key, path = config.text_key, source.path
    try:
        for place, row in readers[source.format](path, config):
            where = f"data.path: {path} {place}"
            if not isinstance(row, dict) or key not in row:
                got = f"fields {', '.join(row)}" if isinstance(row, dict) else f"{row!r:.40}"
                raise RecipeError(
                    f"{where}: expected an object with the field {key!r}; got {got}; set "
                    "data.text_key to the one that holds the text, or correct the row"
                )
            _check_text(row[key], f"{where}: expected text in the field {key!r}")
            yield row[key]
    # Of pyarrow's errors, those of what is not there or wrong are Python's.
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RecipeError(
            f"data.path: {path} cannot be read: {reason}; check the file and data.format"
        ) from error


def _check_text(value: Any, expected: str) -> None:
    if not isinstance(value, str):
        raise RecipeError(f"{expected}; got {value!r:.40}; correct or remove the row")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise RecipeError(
            f"{expected}; got a lone surrogate at character {error.start}, which is no character; "
            "correct or remove the row"
        ) from error


_Row = tuple[str, Any]
"""Where a row is, and what it holds."""


def _jsonl(path: Path, config: DataConfig) -> Iterator[_Row]:
    with path.open("rb") as lines:
        for number, row in json_lines(lines, f"data.path: {path} line "):
            yield f"line {number}", row


def _parquet(path: Path, config: DataConfig) -> Iterator[_Row]:
    with _optional("pyarrow.parquet", path).ParquetFile(path) as file:
        columns = _chosen(file.schema_arrow.names, config)
        batches = file.iter_batches(batch_size=_ROWS, columns=columns)
        yield from _numbered(row for batch in batches for row in batch.to_pylist())


def _dataset(path: Path, config: DataConfig) -> Iterator[_Row]:
    datasets = _optional("datasets", path)
    found = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.DatasetDict):
        if config.split not in found:
            raise RecipeError(
                f"data.split: expected one of the splits {', '.join(found)} of {path}; got "
                f"{config.split!r}; change data.split"
            )
        found = found[config.split]
    yield from _numbered(found.select_columns(_chosen(found.column_names, config)))


def _chosen(names: list[str], config: DataConfig) -> list[str]:
    """The column of the text; all of them, for the message, where it is not there."""
    return [config.text_key] if config.text_key in names else names


def _numbered(rows: Iterable[Any]) -> Iterator[_Row]:
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _optional(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RecipeError(
            f"data.path: reading {path} needs the package {module.partition('.')[0]}, which is not "
            "installed; pip install 'unitscale[hf]'"
        ) from error
