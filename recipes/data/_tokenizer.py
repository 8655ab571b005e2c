"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..config import BYTES


class Tokenizer(Protocol):
    """What the pipeline and generation need of a tokenizer."""

    vocab: int

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


class ByteTokenizer:
    """One token per UTF-8 byte: 256 ids, no training, and any text goes through unchanged.

    Example:
      >>> ByteTokenizer().decode(ByteTokenizer().encode("naïve"))
      'naïve'
    """

    vocab = BYTES

    def encode(self, text: str) -> np.ndarray:
        """The bytes of `text`, as a uint8 array (bytes,)."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; a byte sequence that is no character becomes U+FFFD."""
        return np.asarray(ids, np.uint8).tobytes().decode("utf-8", errors="replace")
