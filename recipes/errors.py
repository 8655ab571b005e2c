"""The one exception that the command line turns into a message instead of a traceback, and how."""

from __future__ import annotations

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


def complain(message: str) -> None:
    """Prints the message of an error on standard error."""
    console = Console(stderr=True)
    console.print("error:", style="bold red", end=" ")
    console.print(message, markup=False, highlight=False, soft_wrap=True)
