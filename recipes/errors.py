"""Errors that users see, and reading and writing of files, which raises them."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console


class RecipeError(Exception):
    """An error that the user can put right; `exit_code` is 2 for wrong input, else 1."""

    def __init__(self, message: str, *, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


def told_by(error: BaseException) -> RecipeError | None:
    """The error as one for the user, such as those of the library, or None if it is a bug."""
    if isinstance(error, TypeError | ValueError) and str(error).startswith("unitscale."):
        return RecipeError(str(error))
    return error if isinstance(error, RecipeError) else None


def complain(message: str) -> None:
    """Print the message of an error on standard error."""
    console = Console(stderr=True)
    console.print("error:", style="bold red", end=" ")
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def clipped(value: object, limit: int = 60) -> str:
    """A value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


@contextlib.contextmanager
def refused(what: str, todo: str, *, exit_code: int = 2) -> Iterator[None]:
    """Turn an OSError of the block into a message: what could not be done, why, and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RecipeError(f"{what}: {reason}; {todo}", exit_code=exit_code) from error


def read_text(path: Path, key: str, todo: str = "give the path of a readable file") -> str:
    """Read a UTF-8 file, which the config's `key` named, without its byte order mark."""
    try:
        with refused(f"{key}: {path} cannot be read", todo):
            return path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{key}: {path} is not UTF-8 text: {error}; convert the file to UTF-8"
        ) from error


def json_lines(lines: Iterable[str | bytes], where: str) -> Iterator[tuple[int, Any]]:
    """Parse lines of JSON, with their numbers; `where` comes before a number in messages."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RecipeError(
                    f"{where}{number}: malformed JSON, or not in UTF-8: {error}; correct or "
                    "remove the line"
                ) from error


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file as a whole; on any error the old one stays."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def write_json(path: Path, tree: Any) -> None:
    write_whole(path, json.dumps(tree, ensure_ascii=False, indent=1) + "\n")
