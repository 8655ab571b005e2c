"""The one exception that the command line turns into a message instead of a traceback, and how."""

from __future__ import annotations

from pathlib import Path

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


def cannot_write(folder: Path, error: OSError, *, kept: str | None = None) -> RecipeError:
    """The error of a run whose folder cannot be written.

    Args:
      folder: The run's.
      error: What the system said.
      kept: What of the run is safe, in words.
    """
    safe = "" if kept is None else f"{kept}; "
    return RecipeError(
        f"cannot write to {folder}: {error.strerror or error}; {safe}free space or change "
        "permissions, then run the same command again",
        exit_code=1,
    )


def complain(message: str) -> None:
    """Prints the message of an error on standard error."""
    console = Console(stderr=True)
    console.print("error:", style="bold red", end=" ")
    console.print(message, markup=False, highlight=False, soft_wrap=True)
