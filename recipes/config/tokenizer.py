"""Reading a tokenizer.json of the `tokenizers` library."""

from pathlib import Path

from tokenizers import Tokenizer

from ..errors import RecipeError, read_text

TOKENIZER_FILE = "tokenizer.json"


def read_tokenizer(path: str | Path, key: str = "data.tokenizer.path") -> Tokenizer:
    """Reads a tokenizer.json."""
    path = Path(path)
    text = read_text(path, key, "give the tokenizer.json of a tokenizer")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more precise
        raise RecipeError(
            f"{key}: expected {path} to be a tokenizer.json of the tokenizers library; got: "
            f"{error!s:.200}; give another file"
        ) from error


def count_ids(path: str | Path) -> int:
    """One more than the largest id of a tokenizer.json, added tokens included."""
    return largest_id(read_tokenizer(path)) + 1


def largest_id(tokenizer: Tokenizer) -> int:
    """The largest id that a tokenizer can give; -1 where it has none."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
