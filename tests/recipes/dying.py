"""Work for processes of their own, which import little else."""

import logging
import os
import time
from pathlib import Path

from recipes.run.processes import StopRequest


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


def waits_for_a_stop(number: int, folder: str) -> None:
    """Work that leaves a file behind when it begins, and another when it is asked to stop."""
    with StopRequest() as stop:
        Path(folder, f"begun-{number}").touch()
        for _ in range(300):
            if stop.signal is not None:
                Path(folder, f"stopped-{number}").touch()
                break
            time.sleep(0.1)


def level_of_orbax(number: int) -> tuple[int, int]:
    """Work that tells from which level on its process shows the reports of Orbax."""
    return number, logging.getLogger("absl").getEffectiveLevel()
