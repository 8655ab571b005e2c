"""Numbers of a run: one JSON object per line, and the same as TensorBoard scalars."""

import json
import os
import time
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.summary import scalar

from ..atomic import write_whole
from .processes import is_first

# Protocol buffers make their classes at run time, out of sight of type checkers.
_Event: Any = getattr(event_pb2, "Event")  # noqa: B009
_SessionLog: Any = getattr(event_pb2, "SessionLog")  # noqa: B009
_Summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009


class Metrics:
    """Appends to `metrics.jsonl` and to a new event file in `tensorboard/`."""

    def __init__(self, folder: Path, *, resume_step: int = 0):
        path = folder / "metrics.jsonl"
        kept = [row for row in read_metrics(path) if row["step"] <= resume_step]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._lines = path.open("a", encoding="utf-8")
        (folder / "tensorboard").mkdir(exist_ok=True)
        # Written event by event: the library's own summary writer leaves it to a thread.
        path = folder / "tensorboard" / "events"
        self._events = EventsWriter(str(path), f".{os.getpid()}.{time.time_ns()}")
        # A restart tells TensorBoard to drop what an earlier session wrote from here on.
        start = _SessionLog(status=_SessionLog.START)
        self._write_event(step=resume_step + 1, session_log=start)

    def write(self, step: int, **values: float) -> None:
        """Records values by name at a step (steps done so far)."""
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self._lines.flush()
        scalars = [scalar(name, value).value[0] for name, value in values.items()]
        self._write_event(step=step, summary=_Summary(value=scalars))

    def close(self) -> None:
        self._lines.close()
        self._events.close()

    def _write_event(self, **fields: Any) -> None:
        self._events.write_event(_Event(wall_time=time.time(), **fields))
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
