"""Numbers of a run: one JSON object per line, and the same as TensorBoard scalars."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from ..atomic import write_whole
from .processes import is_first


class Metrics:
    """Appends to `metrics.jsonl` and to a new event file in `tensorboard/`.

    Args:
      folder: The run's folder.
      resume_step: Steps after this one are dropped, because they are about to be computed again.

    Raises:
      OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path, *, resume_step: int = 0):
        path = folder / "metrics.jsonl"
        kept = [row for row in read_metrics(path) if row["step"] <= resume_step]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._lines = path.open("a", encoding="utf-8")
        # TensorBoard drops what an earlier session wrote from the step of `purge_step` on.
        self._events = SummaryWriter(
            str(folder / "tensorboard"),
            purge_step=resume_step + 1,
            filename_suffix=f".{time.time_ns()}",
        )

    def write(self, step: int, **values: float) -> None:
        """Records values by name at a step (steps done so far)."""
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self._lines.flush()  # raises where the disk is full; the other writer is a thread
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        self._lines.close()
        self._events.close()


class NoMetrics(Metrics):
    """What a process has that leaves writing to another."""

    def __init__(self) -> None:
        pass

    def write(self, step: int, **values: float) -> None:
        pass

    def close(self) -> None:
        pass


def open_metrics(folder: Path, resume_step: int) -> Metrics:
    """The metrics of a run that goes on after a step; of several processes the first writes."""
    return Metrics(folder, resume_step=resume_step) if is_first() else NoMetrics()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
