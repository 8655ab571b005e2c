"""The one exception that the command line turns into a message, and reading that raises it."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console


class RecipeError(Exception):
    """Something the user can put right.

    Args:
      message: What was expected, what came, and what to do, in one or a few lines.
      exit_code: What the process returns: 2 for wrong input, 1 for a run that failed.
    """

    def __init__(self, message: str, *, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


def told_by(error: BaseException) -> RecipeError | None:
    """The message that an error has for the user, or None: then it is one of the program.

    What the library says of a call it says to the user: an option of YAML was handed on.
    """
    if isinstance(error, TypeError | ValueError) and str(error).startswith("unitscale."):
        return RecipeError(str(error))
    return error if isinstance(error, RecipeError) else None


@contextlib.contextmanager
def refused(what: str, todo: str, *, exit_code: int = 2) -> Iterator[None]:
    """Makes an OSError of the block a message: what could not be done, why, and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RecipeError(f"{what}: {reason}; {todo}", exit_code=exit_code) from error


def read_text(path: Path, key: str, todo: str = "give the path of a readable file") -> str:
    """The text of a UTF-8 file without a byte order mark; `key` named the file."""
    try:
        with refused(f"{key}: {path} cannot be read", todo):
            return path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{key}: {path} is not UTF-8 text: {error}; convert the file to UTF-8"
        ) from error


def complain(message: str) -> None:
    """Prints the message of an error on standard error."""
    console = Console(stderr=True)
    console.print("error:", style="bold red", end=" ")
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def json_lines(lines: Iterable[str | bytes], where: str) -> Iterator[tuple[int, Any]]:
    """The values of lines of JSON and their numbers; `where` comes before a number in messages."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RecipeError(
                    f"{where}{number}: malformed JSON, or not in UTF-8: {error}; correct or "
                    "remove the line"
                ) from error


def clipped(value: object, limit: int = 60) -> str:
    """A value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
