"""The tokens of a text, made once and then mapped into memory."""

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ..config import DataConfig
from ._cache import cache_key, cached
from ._documents import documents
from ._tokenizer import Tokenizer, token_dtype

_BATCH = 4 * 2**20  # characters that are encoded together
_BLOCK = 2**24  # bytes of a checksum at once


def tokenize(
    config: DataConfig, tokenizer: Tokenizer, say: Callable[[str], None] = print
) -> np.ndarray:
    """The tokens of a config's documents, from the cache or made now, a few documents at a time.

    Args:
      config: The `data` section.
      tokenizer: From `open_tokenizer`. Each document ends with its `eos`; without one, rows end
        with a newline, and files follow one another as they are.
      say: Called with a line about a damaged cache.

    Returns:
      Tokens of all documents, one after the other (tokens,); uint8, uint16 or uint32, mapped from a
      file.
    """
    dtype = token_dtype(tokenizer.vocab)

    def build(folder: Path) -> None:
        size = checksum = 0
        with (folder / "ids").open("wb") as file:
            for texts in _batches(config, tokenizer):
                for ids in tokenizer.encode_many(texts):
                    ended = ids if tokenizer.eos is None else np.append(ids, tokenizer.eos)
                    raw = ended.astype(dtype).tobytes()
                    size, checksum = size + file.write(raw), zlib.crc32(raw, checksum)
        facts = json.dumps({"bytes": size, "checksum": checksum})
        (folder / "facts.json").write_text(facts, encoding="utf-8")

    def read(folder: Path) -> np.ndarray:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        # An empty file cannot be mapped.
        raw = np.memmap(folder / "ids", mode="r") if facts["bytes"] else np.empty(0, np.uint8)
        checksum = 0
        for start in range(0, raw.size, _BLOCK):
            checksum = zlib.crc32(raw[start : start + _BLOCK].data, checksum)
        if facts != {"bytes": raw.size, "checksum": checksum}:
            raise ValueError("its checksum differs")
        return raw.view(dtype)

    key = cache_key(config, {"tokenizer": tokenizer.identity})
    return cached(config, f"tokens-{key}", build, read, say)


def _batches(config: DataConfig, tokenizer: Tokenizer) -> Iterator[list[str]]:
    texts: list[str] = []
    characters = 0
    for text, is_row in documents(config):
        texts.append(f"{text}\n" if is_row and tokenizer.eos is None else text)
        characters += len(text)
        if characters >= _BATCH:
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts
