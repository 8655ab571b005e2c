"""Files that a config names, and those of a run's predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..atomic import write_whole
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
        return path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise RecipeError(
            f"{key}: {path} cannot be read: {error.strerror}; give the path of a readable file"
        ) from error
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{key}: {path} is not UTF-8 text: {error}; convert the file to UTF-8"
        ) from error


def write_json(path: Path, tree: Any) -> None:
    """Writes a whole JSON file or, on any error, leaves the old one as it was."""
    write_whole(path, json.dumps(tree, ensure_ascii=False, indent=1) + "\n")


def shown(value: object, limit: int = 60) -> str:
    """A value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
