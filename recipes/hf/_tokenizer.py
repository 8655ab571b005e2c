"""The tokenizer.json of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ..errors import RecipeError
from ._folder import TOKENIZER


class PretrainedTokenizer:
    """Text to ids and back, as the file says, without the tokens that a model adds at the ends.

    Args:
      content: The bytes of tokenizer.json.
      where: Names the file in messages.
      vocab: Number of ids that the model has.

    Raises:
      RecipeError: The file is no tokenizer, or has ids that the model does not.
    """

    def __init__(self, content: bytes, where: str, *, vocab: int):
        self.content = content
        try:
            self.tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises no narrower class
            raise RecipeError(
                f"{where}: expected a file of the tokenizers library; got {error}; copy it again"
            ) from error
        self.vocab = vocab
        token, last = max(
            self.tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]
        )
        if last >= vocab:
            raise RecipeError(
                f"{where}: expected ids below the {vocab} of the model; got {last} for {token!r}; "
                "use the tokenizer that the model was trained with"
            )

    @classmethod
    def read(cls, folder: str | Path, *, vocab: int) -> PretrainedTokenizer:
        """The tokenizer of a folder.

        Raises:
          RecipeError: As for the class, or the folder has no tokenizer.json.
        """
        path = Path(folder) / TOKENIZER
        try:
            return cls(path.read_bytes(), str(path), vocab=vocab)
        except OSError as error:
            raise RecipeError(
                f"{path}: expected a file of the tokenizers library; got {error.strerror}; save "
                "the fast tokenizer of the model there"
            ) from error

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, int32 (tokens,)."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids."""
        return self.tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)
