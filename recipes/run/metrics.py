"""Numbers of a run: one JSON object per line, and the same as TensorBoard scalars."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from ..atomic import write_whole
from .processes import is_first

# Protocol buffers make their classes at run time, out of sight of type checkers.
_Event: Any = getattr(event_pb2, "Event")  # noqa: B009
_SessionLog: Any = getattr(event_pb2, "SessionLog")  # noqa: B009
_Summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009


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
        (folder / "tensorboard").mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        # Written record by record: the stock event writer reports a full disk from a thread.
        self._events_file = (folder / "tensorboard" / name).open("wb")
        self._events = RecordWriter(self._events_file)
        self._write_event(_Event(file_version="brain.Event:2"))
        # A restart tells TensorBoard to drop what an earlier session wrote from here on.
        start = _SessionLog(status=_SessionLog.START)
        self._write_event(_Event(step=resume_step + 1, session_log=start))

    def write(self, step: int, **values: float) -> None:
        """Records values by name at a step (steps done so far)."""
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self._lines.flush()
        scalars = [_Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write_event(_Event(step=step, summary=_Summary(value=scalars)))

    def close(self) -> None:
        self._lines.close()
        self._events_file.close()

    def _write_event(self, event: Any) -> None:
        event.wall_time = time.time()
        self._events.write(event.SerializeToString())
        self._events.flush()


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
