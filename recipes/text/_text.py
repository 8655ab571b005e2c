"""The documents of a config, one at a time, whatever they are kept in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..config import DataConfig
from ..errors import RecipeError
from ._rows import row_texts
from ._sources import Source, describe_sources, find_sources

PIECE = 16 * 2**20
"""Bytes of a text file that are in memory at once; a longer one is several documents."""


class Document(NamedTuple):
    """A text, and whether it was a row, which needs something to end it."""

    text: str
    is_row: bool


def documents(config: DataConfig) -> Iterator[str]:
    """The documents that a config names, streamed.

    A document is a row of JSONL, Parquet or a dataset; of a text file it is what `data.documents`
    says: the file, its stretches between blank lines, or its lines. Concatenated, the documents of
    text files are the files, byte for byte; empty documents are left out. A file longer than
    `PIECE` bytes is cut at line ends into several documents.

    Args:
      config: The `data` section.

    Yields:
      Each text; the last one is cut where `max_bytes` of UTF-8 are reached, at a character.

    Raises:
      RecipeError: Nothing is there, a file cannot be read, a file is not UTF-8 (the message has its
        name and the byte offset), a row is malformed, or there is no text at all.
    """
    return (document.text for document in typed_documents(config))


def typed_documents(config: DataConfig) -> Iterator[Document]:
    """As `documents`, with what each of them was."""
    left, empty = config.max_bytes, True
    for source in find_sources(config):
        for text in _texts(source, config):
            if left is not None:
                raw = text.encode("utf-8")
                text = raw[:left].decode("utf-8", errors="ignore")
                left -= len(raw)
            if text:
                empty = False
                yield Document(text, source.has_rows)
            if left is not None and left <= 0:
                return
    if empty:
        raise RecipeError(
            f"data.path: {describe_sources(config)} holds no text (0 bytes); give a file that has "
            "text"
        )


def _texts(source: Source, config: DataConfig) -> Iterator[str]:
    if source.has_rows:
        yield from row_texts(source, config)
        return
    parts: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {
        "file": _pieces,
        "blank_line": _stretches,
        "line": iter,
    }
    offset = 0
    try:
        with source.path.open("rb") as file:
            for raw in parts[config.documents](file):
                try:
                    yield raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    if not source.mine:
                        return
                    raise _not_utf8(source.path, raw, offset, error) from error
                offset += len(raw)
    except OSError as error:
        raise RecipeError(
            f"data.path: {source.path} cannot be read: {error.strerror}; check its permissions"
        ) from error


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """A file in pieces of at most `PIECE` bytes, cut after a line or else between characters."""
    held = b""
    while new := file.read(PIECE - len(held)):
        held += new
        if len(held) < PIECE:
            continue
        end = held.rfind(b"\n") + 1 or _character_end(held)
        yield held[:end]
        held = held[end:]
    if held:
        yield held


def _character_end(raw: bytes) -> int:
    """The length of `raw` without the character that its end cuts in two."""
    for back in range(1, 4):
        byte = raw[-back]
        if byte >= 0xC0:  # the first byte of a character of several
            return len(raw) - back
        if byte < 0x80:
            break
    return len(raw)


def _stretches(file: BinaryIO) -> Iterator[bytes]:
    """Lines up to and with the blank lines that follow them."""
    held: list[bytes] = []
    has_text = ended = False
    for line in file:
        blank = not line.strip()
        if ended and not blank:
            yield b"".join(held)
            held, has_text = [], False
        held.append(line)
        has_text = has_text or not blank
        ended = has_text and blank
    if held:
        yield b"".join(held)


def _not_utf8(file: Path, raw: bytes, offset: int, error: UnicodeDecodeError) -> RecipeError:
    return RecipeError(
        f"data.path: {file} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset "
        f"{offset + error.start} ({error.reason}); convert the file to UTF-8, for example with "
        "`iconv -f latin1 -t utf-8`"
    )
