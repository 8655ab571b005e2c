"""Tasks for worker processes, in a module that imports little."""

import logging
import os
import time
from pathlib import Path


def dies_at_two(number: int, folder: str) -> str | None:
    """Kill the own process if the task says so."""
    if number == 2:
        os._exit(9)
    Path(folder, str(number)).touch()
    return None


def takes_a_while(number: int, folder: str) -> int:
    """Write a file, and wait."""
    Path(folder, str(number)).touch()
    time.sleep(0.5)
    return number


def level_of_orbax(number: int) -> tuple[int, int]:
    """Return the log level of Orbax in the process."""
    return number, logging.getLogger("absl").getEffectiveLevel()
