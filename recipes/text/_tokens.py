"""The tokens of a text, made once and then mapped into memory."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from ..config import DataConfig
from ._cache import Damaged, cache_key, cached
from ._text import typed_documents
from ._tokenizer import Tokenizer, token_dtype

_BATCH = 4 * 2**20  # characters that are encoded together
_BLOCK = 2**24  # bytes of a checksum at once


@dataclass(frozen=True)
class Tokens:
    """All tokens of a text, and where its documents start.

    Args:
      ids: Tokens of all documents, one after the other (tokens,); uint8, uint16 or uint32, mapped
        from a file. Each document ends with the tokenizer's `eos`, if it has one.
      starts: int64 (documents + 1,): document i is `ids[starts[i] : starts[i + 1]]`.
    """

    ids: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        """The number of documents."""
        return self.starts.size - 1

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document."""
        return self.ids[self.starts[index] : self.starts[index + 1]]


def tokenize(
    config: DataConfig, tokenizer: Tokenizer, say: Callable[[str], None] = print
) -> Tokens:
    """The tokens of a config's documents, from the cache or made now, a few documents at a time.

    Args:
      config: The `data` section.
      tokenizer: From `open_tokenizer`. Without an `eos`, rows end with a newline, and files follow
        one another as they are.
      say: Called with a line about a damaged cache.

    Raises:
      RecipeError: As `documents`, or the cache cannot be written.
    """
    key = cache_key(config, {"tokenizer": tokenizer.identity})
    return cached(
        config, f"tokens-{key}", lambda folder: _build(folder, config, tokenizer), _read, say
    )


def _build(folder: Path, config: DataConfig, tokenizer: Tokenizer) -> None:
    dtype = token_dtype(tokenizer.vocab)
    with _Array(folder / "ids.npy", dtype) as ids, _Array(folder / "starts.npy", "<i8") as starts:
        starts.append(np.zeros(1, np.int64))
        for texts in _batches(config, tokenizer):
            encoded = tokenizer.encode_many(texts)
            if tokenizer.eos is not None:
                encoded = [np.append(tokens, dtype.type(tokenizer.eos)) for tokens in encoded]
            starts.append(ids.size + np.cumsum([tokens.size for tokens in encoded]))
            ids.append(np.concatenate(encoded))
    facts = {"ids": [ids.size, ids.checksum], "starts": [starts.size, starts.checksum]}
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def _batches(config: DataConfig, tokenizer: Tokenizer) -> Iterator[list[str]]:
    texts: list[str] = []
    characters = 0
    for text, is_row in typed_documents(config):
        texts.append(f"{text}\n" if is_row and tokenizer.eos is None else text)
        characters += len(text)
        if characters >= _BATCH:
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts


def _read(folder: Path) -> Tokens:
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    if not isinstance(facts, dict):
        raise Damaged("facts.json holds no facts")
    arrays = {}
    for name in ("ids", "starts"):
        array = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        if [array.size, _checksum(array)] != facts.get(name):
            raise Damaged(f"the checksum of {name}.npy differs")
        arrays[name] = array
    return Tokens(**arrays)


def _checksum(array: np.ndarray) -> int:
    checksum = 0
    step = _BLOCK // array.itemsize
    for start in range(0, array.size, step):
        checksum = zlib.crc32(array[start : start + step].data, checksum)
    return checksum


class _Array:
    """A one-dimensional .npy file that grows; its header is written again when it is complete."""

    def __init__(self, path: Path, dtype: np.typing.DTypeLike):
        self.dtype = np.dtype(dtype)
        self.size = self.checksum = 0
        self._file = path.open("wb")
        self._write_header()

    def _write_header(self) -> None:
        # NumPy pads the header so that the first axis can grow to 21 digits in place.
        facts = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self._file, facts)

    def append(self, values: np.ndarray) -> None:
        raw = values.astype(self.dtype, copy=False).tobytes()
        self._file.write(raw)
        self.size += values.size
        self.checksum = zlib.crc32(raw, self.checksum)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if error is None:
                self._file.seek(0)
                self._write_header()
