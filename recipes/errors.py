"""Errors that users see, and functions that read and write files and raise them."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

Say = Callable[[str], None]
"""A function that shows a message."""


class RecipeError(Exception):
    """An error that the user can fix; `exit_code` is 2 for wrong input, else 1."""

    def __init__(self, message: str, *, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


def told_by(error: BaseException) -> RecipeError | None:
    """Return a user's mistake as a RecipeError, also if the library raised it; None for bugs."""
    if isinstance(error, TypeError | ValueError) and str(error).startswith("unitscale."):
        return RecipeError(str(error))
    if isinstance(error, PermissionError):
        return RecipeError(f"{error}; change its permissions, or name another")
    return error if isinstance(error, RecipeError) else None


def complain(message: str) -> None:
    """Print the message of an error on standard error."""
    console = Console(stderr=True)
    console.print("error:", style="bold red", end=" ")
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def clipped(value: object) -> str:
    """Format a value for a message, shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextlib.contextmanager
def refused(what: str, todo: str, *, exit_code: int = 2) -> Iterator[None]:
    """Turn an OSError in the block into a RecipeError "what: reason; todo"."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RecipeError(f"{what}: {reason}; {todo}", exit_code=exit_code) from error


def read_text(path: Path, key: str, todo: str = "give the path of a readable file") -> str:
    """Read a UTF-8 file, without a byte order mark; messages name the config's `key`."""
    try:
        with refused(f"{key}: {path} cannot be read", todo):
            return path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{key}: {path} is not UTF-8 text: {error}; convert it") from error


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically: after an error the old file is unchanged."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def write_json(path: Path, tree: Any) -> None:
    write_whole(path, json.dumps(tree, ensure_ascii=False, indent=1) + "\n")
