"""Work for processes of their own, which import little else."""

import logging
import os
import time
from pathlib import Path


def dies_at_two(number: int, folder: str) -> str | None:
    """Work of a task whose process is killed, and of others that are not."""
    if number == 2:
        os._exit(9)
    Path(folder, str(number)).touch()
    return None


def takes_a_while(number: int, folder: str) -> int:
    """Work that leaves a file behind."""
    Path(folder, str(number)).touch()
    time.sleep(0.5)
    return number


def level_of_orbax(number: int) -> tuple[int, int]:
    """Work that tells from which level on its process shows the reports of Orbax."""
    return number, logging.getLogger("absl").getEffectiveLevel()
