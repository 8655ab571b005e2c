"""Reading a tokenizer.json of the `tokenizers` library."""

from pathlib import Path

from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"


def read_tokenizer(path: str | Path, key: str = "data.tokenizer.path") -> Tokenizer:
    """Reads a tokenizer.json.

    Args:
      path: The file.
      key: What names the file in messages.

    Raises:
      ValueError: No such file, or it describes no tokenizer.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(
            f"{key}: {path} cannot be read: {reason}; give the tokenizer.json of a tokenizer"
        ) from error
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(
            f"{key}: expected {path} to be a tokenizer.json of the tokenizers library; got: "
            f"{error!s:.200}; give another file"
        ) from error


def count_ids(path: str | Path) -> int:
    """One more than the largest id of a tokenizer.json, added tokens included.

    Raises:
      ValueError: As `read_tokenizer`.
    """
    return largest_id(read_tokenizer(path)) + 1


def largest_id(tokenizer: Tokenizer) -> int:
    """The largest id that a tokenizer can give; -1 where it has none."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
