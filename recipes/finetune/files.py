"""Text of the files that a config names."""

from __future__ import annotations

from pathlib import Path

from ..errors import RecipeError


def read_utf8(path: Path, key: str) -> str:
    """The text of one file; a byte order mark at its start is left out.

    Args:
      path: The file.
      key: The config key that named it, for messages.

    Raises:
      RecipeError: It cannot be read, or is not UTF-8 (the message has the byte's offset).
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise RecipeError(f"{key}: {path} does not exist; give the path of a file") from None
    except OSError as error:
        raise RecipeError(
            f"{key}: {path} cannot be read: {error.strerror}; give the path of a readable file"
        ) from error
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{key}: {path} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset "
            f"{error.start} ({error.reason}); convert the file to UTF-8"
        ) from error


def shown(value: object, limit: int = 60) -> str:
    """A value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
