"""The one exception that the command line turns into a message instead of a traceback."""

from __future__ import annotations


class RecipeError(Exception):
    """Something the user can put right.

    Args:
      message: What was expected, what came, and what to do, in one or a few lines.
      exit_code: What the process returns: 2 for wrong input, 1 for a run that failed.
    """

    def __init__(self, message: str, *, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code
